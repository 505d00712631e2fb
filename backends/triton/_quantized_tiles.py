"""What a program of `norm_quantized_linear` takes of its maps, by their size."""

import triton

from keras_recurrent.backends.triton._quantized_products import CHANNELS_OF_A_WARP

# (ACROSS, WORDS): threads that read neighboring words of a channel, and how many words each; from
# the most columns to the fewest. Wide tiles read whole lines of memory, narrow ones leave programs
# for all multiprocessors of a large GPU.
_TILES = {8: ((4, 4), (4, 2)), 4: ((4, 2), (4, 1))}
_PROGRAMS = 132
_WARPS, _MOST_WARPS = 8, 16
_MOST_STEPS = 4  # from which on a program has more warps


def tile(channels, widths, bits, gate, limbs):
    """The constants of a program, for rows of so many channels and maps of so many columns.

    With a gate, a program makes columns of both maps.
    """
    columns = widths[:1] if gate else widths

    def programs(of):
        return sum(triton.cdiv(n, of[0] * of[1] * 32 // bits) for n in columns)

    across, words = next((of for of in _TILES[bits] if programs(of) >= _PROGRAMS), _TILES[bits][-1])
    # So that two programs fit the registers of a multiprocessor.
    depth = 1 if words == 4 or (gate and limbs > 1) else 2
    warps = _warps(channels, across)
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
