"""What the Triton kernels share on the host: what they refuse, their tiles and their launch."""

import contextlib
from typing import NamedTuple

import torch
import triton

INTERPRETED = triton.knobs.runtime.interpret
_MANY_CHAINS = 128  # about one for each multiprocessor of a large GPU


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
    totals of the groups meet. 64 channels are 128 bytes in bfloat16, and eight of them a thread's.
    With 128 registers a thread, a multiprocessor holds 16 warps.
    """

    BLOCK_D: int
    GROUPS: int
    ROWS: int
    num_warps: int
    maxnreg: int | None = None

    @property
    def tokens(self):
        return self.GROUPS * self.ROWS

    def fitted(self, length, width):
        """Less where there is less."""
        block_d = min(self.BLOCK_D, max(16, triton.next_power_of_2(width)))
        groups = self.GROUPS
        while groups > 1 and groups * self.ROWS >= 2 * length:
            groups //= 2
        return Tiling(block_d, groups, self.ROWS, self.num_warps, self.maxnreg)


class Tilings(NamedTuple):
    """What may be the fastest, the default first.

    The tiles of a chain wait for each other: where few chains have to fill the GPU, each should
    have few of them.
    """

    of_many_chains: tuple[Tiling, ...]
    of_few_chains: tuple[Tiling, ...]

    def of(self, batch, width):
        many = batch * triton.cdiv(width, self.of_many_chains[0].BLOCK_D) >= _MANY_CHAINS
        return self.of_many_chains if many else self.of_few_chains
