"""What the kernels share: tensors that they refuse, the chip's VMEM, blocks of token kinds."""

import os

import jax
import jax.numpy as jnp

from ..constants import GOES_ON, PADDING
from ..jax._common import size_reason
from ._lazy import pltpu

LANES = 128
ROWS = 16  # of a tile of 16-bit numbers, or of two tiles of 32-bit numbers

# MiB of VMEM that a kernel may use: that of a core, less what XLA uses of it around a kernel.
VMEM = {"v4": 14, "v5e": 64, "v5p": 32, "v6e": 64, "7x": 32}
VMEM_OVERRIDE = "KERAS_RECURRENT_TPU_VMEM_MIB"


def refusal(*tensors):
    """Why the kernels refuse tensors of these shapes and dtypes; None if they accept them."""
    if reason := size_reason(*tensors):
        return reason
    for tensor in tensors:
        if tensor is None:
            continue
        if jnp.issubdtype(tensor.dtype, jnp.floating) and tensor.dtype not in (
            jnp.float32,
            jnp.bfloat16,
        ):
            return f"needs float32 or bfloat16, got {tensor.dtype}"
    return None


def vmem_bytes():
    """The VMEM that a kernel may use, from the environment variable or else from `VMEM`.

    The chip is that of the ambient mesh, else of the default device. If it is no TPU, as when a
    CPU compiles for one, it is taken to be the chip with the least VMEM.
    """
    chip = str(pltpu.get_tpu_info().chip_version) if pltpu.is_tpu_device() else "v4"
    return int(os.environ.get(VMEM_OVERRIDE, VMEM.get(chip, VMEM["v4"]))) * 2**20


def rounded_up(size, multiple):
    return -(-size // multiple) * multiple


def kinds_beside_channels(token_kind, start, length, size):
    """The kinds of a block of tokens, each in all lanes of its row, [size, LANES].

    The block begins at token `start`; places beyond the sequence's `length` count as padding.
    token_kind: [1, size], or None if all tokens go on.
    """
    token = start + jax.lax.broadcasted_iota(jnp.int32, (size, LANES), 0)
    if token_kind is None:
        return jnp.where(token < length, GOES_ON, PADDING)
    return jnp.where(token < length, jnp.broadcast_to(token_kind, (LANES, size)).T, PADDING)
