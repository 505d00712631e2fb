"""What the kernels of operations without a state share.

Programs walk over tiles of some rows of tokens, each for itself. What they find for a channel over
all their rows they write down, one line a program, and these few lines are summed after them: so
the same inputs give the same bits.
"""

from typing import NamedTuple

import triton

# Sixteen for each multiprocessor of an H100 or H200, which then has room for 128 registers a
# thread. Not asked of the device: a sum would depend on it.
_WARPS = 132 * 16


class Tile(NamedTuple):
    """What a program has at hand: so many rows of so many channels."""

    BLOCK_D: int
    ROWS: int
    num_warps: int

    def tiles(self, rows):
        """How many of them one below another cover all rows."""
        return triton.cdiv(rows, self.ROWS)

    def programs(self, rows, blocks=1):
        """How many programs go through the rows, in each block of channels."""
        return min(self.tiles(rows), max(1, _WARPS // (self.num_warps * blocks)))


def rows_of(x):
    """How many rows [..., D] has."""
    width = x.shape[-1]
    return x.numel() // width if width else 0
