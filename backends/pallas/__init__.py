"""Pallas kernels for TPU, on JAX.

A kernel reads the sequence from HBM into VMEM, block by block, from the first to the last, and in
the backward pass from the last to the first. The state stays in VMEM between blocks, and every
tensor is read or written once.

A file defines `forward` and `backward` with the parameters of those in the file of the same name
in `backends/jax`. `replace_passes` of the `Kernel` in that file makes a `Kernel` from them, or
`linear_attention_kernel`, since plain JAX calls `keras_recurrent/portable` for linear attention.
"""

import importlib

import jax


def unavailable():
    """Reason the kernels cannot be built with the installed JAX, or None."""
    try:
        importlib.import_module(f"{__name__}._pallas")
    except ImportError as error:
        return f"JAX {jax.__version__} lacks a part of Pallas: {error}"
    return None
