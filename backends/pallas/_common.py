"""What the kernels share: what is refused, the VMEM there is, and token kinds beside channels."""

import os

import jax
import jax.numpy as jnp

from keras_recurrent.backends.pallas._lazy import pltpu

LANES = 128
ROWS = 16  # of a tile of 16-bit numbers, and of two tiles of 32-bit ones
GOES_ON, STARTS, PADDING = 0, 1, 2

# MiB of VMEM that a kernel may fill: what a core has, less what XLA keeps in it around a kernel.
VMEM = {"v4": 14, "v5e": 64, "v5p": 32, "v6e": 64, "7x": 32}
VMEM_OVERRIDE = "KERAS_RECURRENT_TPU_VMEM_MIB"


def refusal(*tensors):
    """Why the kernels refuse tensors, by what is static; None if they accept them."""
    for tensor in tensors:
        if tensor is None:
            continue
        if not all(isinstance(size, int) for size in tensor.shape):
            return f"needs sizes that are known when a program is traced, got {tensor.shape}"
        if 0 in tensor.shape:
            return f"needs tensors that are not empty, got {tensor.shape}"
        if jnp.issubdtype(tensor.dtype, jnp.floating) and tensor.dtype not in (
            jnp.float32,
            jnp.bfloat16,
        ):
            return f"needs float32 or bfloat16, got {tensor.dtype}"
    return None


def vmem_bytes():
    """VMEM for a kernel on the chip that a program is traced for, of `VMEM` or the environment.

    The chip is that of the ambient mesh, else the default device. Where neither is a TPU, as when
    a CPU compiles for one, blocks fit the smallest.
    """
    chip = str(pltpu.get_tpu_info().chip_version) if pltpu.is_tpu_device() else "v4"
    return int(os.environ.get(VMEM_OVERRIDE, VMEM.get(chip, VMEM["v4"]))) * 2**20


def rounded_up(size, multiple):
    return -(-size // multiple) * multiple


def kinds_beside_channels(token_kind, start, length, size):
    """A block of kinds, each in all lanes of its row [size, LANES]; beyond the end it is padding.

    token_kind: [1, size], or None where every token goes on.
    """
    token = start + jax.lax.broadcasted_iota(jnp.int32, (size, LANES), 0)
    if token_kind is None:
        return jnp.where(token < length, GOES_ON, PADDING)
    return jnp.where(token < length, jnp.broadcast_to(token_kind, (LANES, size)).T, PADDING)
