"""Streaming of elementwise recurrences [B, T, D] through VMEM, in blocks of tokens and channels.

The grid is (B, blocks of D, blocks of T). Its last axis is sequential: the state stays in VMEM
from one block to the next. Tokens are in sublanes and channels in lanes, so the recurrence of a
tile of 8 tokens takes three rolls (`scan`), and channels are independent.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..constants import CONTINUES, PADDING
from . import _pallas as pl
from ._common import LANES, ROWS, kinds_over_lanes, pallas_call, round_up, vmem_bytes

F32 = jnp.float32
SUBLANES = 8
MAX_TOKENS, MAX_CHANNELS = 1024, 512  # larger blocks are not faster


class Blocks(NamedTuple):
    """Partition of [B, T, D] into blocks of `tokens` times `channels`."""

    batch: int
    length: int
    width: int
    tokens: int
    channels: int
    reverse: bool

    @property
    def grid(self):
        return self.batch, pl.cdiv(self.width, self.channels), pl.cdiv(self.length, self.tokens)

    def time(self, t):
        """The index of the block of tokens in step t of the grid."""
        return self.grid[2] - 1 - t if self.reverse else t

    def sequences(self, *tensors):
        """Tensors [B, T, D] and their blocks."""
        shape = (None, self.tokens, self.channels)
        spec = pl.BlockSpec(shape, lambda b, d, t: (b, self.time(t), d))
        return [(x, spec) for x in tensors]

    def rows_before(self, x):
        """x [B, T, D], and its tile that ends where a block begins; for the first one, any tile."""

        def index_map(b, d, t):
            return b, jnp.maximum(self.time(t) * (self.tokens // ROWS) - 1, 0), d

        return x, pl.BlockSpec((None, ROWS, self.channels), index_map)

    def kinds(self, x):
        """Token kinds [B, 1, T] and their blocks."""
        return x, pl.BlockSpec((None, 1, self.tokens), lambda b, d, t: (b, 0, self.time(t)))

    def row(self, x):
        """x [B, N, D] without a time axis, such as a state, and its blocks."""
        return x, pl.BlockSpec((None, x.shape[1], self.channels), lambda b, d, t: (b, 0, d))

    def shared(self, x):
        """A parameter [N, D] and its blocks."""
        return x, pl.BlockSpec((x.shape[0], self.channels), lambda b, d, t: (0, d))


def fit_blocks(like, tensors, reverse=False):
    """`Blocks` of [B, T, D], the shape of `like`, that fit VMEM for a kernel with all `tensors`."""
    batch, length, width = like.shape
    counts = range(1, min(MAX_CHANNELS, round_up(width, LANES)) // LANES + 1)
    # The largest of the widths that cover the channels with the fewest lanes.
    channels = LANES * max(counts, key=lambda n: (-round_up(width, n * LANES), n))
    # Bytes per element of all tensors; twice, since the next block is prefetched.
    each = 2 * sum(t.dtype.itemsize for t in tensors)
    tokens = MAX_TOKENS
    # A quarter of VMEM is reserved for the kernel's temporaries.
    while tokens > LANES and tokens * (channels * each + LANES * 4) > vmem_bytes() * 3 // 4:
        tokens //= 2
    return Blocks(batch, length, width, min(tokens, round_up(length, LANES)), channels, reverse)


def stream(kernel, blocks, token_kind, inputs, outputs, carried=1):
    """Calls `kernel(block, *inputs, *outputs, state)` for one block after another.

    Args:
        kernel: a function of a `Block`, references to the blocks of all tensors, and a float32
            scratch [carried, channels] whose contents persist until the next block.
        token_kind: [B, T] or None.
        inputs: pairs of a tensor and its `pl.BlockSpec`.
        outputs: pairs of a tensor of the shape and the dtype of the output, and a `pl.BlockSpec`.
    """
    masked = token_kind is not None or blocks.length % blocks.tokens != 0
    if token_kind is not None:
        inputs = [blocks.kinds(token_kind.astype(jnp.int32)[:, None]), *inputs]
    scratch = [pl.VMEM((carried, blocks.channels), jnp.float32)]
    if masked:
        scratch.append(pl.VMEM((blocks.tokens, LANES), jnp.int32))

    def body(*references):
        step = pl.program_id(2)
        time = blocks.time(step)
        kinds = references[-1] if masked else None
        if kinds is not None:
            given, references = None, references[:-1]
            if token_kind is not None:
                given, references = references[0][...], references[1:]
            start = time * blocks.tokens
            kinds[...] = kinds_over_lanes(given, start, blocks.length, blocks.tokens)
        kernel(Block(blocks, time, step == 0, step == blocks.grid[2] - 1, kinds), *references)

    return pallas_call(
        body,
        grid=blocks.grid,
        in_specs=[spec for _, spec in inputs],
        out_specs=[spec for _, spec in outputs],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x, _ in outputs],
        scratch_shapes=scratch,
        name=kernel.__name__.strip("_"),
    )(*(tensor for tensor, _ in inputs))


class Block(NamedTuple):
    """The block that a kernel computes."""

    blocks: Blocks
    number: jax.Array  # in time, from 0
    first: jax.Array  # True if it is computed first: the last in time if `reverse`
    last: jax.Array  # True if it is computed last
    kinds: "jax.Ref | None"

    def scan_tiles(self, step, carry):
        """Calls `carry = step(i, rows, kind, carry)` for one tile of `ROWS` tokens after another.

        `rows` is the slice of tile `i`, `kind` its kinds [ROWS, channels], or None if all tokens
        continue a document.
        """
        tiles = min(self.blocks.tokens, round_up(self.blocks.length, ROWS)) // ROWS

        def tile(i, carry):
            i = tiles - 1 - i if self.blocks.reverse else i
            rows = pl.ds(pl.multiple_of(i * ROWS, ROWS), ROWS)
            kind = None
            if self.kinds is not None:
                kind = jnp.tile(self.kinds[rows, :], (1, self.blocks.channels // LANES))
            return step(i, rows, kind, carry)

        return jax.lax.fori_loop(0, tiles, tile, carry)

    def scan_states(self, step, initial, state, final):
        """`scan_tiles` from `initial` on; the scratch `state` is carried on to the next block.

        The state after the last block is stored in `final`.
        """

        @pl.when(self.first)
        def _():
            state[...] = initial[...]

        state[...] = self.scan_tiles(step, state[...])

        @pl.when(self.last)
        def _():
            final[...] = state[...]

    def mask_end(self, i, x):
        """x [ROWS, channels], tile `i` of a tensor, with zeros beyond the end of the sequence."""
        if self.blocks.length % self.blocks.tokens == 0:
            return x
        row = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
        left = self.blocks.length - self.number * self.blocks.tokens - i * ROWS
        return jnp.where(row < left, x, 0)


def scan(a, one_minus_a, x, state, reverse=False):
    """h_t = a_t h_{t-1} + x_t. a, one_minus_a, x: [ROWS, L]; state: [1, L].

    Returns h and the state after the last token. For products of decays, the difference from 1
    is computed as well: otherwise products near 1 would all be rounded in the same direction.
    """
    return _scan_each_tile(_scan_tile, (a, one_minus_a), x, state, reverse)


def adjoint_scan(a, one_minus_a, d_output, d_next):
    """g_t = d_output_t + a_{t+1} g_{t+1}, where a g of the token after the last is `d_next` [1, L].

    Computes g rather than a_t g_t, since g would then require a division.
    """
    a, one_minus_a = following(a, 1), following(one_minus_a, 0)
    return scan(a, one_minus_a, d_output, d_next, reverse=True)[0]


def hold(keep, x, state, reverse=False):
    """h_t = h_{t-1} where `keep` is 1, x_t where it is 0, without rounding; else like `scan`."""
    return _scan_each_tile(_hold_tile, (keep,), x, state, reverse)


def _scan_each_tile(step, factors, x, state, reverse):
    tiles = []
    for start in sorted(range(0, ROWS, SUBLANES), reverse=reverse):
        tile = slice(start, start + SUBLANES)
        h = step(*(f[tile] for f in factors), x[tile], state, reverse)
        state = h[:1] if reverse else h[SUBLANES - 1 :]
        tiles.append(h)
    return jnp.concatenate(tiles[::-1] if reverse else tiles), state


def _scan_tile(a, one_minus_a, x, state, reverse):
    for exists, earlier in _doubling(x.shape, reverse):
        x = x + a * jnp.where(exists, earlier(x), 0)
        one_minus_a = one_minus_a + a * jnp.where(exists, earlier(one_minus_a), 0)
        a = jnp.where(one_minus_a < 0.5, 1 - one_minus_a, a * jnp.where(exists, earlier(a), 1))
    return x + a * state


def _hold_tile(keep, x, state, reverse):
    for exists, earlier in _doubling(x.shape, reverse):
        x = jnp.where(exists & (keep > 0), earlier(x), x)
        keep = keep * jnp.where(exists, earlier(keep), 1)
    return jnp.where(keep > 0, state, x)


def _doubling(shape, reverse):
    """The steps of a scan by doubling: after each, a row combines twice as many tokens.

    A step combines a row with the one 1, 2 or 4 rows before it. Yields a mask of the rows that have
    such a row, and a function that rolls a tensor by this distance.
    """
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    for distance in (1, 2, 4):
        exists = row < SUBLANES - distance if reverse else row >= distance
        by = SUBLANES - distance if reverse else distance
        yield exists, functools.partial(pl.roll, shift=by, axis=0)


def previous(h, first):
    """The row before each row of h [ROWS, L]; `first` [1, L] before the first of them."""
    return jnp.where(_row_number(h) == 0, first, pl.roll(h, 1, 0))


def following(h, last):
    """The row after each row of h [ROWS, L]; `last` [1, L] after the last of them."""
    return jnp.where(_row_number(h) == ROWS - 1, last, pl.roll(h, ROWS - 1, 0))


def _row_number(h):
    return jax.lax.broadcasted_iota(jnp.int32, h.shape, 0)


def applied_decay(kind, a, one_minus_a):
    """a and 1 - a applied to the state: 0 and 1 at a start, 1 and 0 at padding."""
    if kind is None:
        return a, one_minus_a
    continues, padding = kind == CONTINUES, kind == PADDING
    a = jnp.where(continues, a, jnp.where(padding, 1.0, 0.0))
    return a, jnp.where(continues, one_minus_a, jnp.where(padding, 0.0, 1.0))


def mask_padding(kind, *tensors):
    """The tensors with zeros at padding and beyond the end of the sequence."""
    if kind is None:
        return tensors
    return tuple(jnp.where(kind == PADDING, 0, t) for t in tensors)


def kahan_add(total, x):
    """Kahan summation: `total`, a sum and its rounding error, with the rows of x [ROWS, L] added.

    Both are [SUBLANES, L]. A plain sum over a long sequence would lose digits.
    """
    total, error = total
    x = x[:SUBLANES] + x[SUBLANES:] - error
    larger = total + x
    return larger, (larger - total) - x


def zero_sum(channels):
    """The initial `total` of `kahan_add`."""
    zeros = jnp.zeros((SUBLANES, channels), F32)
    return zeros, zeros


def output_before(block, i, rows_before, output, initial):
    """The state [1, L] before tile `i`: the last output before it, or the initial state.

    The output before the first tile of a block is in `rows_before`.
    """
    at_edge = jnp.where(block.number == 0, initial[...], rows_before[...][ROWS - 1 :].astype(F32))
    tile_before = output[pl.ds(pl.multiple_of(jnp.maximum(i - 1, 0) * ROWS, ROWS), ROWS), :]
    return jnp.where(i == 0, at_edge, tile_before[ROWS - 1 :].astype(F32))
