"""What a program of `norm_quantized_linear` takes of its maps, by their size."""

import triton

from .quantized_products import CHANNELS_OF_A_WARP

# (ACROSS, WORDS): threads that read neighboring words of a channel, and how many words each. Wide
# tiles read whole sectors or lines of memory, narrow ones leave programs for all multiprocessors of
# a large GPU.
_TILES = {8: ((4, 4), (4, 2)), 4: ((8, 1), (4, 1))}
_PROGRAMS = 132
_WARPS, _MOST_WARPS = 8, 16
_MOST_STEPS = 4  # from which on a program has more warps
# Words of each of 16 channels under way, and registers of a thread: so that two programs, of which
# one may be of the next launch, fit a multiprocessor.
_WORDS_UNDER_WAY = 4
_REGISTERS = 128


def tile(channels, widths, bits, gate, limbs, block_size):
    """The constants of a program, for rows of so many channels and maps of so many columns.

    With a gate, a program makes columns of both maps.
    """
    columns = widths[:1] if gate else widths

    def programs(of):
        return sum(triton.cdiv(n, of[0] * of[1] * 32 // bits) for n in columns)

    wide, narrow = _TILES[bits]
    # Two narrow programs of 4 bits on one multiprocessor have more to do than a wide one.
    enough = programs(wide) >= _PROGRAMS if bits == 8 else programs(narrow) > _PROGRAMS
    across, words = wide if enough else narrow
    depth = _WORDS_UNDER_WAY // words
    if bits == 8 and gate and limbs > 1:
        depth = 1
    warps = _warps(channels, across)
    limited = bits == 4 and limbs < 3 and (not block_size or block_size >= CHANNELS_OF_A_WARP)
    return {
        **dict(zip(("K", "N", "N_2", "N_3"), (channels, *widths), strict=True)),
        "ROW": triton.next_power_of_2(channels),
        "BITS": bits,
        "WARPS": warps,
        "ACROSS": across,
        "WORDS": words,
        "DEPTH": depth,
        "STEPS": triton.cdiv(channels, _span(warps, across)),
        "num_warps": warps,
        **({"maxnreg": _REGISTERS} if limited else {}),
    }


def _warps(channels, across):
    warps = _WARPS
    while warps < _MOST_WARPS and triton.cdiv(channels, _span(warps, across)) > _MOST_STEPS:
        warps *= 2
    while warps > 1 and _span(warps // 2, across) >= channels:
        warps //= 2
    return warps


def _span(warps, across):
    """The channels of a step of a program."""
    return warps * 8 // across * CHANNELS_OF_A_WARP
