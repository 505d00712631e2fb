"""Helpers shared by the kernels: unsupported tensors, the VMEM of the chip, calls, token kinds."""

import os

import jax
import jax.numpy as jnp

from ..constants import CONTINUES, PADDING
from ..jax._common import size_reason
from ..jax._platforms import switch_jaxprs
from . import _pallas as pl

LANES = 128
ROWS = 16  # in a tile of 16-bit numbers, or in two tiles of 32-bit numbers

# MiB of VMEM that a kernel may use: that of a core, minus what XLA uses around a kernel.
VMEM = {"v4": 14, "v5e": 64, "v5p": 32, "v6e": 64, "7x": 32}
VMEM_OVERRIDE = "KERAS_RECURRENT_TPU_VMEM_MIB"


def unsupported_reason(**arguments):
    """Reason the kernels do not support the shapes and dtypes of an operation's tensors, or None.

    All other arguments are supported.
    """
    tensors = [tensor for tensor in arguments.values() if hasattr(tensor, "dtype")]
    if reason := size_reason(*tensors):
        return reason
    for tensor in tensors:
        if jnp.issubdtype(tensor.dtype, jnp.floating) and tensor.dtype not in (
            jnp.float32,
            jnp.bfloat16,
        ):
            return f"needs float32 or bfloat16, got {tensor.dtype}"
    return None


def vmem_bytes():
    """The VMEM that a kernel may use, from the environment variable or else from `VMEM`.

    The chip is that of the ambient mesh, else of the default device. Without a TPU, as when a CPU
    compiles for one, the chip with the least VMEM is assumed.
    """
    chip = str(pl.get_tpu_info().chip_version) if pl.is_tpu_device() else "v4"
    return int(os.environ.get(VMEM_OVERRIDE, VMEM.get(chip, VMEM["v4"]))) * 2**20


def pallas_call(kernel, grid, **options):
    """Wraps `jax.experimental.pallas.pallas_call`, with an error on other platforms than TPU.

    The first two axes of the grid are parallel, and the others sequential.
    """
    semantics: tuple = "parallel", "parallel", *["arbitrary"] * (len(grid) - 2)
    parameters = pl.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=vmem_bytes())
    call = pl.pallas_call(kernel, grid=grid, compiler_params=parameters, **options)

    def checked(*arrays):
        jaxpr, results = jax.make_jaxpr(call, return_shape=True)(*arrays)
        if any(equation.params.get("interpret") for equation in jaxpr.eqns):
            return call(*arrays)  # interpreted, on any platform
        return switch_jaxprs({"tpu": jaxpr}, results, arrays)

    return checked


def round_up(size, multiple):
    return -(-size // multiple) * multiple


def kinds_over_lanes(token_kind, start, length, size):
    """The kinds of a block of tokens, broadcast over lanes, [size, LANES].

    The block begins at token `start`; positions beyond the sequence `length` count as padding.
    token_kind: [1, size], or None if all tokens continue a document.
    """
    token = start + jax.lax.broadcasted_iota(jnp.int32, (size, LANES), 0)
    if token_kind is None:
        return jnp.where(token < length, CONTINUES, PADDING)
    return jnp.where(token < length, jnp.broadcast_to(token_kind, (LANES, size)).T, PADDING)
