"""Tile sizes of `norm_linear`, by the number of rows and the size of the weights.

They were chosen by timing whole decoding steps of HGRN2 1.3B and RecurrentGemma 2B on an H200; for
several rows, by timing the layers of HGRN2 1.3B on an H100 and an H200.
"""

import itertools
from typing import NamedTuple

from .._runtime.launch import cdiv, next_power_of_2

_NO_LIMIT = 2**31
# One row takes the first tile whose columns, summed over all weights, and channels fit. With many
# columns, programs read whole lines of memory; with fewer, such tiles would be too few for all
# multiprocessors. Overlap matters as much: the next launch starts early where two programs fit on
# a multiprocessor.
_ROW_OPTIONS = {"BLOCK_B": 1, "STAGES": 1, "num_warps": 8}
_ROW_TILES = (  # (minimum of columns, maximum of channels, tile)
    (6144, _NO_LIMIT, {"BLOCK_N": 32, "BLOCK_K": 1024, "SUM_AT_END": False, "maxnreg": 128}),
    (3072, _NO_LIMIT, {"BLOCK_N": 16, "BLOCK_K": 2048, "SUM_AT_END": True}),
    (0, 2048, {"BLOCK_N": 16, "BLOCK_K": 2048, "SUM_AT_END": False, "maxnreg": 128}),
    (0, 6144, {"BLOCK_N": 16, "BLOCK_K": 1024, "SUM_AT_END": True}),
    (0, _NO_LIMIT, {"BLOCK_N": 16, "BLOCK_K": 2048, "SUM_AT_END": True}),
)
_FLOAT32_ROW_BLOCK_K = 512
# One row, channels split among programs: with few columns, this reads whole lines of memory and
# still has enough programs.
_SPLIT_ROW_TILE = {"BLOCK_N": 64, "BLOCK_K": 512, "SUM_AT_END": False, "maxnreg": 128}
_FEW_COLUMNS = 4096
_SPLIT_ROW_CHANNELS, _SPLIT_ROWS_CHANNELS = 4096, 1024  # channels from which on they are split
# Several rows: {BLOCK_B: (stages, warps)}. With a gate, a program reads two weights.
_ROWS_TILE = {"BLOCK_N": 64, "BLOCK_K": 64}
_STAGES_AND_WARPS = {16: (10, 4), 64: (8, 4), 128: (6, 8)}
_GATED_STAGES_AND_WARPS = {16: (8, 4), 64: (7, 8), 128: (5, 8)}
_FLOAT32_ROWS_TILE = {"BLOCK_B": 16, "BLOCK_N": 32, "BLOCK_K": 64, "STAGES": 2, "num_warps": 4}
# Compute capabilities whose shared memory is too small for these stages, and its bytes.
_LITTLE_MEMORY, _BYTES_OF_LITTLE_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1)), 99 * 1024
# Channels are split into the fewest equal parts that make so many programs: {BLOCK_B: number}, and
# the number with a larger BLOCK_B.
_PROGRAMS, _MANY_ROWS_PROGRAMS, _MAX_PARTS = {1: 160, 16: 240}, 110, 16


class Product(NamedTuple):
    """The constants of a program of `columns_kernel`, and its launch options."""

    K: int  # channels of x
    LENGTH: int  # channels that a program reads
    BLOCK_B: int
    BLOCK_N: int
    BLOCK_K: int
    STAGES: int
    SUM_AT_END: bool
    NORM: bool
    GATE: int  # 0, or 1 for silu and 2 for gelu
    NUM_SQUARES: int  # sums of squares of a row, or 0
    SHORT: bool
    num_warps: int
    maxnreg: int | None = None

    @property
    def launch_options(self):
        return {"num_warps": self.num_warps, "maxnreg": self.maxnreg}


def is_split(rows, channels, columns):
    """Returns True if several programs share the channels of a column of a single weight."""
    least = _SPLIT_ROW_CHANNELS if rows == 1 else _SPLIT_ROWS_CHANNELS
    return columns <= _FEW_COLUMNS and channels >= least


def tile_options(rows, channels, columns, dtype, gate, parts, capability):
    """The constants and launch options of a program. LENGTH is the number of its channels.

    columns: the columns of all weights. parts: boolean, whether channels may be split among
    programs; the weight must be a single one, without a norm.
    """
    parts = parts and is_split(rows, channels, columns)
    if rows == 1:
        tile = _ROW_OPTIONS | _row_tile(channels, columns, dtype, parts)
    elif dtype == "float32":
        tile = _FLOAT32_ROWS_TILE | {"SUM_AT_END": False}
    else:
        tile = _rows_tile(rows, gate, capability) | {"SUM_AT_END": False}
    block = min(tile["BLOCK_K"], next_power_of_2(max(16, channels)))
    length = channels
    if parts:
        blocks, tiles = cdiv(channels, block), cdiv(columns, tile["BLOCK_N"])
        least = _PROGRAMS.get(tile["BLOCK_B"], _MANY_ROWS_PROGRAMS)
        length = block * (blocks // _num_parts(blocks, tiles, least))
    return tile | {"BLOCK_K": block, "LENGTH": min(length, channels)}


def tile_starts(widths, block):
    """The first tile of `block` columns of each kernel, and the number of tiles of all kernels."""
    return tuple(itertools.accumulate((cdiv(n, block) for n in widths), initial=0))


def num_squares(squares):
    """The number of sums of squares of a row, [B, NUM_SQUARES]; 0 for None."""
    return 0 if squares is None else squares.shape[1]


def _num_parts(blocks, tiles, least):
    divisors = [n for n in range(1, _MAX_PARTS + 1) if blocks % n == 0]
    return next((n for n in divisors if n * tiles >= least), divisors[-1])


def _rows_tile(rows, gate, capability):
    stages_and_warps = _GATED_STAGES_AND_WARPS if gate else _STAGES_AND_WARPS
    block = next(n for n in stages_and_warps if rows <= n)
    stages, warps = stages_and_warps[block]
    if capability in _LITTLE_MEMORY:  # except on Hopper, all stages but one take memory
        rows_and_columns = block + _ROWS_TILE["BLOCK_N"] * (2 if gate else 1)
        bytes_per_stage = 2 * _ROWS_TILE["BLOCK_K"] * rows_and_columns
        stages = min(stages, 1 + _BYTES_OF_LITTLE_MEMORY // bytes_per_stage)
    return _ROWS_TILE | {"BLOCK_B": block, "STAGES": stages, "num_warps": warps}


def _row_tile(channels, columns, dtype, parts):
    if dtype == "float32":
        return {"BLOCK_N": 16, "BLOCK_K": _FLOAT32_ROW_BLOCK_K, "SUM_AT_END": True}
    if parts:
        return _SPLIT_ROW_TILE
    return next(t for least, most, t in _ROW_TILES if columns >= least and channels <= most)
