"""Tiles of the kernels of operations without a state.

Each program goes through several tiles of tokens. Its sums over tokens are one line of a small
tensor, and these lines are summed afterwards, so that results are bit-identical for equal inputs.
"""

import math
from typing import NamedTuple

from .._runtime.launch import cdiv

# Sixteen for each multiprocessor of an H100 or H200, which leaves 128 registers for each thread.
# A constant, not the number of the device at hand: the order of sums depends on it.
_WARPS = 132 * 16


class Tile(NamedTuple):
    """The tile of a program, ROWS tokens of BLOCK_D channels, and its warps."""

    BLOCK_D: int
    ROWS: int
    num_warps: int

    def tiles(self, rows):
        """Number of tiles that cover all rows."""
        return cdiv(rows, self.ROWS)

    def programs(self, rows, blocks=1):
        """Number of programs that share the rows of one of `blocks` blocks of channels."""
        return min(self.tiles(rows), max(1, _WARPS // (self.num_warps * blocks)))


def num_rows(x):
    """Number of rows of [..., D]."""
    return math.prod(x.shape[:-1]) if x.shape[-1] else 0
