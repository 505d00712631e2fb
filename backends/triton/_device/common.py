"""Tiles and loads of kernels, the interpreter's flag, and a note for the assembler's errors."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .._runtime.launch import candidates_of, cdiv, next_power_of_2

INTERPRETED = triton.knobs.runtime.interpret  # TRITON_INTERPRET=1
IN_INTERPRETER = tl.constexpr(INTERPRETED)  # as a constant for kernels
MULTIPROCESSORS = 128  # approximate number in a large GPU
_MANY_CHAINS = MULTIPROCESSORS
next_power_of_2_in_kernel = triton.next_power_of_2  # noqa: TID251


class Constants(NamedTuple):
    """A named tuple of constants as one argument of a kernel, which reads its fields as attributes.

    The fields become `tl.constexpr`: Triton rejects other numbers in tuples and as bounds of loops.
    """

    record: Any

    def __getattr__(self, name):
        value = getattr(self.record, name)
        return value if INTERPRETED else tl.constexpr(value)


@triton.jit
def load_float32(tensor, offsets, valid):
    """Loads a tensor's elements as float32, 0 where `valid` is False."""
    return tl.load(tensor + offsets, valid, other=0.0).to(tl.float32)


@triton.jit
def advance(pointers, offset):
    """Moves each of a tuple of pointers by `offset` elements."""
    moved = ()
    for i in tl.static_range(len(pointers)):
        moved = moved + (pointers[i] + offset,)
    return moved


def assembler_error_note(kernel, plain):
    """Note for an error of Triton's assembler: what the user can do.

    plain: the name of the implementation that does not need the assembler.
    """
    return (
        f"Triton's assembler, ptxas, did not compile `{kernel.__name__}` of "
        f"keras_recurrent/backends/triton. `with keras_recurrent.implementation({plain!r}):` runs "
        "the operation without it; the environment variable TRITON_PTXAS_PATH names another "
        "ptxas, such as that of a newer CUDA toolkit."
    )


class Tiling(NamedTuple):
    """The tile of a program, GROUPS * ROWS tokens of BLOCK_D channels, and its launch options.

    A thread computes some channels of one group, ROWS tokens one after the other. Threads exchange
    only the results of whole groups. 64 channels of bfloat16 are 128 bytes, of which a thread loads
    16 bytes (8 channels) at once. With 128 registers a thread, 16 warps fit on a multiprocessor.
    """

    BLOCK_D: int
    GROUPS: int
    ROWS: int
    num_warps: int
    maxnreg: int | None = None

    @property
    def tokens(self):
        return self.GROUPS * self.ROWS

    @property
    def options(self):
        """The options of a launch: the tile as a constant, warps and registers."""
        return {"TILE": Constants(self), "num_warps": self.num_warps, "maxnreg": self.maxnreg}

    def fitted(self, length, width):
        """Shrinks the tile for short sequences or few channels."""
        block_d = min(self.BLOCK_D, max(16, next_power_of_2(width)))
        groups = self.GROUPS
        while groups > 1 and groups * self.ROWS >= 2 * length:
            groups //= 2
        return Tiling(block_d, groups, self.ROWS, self.num_warps, self.maxnreg)


tilings = candidates_of(Tiling)


class ChainTilings(NamedTuple):
    """Candidates for the tiles of a chained scan (`chained_scan.py`), the default first.

    The tiles of a chain wait for each other. If only few chains fill the GPU, tiles have more
    tokens, so that a chain has fewer tiles.
    """

    for_many_chains: tuple[Tiling, ...]
    for_few_chains: tuple[Tiling, ...]
    for_some_chains: tuple[Tiling, ...] = ()  # empty: use those of many chains

    def candidates(self, batch, width):
        chains = batch * cdiv(width, self.for_many_chains[0].BLOCK_D)
        if chains < _MANY_CHAINS:
            return self.for_few_chains
        if chains < 2 * _MANY_CHAINS and self.for_some_chains:
            return self.for_some_chains
        return self.for_many_chains
