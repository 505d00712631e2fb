"""What the Triton kernels share on the host: what they refuse, their tiles and their launch."""

import contextlib
from typing import NamedTuple

import torch
import triton

INTERPRETED = triton.knobs.runtime.interpret
_MANY_CHAINS = 128  # about one for each multiprocessor of a large GPU
# With 128 registers, a multiprocessor holds 16 warps.
MAX_REGISTERS = 128


def refusal(*tensors):
    """Why none of the kernels here takes these tensors (or Nones); None if they do."""
    given = [t for t in tensors if t is not None]
    for tensor in given:
        if tensor.dtype == torch.float64:
            return "computes in float32, got a float64 tensor"
        if not tensor.is_cuda and not (INTERPRETED and tensor.device.type == "cpu"):
            return f"needs CUDA tensors, got one on {tensor.device}"
    return None


def contiguous(*tensors):
    """As the kernels read them (or Nones)."""
    return [None if x is None else x.contiguous() for x in tensors]


def on_device_of(tensor):
    """Triton launches on the current device, which need not be that of the tensors."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


class Tiling(NamedTuple):
    """How a program holds its tile: GROUPS of ROWS tokens each, for BLOCK_D channels.

    A thread has some channels of one group: it walks along ROWS tokens on its own, and only the
    totals of the groups meet.
    """

    BLOCK_D: int
    GROUPS: int
    ROWS: int
    num_warps: int

    @property
    def tokens(self):
        return self.GROUPS * self.ROWS


def tiling(batch, length, width, rows, rows_of_few_chains):
    """64 channels, 128 bytes in bfloat16, and eight of them a thread; less where there is less.

    The tiles of a chain wait for each other: where few chains have to fill the GPU, each should
    have few of them.
    """
    block_d = min(64, max(16, triton.next_power_of_2(width)))
    chains = batch * triton.cdiv(width, block_d)
    num_warps = 4 if chains >= _MANY_CHAINS else 8
    rows = rows if chains >= _MANY_CHAINS else rows_of_few_chains
    groups = 4 * num_warps
    while groups > 1 and groups * rows >= 2 * length:
        groups //= 2
    return Tiling(block_d, groups, rows, num_warps)
