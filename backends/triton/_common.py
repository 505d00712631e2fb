"""What every launch of a Triton kernel needs: which arguments are refused, tiles, the device."""

import contextlib
from typing import NamedTuple

import torch
import triton
import triton.language as tl

INTERPRETED = triton.knobs.runtime.interpret  # TRITON_INTERPRET=1
IN_INTERPRETER = tl.constexpr(INTERPRETED)  # the same, for kernels
MULTIPROCESSORS = 128  # about as many as a large GPU has
_MANY_CHAINS = MULTIPROCESSORS


def refusal(*tensors):
    """Why no Triton kernel takes these tensors, of which some may be None; None if they do."""
    given = [t for t in tensors if t is not None]
    for tensor in given:
        if tensor.dtype == torch.float64:
            return "computes in float32, got a float64 tensor"
        if not tensor.is_cuda and not (INTERPRETED and tensor.device.type == "cpu"):
            return f"needs CUDA tensors, got one on {tensor.device}"
    return None


def contiguous(*tensors):
    """The tensors in the memory layout that kernels assume; None stays None."""
    return [None if x is None else x.contiguous() for x in tensors]


def empty_like(*tensors):
    """New contiguous tensors of the same shapes and dtypes."""
    return tuple(x.new_empty(x.shape) for x in tensors)


def on_device_of(tensor):
    """A context in which Triton launches on the tensor's device, not on torch's current one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


class Tiling(NamedTuple):
    """The tile of a program, GROUPS * ROWS tokens of BLOCK_D channels, and its launch options.

    A thread computes some channels of one group, ROWS tokens one after the other. Only the results
    of whole groups pass between threads. Of bfloat16, 64 channels are 128 bytes, of which a thread
    loads 16 (8 channels) at once. With 128 registers a thread, 16 warps fit on a multiprocessor.
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
        """Shrinks the tile for short sequences or few channels."""
        block_d = min(self.BLOCK_D, max(16, triton.next_power_of_2(width)))
        groups = self.GROUPS
        while groups > 1 and groups * self.ROWS >= 2 * length:
            groups //= 2
        return Tiling(block_d, groups, self.ROWS, self.num_warps, self.maxnreg)


class ChainTilings(NamedTuple):
    """The candidates for the tiles of a chain (`_chain.py`), in each tuple the default first.

    The tiles of a chain wait for each other. Where few chains have to fill a GPU, tiles have more
    tokens, so that a chain has fewer of them.
    """

    for_many_chains: tuple[Tiling, ...]
    for_few_chains: tuple[Tiling, ...]

    def candidates(self, batch, width):
        chains = batch * triton.cdiv(width, self.for_many_chains[0].BLOCK_D)
        return self.for_many_chains if chains >= _MANY_CHAINS else self.for_few_chains
