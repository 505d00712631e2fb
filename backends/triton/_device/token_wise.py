"""What the kernels of operations without a state share.

Each program goes through several tiles of tokens on its own. Where it sums something over tokens
for each channel, it stores its own sums as one line of a small tensor, and these lines are summed
afterwards: so the same inputs give the same bits.
"""

import math
from typing import NamedTuple

import triton

# Sixteen for each multiprocessor of an H100 or H200, which then has 128 registers for each thread.
# A constant, not what the device has: the order of sums depends on it.
_WARPS = 132 * 16


class Tile(NamedTuple):
    """The tile of a program, ROWS tokens of BLOCK_D channels, and its warps."""

    BLOCK_D: int
    ROWS: int
    num_warps: int

    def tiles(self, rows):
        """How many tiles, one below another, cover all rows."""
        return triton.cdiv(rows, self.ROWS)

    def programs(self, rows, blocks=1):
        """How many programs share the rows, in each of so many blocks of channels."""
        return min(self.tiles(rows), max(1, _WARPS // (self.num_warps * blocks)))


def num_rows(x):
    """How many rows [..., D] has."""
    return math.prod(x.shape[:-1]) if x.shape[-1] else 0
