"""Blocks of an element-wise recurrence: [B, T, D] in VMEM, some tokens and channels at a time.

The grid is (B, blocks of D, blocks of T); the last goes in order, and the state stays in VMEM
between its steps. Tokens lie in sublanes and channels in lanes, so that a tile of 8 tokens is
joined by three rolls (`scan`), and channels do not meet.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from keras_recurrent.backends.pallas._common import (
    GOES_ON,
    LANES,
    PADDING,
    ROWS,
    kinds_beside_channels,
    rounded_up,
    vmem_bytes,
)
from keras_recurrent.backends.pallas._lazy import pl, pltpu

F32 = jnp.float32
SUBLANES = 8
MOST_TOKENS, MOST_CHANNELS = 1024, 512  # larger blocks hide no more of a grid step's overhead


class Blocks(NamedTuple):
    """How [B, T, D] is cut: `tokens` times `channels` a block."""

    batch: int
    length: int
    width: int
    tokens: int
    channels: int
    reverse: bool

    @property
    def grid(self):
        return self.batch, pl.cdiv(self.width, self.channels), pl.cdiv(self.length, self.tokens)

    @property
    def row_shape(self):
        return self.batch, 1, self.width

    def time(self, t):
        return self.grid[2] - 1 - t if self.reverse else t

    def sequence(self):
        """Of [B, T, D]."""
        shape = (None, self.tokens, self.channels)
        return pl.BlockSpec(shape, lambda b, d, t: (b, self.time(t), d))

    def rows_before(self):
        """Of [B, T, D]: the tile that ends where a block begins; any for the first block."""

        def place(b, d, t):
            return b, jnp.maximum(self.time(t) * (self.tokens // ROWS) - 1, 0), d

        return pl.BlockSpec((None, ROWS, self.channels), place)

    def kinds(self):
        """Of [B, 1, T]."""
        return pl.BlockSpec((None, 1, self.tokens), lambda b, d, t: (b, 0, self.time(t)))

    def row(self, rows=1):
        """Of [B, N, D]: what a sequence has once."""
        return pl.BlockSpec((None, rows, self.channels), lambda b, d, t: (b, 0, d))

    def shared(self, rows=1):
        """Of [N, D]: what all sequences share."""
        return pl.BlockSpec((rows, self.channels), lambda b, d, t: (0, d))


def blocks(like, tensors, reverse=False):
    """Blocks for as many bytes a channel of a token as there are in `tensors` [B, T, D]."""
    batch, length, width = like.shape
    counts = range(1, min(MOST_CHANNELS, rounded_up(width, LANES)) // LANES + 1)
    # Of the widths that cover the channels with the fewest lanes, the largest.
    channels = LANES * max(counts, key=lambda n: (-rounded_up(width, n * LANES), n))
    each = 2 * sum(t.dtype.itemsize for t in tensors)  # a block is worked on, another on its way
    tokens = MOST_TOKENS
    # A quarter of VMEM is for what the kernel computes.
    while tokens > LANES and tokens * (channels * each + LANES * 4) > vmem_bytes() * 3 // 4:
        tokens //= 2
    return Blocks(batch, length, width, min(tokens, rounded_up(length, LANES)), channels, reverse)


def stream(kernel, blocks, token_kind, inputs, outputs, carried=1):
    """Call `kernel(here, *inputs, *outputs, state)` for one block after another.

    Args:
        kernel: gets a `Here`, references to the blocks, and a float32 scratch [carried, channels]
            that holds what it leaves there until the block after.
        token_kind: [B, T] or None.
        inputs: pairs of a tensor and its `pl.BlockSpec`.
        outputs: triples of a shape, a dtype and a `pl.BlockSpec`.
    """
    masked = token_kind is not None or blocks.length % blocks.tokens != 0
    if token_kind is not None:
        inputs = [(token_kind.astype(jnp.int32)[:, None], blocks.kinds()), *inputs]
    scratch = [pltpu.VMEM((carried, blocks.channels), jnp.float32)]
    if masked:
        scratch.append(pltpu.VMEM((blocks.tokens, LANES), jnp.int32))

    def body(*references):
        step = pl.program_id(2)
        time = blocks.time(step)
        kinds = references[-1] if masked else None
        if kinds is not None:
            given, references = None, references[:-1]
            if token_kind is not None:
                given, references = references[0][...], references[1:]
            start = time * blocks.tokens
            kinds[...] = kinds_beside_channels(given, start, blocks.length, blocks.tokens)
        kernel(Here(blocks, time, step == 0, step == blocks.grid[2] - 1, kinds), *references)

    return pl.pallas_call(
        body,
        grid=blocks.grid,
        in_specs=[spec for _, spec in inputs],
        out_specs=[spec for *_, spec in outputs],
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in outputs],
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=vmem_bytes(),
        ),
        name=kernel.__name__.strip("_"),
    )(*(tensor for tensor, _ in inputs))


class Here(NamedTuple):
    """Where a kernel stands."""

    blocks: Blocks
    time: jax.Array  # the block's number, counted from the first token
    first: jax.Array  # whether it comes first: the first in time, or the last if `reverse`
    last: jax.Array
    kinds: "jax.Ref | None"

    def over_tiles(self, step, carry):
        """`carry = step(i, rows, kind, carry)` for one tile of `ROWS` tokens after another.

        `rows` is the slice of tile `i`, `kind` its kinds [ROWS, channels], or None where all
        tokens go on.
        """
        tiles = min(self.blocks.tokens, rounded_up(self.blocks.length, ROWS)) // ROWS

        def tile(i, carry):
            i = tiles - 1 - i if self.blocks.reverse else i
            rows = pl.ds(pl.multiple_of(i * ROWS, ROWS), ROWS)
            kind = None
            if self.kinds is not None:
                kind = jnp.tile(self.kinds[rows, :], (1, self.blocks.channels // LANES))
            return step(i, rows, kind, carry)

        return jax.lax.fori_loop(0, tiles, tile, carry)

    def inside(self, i, x):
        """x [ROWS, channels], the rows of tile `i`, with zeros behind the end."""
        if self.blocks.length % self.blocks.tokens == 0:
            return x
        row = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
        left = self.blocks.length - self.time * self.blocks.tokens - i * ROWS
        return jnp.where(row < left, x, 0)


def scan(a, lost, x, state, reverse=False):
    """h_t = a_t h_{t-1} + x_t. a, lost = 1 - a, x: [ROWS, L]; state: [1, L].

    Returns h and the state after. Products of decays are made as what they lose, too: as they are,
    next to 1 they would round to the same side again and again, (1 - b)(1 - c) to 1 - b - c.
    """
    return _tile_by_tile(_scan_tile, (a, lost), x, state, reverse)


def gradient(a, lost, d_output, after):
    """g_t = d_output_t + a_{t+1} g_{t+1}; behind the last of the rows is `after` [1, L].

    g, and not a_t g_t: of that all digits are needed, however small the decay.
    """
    a, lost = shift(a, 1, reverse=True), shift(lost, 0, reverse=True)
    return scan(a, lost, d_output, after, reverse=True)[0]


def hold(keep, x, state, reverse=False):
    """h_t = h_{t-1} where `keep` is 1, x_t where it is 0; otherwise as `scan`, but exact."""
    return _tile_by_tile(_hold_tile, (keep,), x, state, reverse)


def _tile_by_tile(step, factors, x, state, reverse):
    tiles = []
    for start in sorted(range(0, ROWS, SUBLANES), reverse=reverse):
        tile = slice(start, start + SUBLANES)
        h = step(*(f[tile] for f in factors), x[tile], state, reverse)
        state = h[:1] if reverse else h[SUBLANES - 1 :]
        tiles.append(h)
    return jnp.concatenate(tiles[::-1] if reverse else tiles), state


def _scan_tile(a, lost, x, state, reverse):
    for there, before in _doubling(x.shape, reverse):
        x = x + a * jnp.where(there, before(x), 0)
        lost = lost + a * jnp.where(there, before(lost), 0)
        a = jnp.where(lost < 0.5, 1 - lost, a * jnp.where(there, before(a), 1))
    return x + a * state


def _hold_tile(keep, x, state, reverse):
    for there, before in _doubling(x.shape, reverse):
        x = jnp.where(there & (keep > 0), before(x), x)
        keep = keep * jnp.where(there, before(keep), 1)
    return jnp.where(keep > 0, state, x)


def _doubling(shape, reverse):
    """Steps after each of which a row stands for twice as many tokens as before.

    Each is a mask of the rows that have one so many tokens before, and what brings that there.
    """
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    for distance in (1, 2, 4):
        there = row < SUBLANES - distance if reverse else row >= distance
        by = SUBLANES - distance if reverse else distance
        yield there, functools.partial(pltpu.roll, shift=by, axis=0)


def shift(h, first, reverse=False):
    """What stood before each row of h [ROWS, L]; `first` [1, L] before the first of them."""
    row = jax.lax.broadcasted_iota(jnp.int32, h.shape, 0)
    end, by = (ROWS - 1, ROWS - 1) if reverse else (0, 1)
    return jnp.where(row == end, first, pltpu.roll(h, by, 0))


def effective(kind, a, lost):
    """The decay that each token applies, and 1 - it: 1 and 0 at padding, 0 and 1 at a start."""
    if kind is None:
        return a, lost
    going_on, padding = kind == GOES_ON, kind == PADDING
    a = jnp.where(going_on, a, jnp.where(padding, 1.0, 0.0))
    return a, jnp.where(going_on, lost, jnp.where(padding, 0.0, 1.0))


def real(kind, *tensors):
    """Zeros at padding and behind the end, whatever stands there."""
    if kind is None:
        return tensors
    return tuple(jnp.where(kind == PADDING, 0, t) for t in tensors)


def add(total, x):
    """A sum and its rounding so far, each [SUBLANES, L], with the rows of x [ROWS, L] added.

    As Kahan does it: a plain sum over all tokens of a long sequence would lose digits.
    """
    total, lost = total
    x = x[:SUBLANES] + x[SUBLANES:] - lost
    larger = total + x
    return larger, (larger - total) - x


def nothing(channels):
    """The sum of nothing, for `add`."""
    zeros = jnp.zeros((SUBLANES, channels), F32)
    return zeros, zeros


def output_before(here, i, rows_before, output, initial):
    """The state [1, L] before tile `i`, of the block's output or, at its edge, of the one before.

    Outputs behind the end are not asked for: the tile is one with a token.
    """
    at_edge = jnp.where(here.time == 0, initial[...], rows_before[...][ROWS - 1 :].astype(F32))
    previous = output[pl.ds(pl.multiple_of(jnp.maximum(i - 1, 0) * ROWS, ROWS), ROWS), :]
    return jnp.where(i == 0, at_edge, previous[ROWS - 1 :].astype(F32))
