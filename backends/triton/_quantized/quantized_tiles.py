"""Tile sizes of `norm_quantized_linear`, by the sizes of its weights."""

from .._decoding.norm_linear_tiles import width_options
from .._runtime.launch import cdiv, next_power_of_2
from .quantized_products import WARP_CHANNELS

# By bits, the wide and the narrow tile (ACROSS, WORDS): threads that read neighboring words of a
# channel, and words of each. Wide tiles read whole sectors or lines of memory; narrow tiles make
# enough programs for all multiprocessors of a large GPU.
_TILES = {8: ((4, 4), (4, 2)), 4: ((8, 1), (4, 1))}
_PROGRAMS = 132
_WARPS, _MAX_WARPS = 8, 16
_MAX_STEPS = 4  # with more steps, a program gets more warps
# Words of each of 16 channels that are being loaded, and registers of a thread: two programs, one
# of which may belong to the next launch, then fit on a multiprocessor.
_PENDING_WORDS = 4
_REGISTERS = 128


def tile_options(channels, widths, bits, gate, limbs, block_size):
    """The constants and launch options for a row of `channels` and weights of `widths` columns.

    With a gate, a program computes columns of both projections.
    """
    columns = widths[:1] if gate else widths

    def programs(shape):
        return sum(cdiv(n, shape[0] * shape[1] * 32 // bits) for n in columns)

    wide, narrow = _TILES[bits]
    # With 4 bits, two narrow programs on one multiprocessor do more work than one wide program.
    enough = programs(wide) >= _PROGRAMS if bits == 8 else programs(narrow) > _PROGRAMS
    across, words = wide if enough else narrow
    depth = _PENDING_WORDS // words
    if bits == 8 and gate and limbs > 1:
        depth = 1
    warps = _warps(channels, across)
    limited = bits == 4 and limbs < 3 and (not block_size or block_size >= WARP_CHANNELS)
    return {
        "K": channels,
        **width_options(widths),
        "ROW": next_power_of_2(channels),
        "BITS": bits,
        "WARPS": warps,
        "ACROSS": across,
        "WORDS": words,
        "DEPTH": depth,
        "STEPS": cdiv(channels, _span(warps, across)),
        "num_warps": warps,
        **({"maxnreg": _REGISTERS} if limited else {}),
    }


def _warps(channels, across):
    warps = _WARPS
    while warps < _MAX_WARPS and cdiv(channels, _span(warps, across)) > _MAX_STEPS:
        warps *= 2
    while warps > 1 and _span(warps // 2, across) >= channels:
        warps //= 2
    return warps


def _span(warps, across):
    """Number of channels that a program processes in a step."""
    return warps * 8 // across * WARP_CHANNELS
