"""What a program of `norm_linear` takes of a map, by the rows and the size of the maps.

These were chosen in whole steps of HGRN2 1.3B and RecurrentGemma 2B on an H200.
"""

import triton

_MANY = 2**31
# Of one row: the first whose columns, of all maps together, and channels fit. From many columns on,
# lines of memory are read whole; below, there would be too few programs for all multiprocessors.
# What runs beside matters as much: a launch begins early where two programs fit a multiprocessor.
_OF_ONE_ROW = {"BLOCK_B": 1, "STAGES": 1, "num_warps": 8}
_TILES_OF_ONE_ROW = (  # columns at least, channels at most
    (6144, _MANY, {"BLOCK_N": 32, "BLOCK_K": 1024, "AT_ONCE": False, "maxnreg": 128}),
    (3072, _MANY, {"BLOCK_N": 16, "BLOCK_K": 2048, "AT_ONCE": True}),
    (0, 2048, {"BLOCK_N": 16, "BLOCK_K": 2048, "AT_ONCE": False, "maxnreg": 128}),
    (0, 6144, {"BLOCK_N": 16, "BLOCK_K": 1024, "AT_ONCE": True}),
    (0, _MANY, {"BLOCK_N": 16, "BLOCK_K": 2048, "AT_ONCE": True}),
)
_BLOCK_K_OF_FLOAT32 = 512
# Of one row in parts: whole lines of memory, and enough programs, where there are few columns.
_PART_OF_ONE_ROW = {"BLOCK_N": 64, "BLOCK_K": 512, "AT_ONCE": False, "maxnreg": 128}
_FEW_COLUMNS = 4096
_CHANNELS_OF_ONE_ROW, _CHANNELS_OF_ROWS = 4096, 1024  # from which on a map is in parts
_TILE_OF_ROWS = {"BLOCK_B": 16, "BLOCK_N": 64, "BLOCK_K": 64, "STAGES": 8, "num_warps": 4}
# With a gate, a program reads two kernels.
_TILE_OF_GATED = {"BLOCK_B": 16, "BLOCK_N": 64, "BLOCK_K": 64, "STAGES": 6, "num_warps": 4}
_TILE_OF_FLOAT32 = {"BLOCK_B": 16, "BLOCK_N": 32, "BLOCK_K": 64, "STAGES": 2, "num_warps": 4}
# A map in parts has the fewest of one size that make so many programs.
_PROGRAMS_OF_ONE_ROW, _PROGRAMS_OF_ROWS, _MOST_PARTS = 160, 240, 16


def in_parts(rows, channels, columns):
    """Whether several programs make a column of a single map."""
    least = _CHANNELS_OF_ONE_ROW if rows == 1 else _CHANNELS_OF_ROWS
    return columns <= _FEW_COLUMNS and channels >= least


def tile_of(rows, channels, columns, dtype, gate, parts):
    """The tile of a program, whose LENGTH is all channels, or, with `parts`, may be some of them.

    Args:
        rows, channels: of x.
        columns: of all maps together.
        dtype: the name of that of the kernels.
        gate: whether two maps become one output.
        parts: whether it is a single map, whose columns may have several programs.
    """
    parts = parts and in_parts(rows, channels, columns)
    if rows == 1:
        tile = _OF_ONE_ROW | _tile_of_one_row(channels, columns, dtype, parts)
    elif dtype == "float32":
        tile = _TILE_OF_FLOAT32 | {"AT_ONCE": False}
    else:
        tile = (_TILE_OF_GATED if gate else _TILE_OF_ROWS) | {"AT_ONCE": False}
    block = min(tile["BLOCK_K"], triton.next_power_of_2(max(16, channels)))
    length = channels
    if parts:
        blocks, tiles = triton.cdiv(channels, block), triton.cdiv(columns, tile["BLOCK_N"])
        least = _PROGRAMS_OF_ONE_ROW if rows == 1 else _PROGRAMS_OF_ROWS
        length = block * (blocks // _number_of_parts(blocks, tiles, least))
    return tile | {"BLOCK_K": block, "LENGTH": min(length, channels)}


def _number_of_parts(blocks, tiles, least):
    found = [n for n in range(1, _MOST_PARTS + 1) if blocks % n == 0]
    return next((n for n in found if n * tiles >= least), found[-1])


def _tile_of_one_row(channels, columns, dtype, parts):
    if dtype == "float32":
        return {"BLOCK_N": 16, "BLOCK_K": _BLOCK_K_OF_FLOAT32, "AT_ONCE": True}
    if parts:
        return _PART_OF_ONE_ROW
    return next(t for least, most, t in _TILES_OF_ONE_ROW if columns >= least and channels <= most)
