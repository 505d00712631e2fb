"""Tile sizes of `norm_quantized_linear`, by the sizes of its weights."""

from typing import NamedTuple

from .._runtime.launch import cdiv
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


class QuantizedProduct(NamedTuple):
    """The constants of a program of `norm_quantized_linear`, and its launch options.

    Host code computes all of them, also those that follow from others: Triton's cache of compiled
    kernels depends on the fields.
    """

    K: int  # channels of the row
    NORM: bool
    NUM_SQUARES: int  # sums of squares of the row, or 0
    LIMBS: int
    QUANTIZED: bool
    BITS: int
    BLOCK_SIZE: int  # channels that share a scale, or 0
    VECTORS: bool  # a thread loads its words, scales and zero points as vectors
    WHOLE: bool  # a thread loads four numbers of the row as a vector
    WARPS: int
    ACROSS: int
    WORDS: int
    STEPS: int
    DEPTH: int
    COLUMNS: int  # of a program
    SETS: int  # sets of different channels in the halves of a warp, 1 or 2
    ROUNDS: int  # `mma` instructions for all limbs of a number
    SPAN: int  # channels of a program in a step
    GROUPS: int  # a thread's `mma` instructions for a pair of channels
    FOURS: int  # fours of a thread's channels that share a scale and zero point
    maxnreg: int | None

    @property
    def launch_options(self):
        return {"num_warps": self.WARPS, "maxnreg": self.maxnreg}


def choose_tile(channels, widths, bits, gate, limbs, block_size, VECTORS, **constants):
    """The `QuantizedProduct` for a row of `channels` and weights of `widths` columns.

    With a gate, a program computes columns of both projections. constants: its other fields;
    VECTORS is set to False if the words of a thread belong to several channels.
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
    sets = 8 // across
    return QuantizedProduct(
        **{"K": channels, "LIMBS": limbs, "BITS": bits, "BLOCK_SIZE": block_size},
        **{"WARPS": warps, "ACROSS": across, "WORDS": words, "DEPTH": depth},
        STEPS=cdiv(channels, _span(warps, across)),
        COLUMNS=across * words * 32 // bits,
        SETS=sets,
        ROUNDS=limbs if sets == 2 else cdiv(limbs, 2),
        SPAN=_span(warps, across),
        GROUPS=words * 4 // bits,
        FOURS=block_size // 16 if 0 < block_size < WARP_CHANNELS else 4,
        maxnreg=_REGISTERS if limited else None,
        VECTORS=VECTORS and all(n * bits % (32 * words) == 0 for n in widths),
        **constants,
    )


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
