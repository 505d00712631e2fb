"""How attention streams: blocks of tokens through VMEM, where rings keep what a window reaches.

The grid is (B, G, blocks of tokens, heads of queries that share a key). The blocks go in order,
first those of keys from before the first query. A block of keys is put into its ring once, and met
there by the queries of that block and of those after it, as far as the window reaches. Where
gradients of keys are summed, the grid has steps behind the last block, in which the blocks that
are still in the ring are written.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from keras_recurrent.backends.pallas._common import LANES, rounded_up, vmem_bytes
from keras_recurrent.backends.pallas._lazy import pl, pltpu

BLOCKS = (256, 128)  # tokens; the longer, the more pairs are computed that the window leaves out


class Walk(NamedTuple):
    """What is static about it."""

    length: int  # queries
    block: int  # tokens
    before: int  # blocks of keys before the first query
    kept: int  # blocks in a ring
    window: int | None
    shared: int  # heads of queries that share one of keys

    @property
    def blocks(self):
        return self.before + pl.cdiv(self.length, self.block)

    def queries(self, g, s, r):
        """The block of queries, and the head of them, that a step is for."""
        block = jnp.clip(s - self.before, 0, self.blocks - self.before - 1)
        head = jnp.where(s < self.before, 0, jnp.where(s < self.blocks, r, self.shared - 1))
        return block, g * self.shared + head

    def keys(self, g, s, r):
        """The block of keys, and the head of them, that a step begins with."""
        return jnp.minimum(s, self.blocks - 1), g

    def keys_left(self, g, s, r):
        """The block of keys, and the head of them, that no query after this step sees."""
        here = jnp.maximum(s - self.kept + 1, 0)
        behind = self.blocks - self.kept + 1 + (s - self.blocks) * self.shared + r
        return jnp.where(s < self.blocks, here, jnp.minimum(behind, self.blocks - 1)), g

    def aligned(self, x):
        """x [B, S, ...] with places before it, so that the first query begins a block."""
        missing = self.before * self.block + self.length - x.shape[1]
        return jnp.pad(x, [(0, 0), (missing, 0)] + [(0, 0)] * (x.ndim - 2))

    def head(self, x, place):
        """x [B, T, ..., size], or its shape, as `apart` makes it; and blocks of one head of it."""
        size = x.shape[-1]
        x = jax.eval_shape(apart, x) if isinstance(x, jax.ShapeDtypeStruct) else apart(x)
        if x.ndim == 3:
            return x, pl.BlockSpec((None, self.block, size), lambda b, *at: (b, *place(*at)))
        return x, pl.BlockSpec(
            (None, None, self.block, size), lambda b, *at: (b, *place(*at)[::-1], 0)
        )

    def row(self, x, place):
        """x [B, 1, T], a number for each token, or [B, H, 1, T], one in each head."""
        if x.ndim == 3:
            return x, pl.BlockSpec((None, 1, self.block), lambda b, *at: (b, 0, place(*at)[0]))
        return x, pl.BlockSpec(
            (None, None, 1, self.block), lambda b, *at: (b, place(*at)[1], 0, place(*at)[0])
        )

    def ring(self, rows, size, dtype):
        return pltpu.VMEM((self.kept, rows, size), dtype)


class Step(NamedTuple):
    """Where a kernel stands, with the rings of keys, values and the documents that they are of."""

    walk: Walk
    number: jax.Array
    head: jax.Array
    of_queries: "jax.Ref"
    of_keys: "jax.Ref"
    keys: "jax.Ref"
    values: "jax.Ref"
    documents: "jax.Ref"

    @property
    def begins(self):
        """Whether a block of keys comes in with this step."""
        return (self.head == 0) & (self.number < self.walk.blocks)

    @property
    def asks(self):
        """Whether there are queries."""
        return (self.number >= self.walk.before) & (self.number < self.walk.blocks)

    @property
    def leaves(self):
        """Whether a block of keys is seen no more after this step."""
        last = (self.number >= self.walk.kept - 1) & (self.head == self.walk.shared - 1)
        return (self.number >= self.walk.blocks) | last

    def slot(self, number):
        """Where a block lies in a ring."""
        return jax.lax.rem(number, self.walk.kept)

    def put(self, k, v):
        slot, document = self.slot(self.number), self._there(self.of_keys[...])
        self.keys[slot] = _real(document, k[...])
        self.values[slot] = _real(document, v[...])
        self.documents[slot] = document

    def real(self, x):
        """A block of what is beside queries, with zeros where there are none."""
        return _real(self._there(self.of_queries[...]), x[...])

    def real_row(self, x):
        """The same of numbers for each query [1, N], as a column."""
        return column(jnp.where(self._there(self.of_queries[...]) > 0, x[...], 0))

    def _there(self, document):
        """The documents [1, N] of a block, 0 behind the end."""
        place = jax.lax.broadcasted_iota(jnp.int32, document.shape, 1)
        count = self.walk.length - (self.number - self.walk.before) * self.walk.block
        return jnp.where(place < count, document, 0)

    def over_window(self, meet, carry):
        """`carry = meet(slot, seen, carry)` for the blocks in the window, from the newest on.

        `slot` is that of the block of keys in the rings; `seen` [N, N] whether a query sees a key.
        """
        walk, square = self.walk, (self.walk.block, self.walk.block)
        of_queries = column(self._there(self.of_queries[...]))
        newer = jax.lax.broadcasted_iota(jnp.int32, square, 0) - jax.lax.broadcasted_iota(
            jnp.int32, square, 1
        )

        def at(back, carry):
            slot = self.slot(self.number - back)
            distance = newer + back * walk.block
            seen = (distance >= 0) & (of_queries == self.documents[slot])
            if walk.window is not None:
                seen &= distance < walk.window
            return meet(slot, seen, carry)

        return jax.lax.fori_loop(0, jnp.minimum(self.number + 1, walk.kept), at, carry)


def walk(q, k, v, window, keys_before):
    """Of q [B, T, ..., K], k [B, S, G, K], v [B, S, G, V]; None if VMEM has no room for it."""
    length, shared = q.shape[1], math.prod(q.shape[2:-1]) // k.shape[2]
    for block in BLOCKS:
        before = pl.cdiv(keys_before, block)
        kept = before + pl.cdiv(length, block)
        if window is not None:
            kept = min(kept, pl.cdiv(window - 1, block) + 1)
        if _bytes(block, kept, q, k, v) <= vmem_bytes():
            return Walk(length, block, before, kept, window, shared)
    return None


def _bytes(block, kept, *tensors):
    """What the backward fills, which needs more than the forward."""
    _, k, v = tensors
    item = max(x.dtype.itemsize for x in tensors)
    width = sum(rounded_up(x.shape[-1], LANES) for x in (k, v))
    # Of q, k, v, and what comes or goes beside them, a block is worked on, another on its way.
    rings, streams = kept * block * width * (item + 4), 2 * block * 4 * width * item
    # A product of float32 takes its operands to pieces.
    working = 4 * block * (6 * block + 2 * width) * (1 if item == 2 else 2)
    return rings + streams + working


def call(walk, kernel, k, v, of_queries, of_keys, inputs, outputs, sums=(), steps_behind=0):
    """`kernel(step, *inputs, *outputs, *sums)` for one step of the walk after another.

    Args:
        inputs: pairs of a tensor and its blocks.
        outputs: pairs of a shape with its dtype and its blocks.
        sums: sizes of a head, of which float32 rings are kept, too.
        steps_behind: behind the last block.
    """
    given = [
        walk.row(of_queries[:, None], walk.queries),
        walk.row(walk.aligned(of_keys)[:, None], walk.keys),
        walk.head(walk.aligned(k), walk.keys),
        walk.head(walk.aligned(v), walk.keys),
        *inputs,
    ]
    streamed = len(inputs) + len(outputs)

    def body(of_queries, of_keys, k, v, *references):
        blocks, rings, sums = (
            references[:streamed],
            references[streamed : streamed + 3],
            references[streamed + 3 :],
        )
        step = Step(walk, pl.program_id(2), pl.program_id(3), of_queries, of_keys, *rings)

        @pl.when(step.begins)
        def _():
            step.put(k, v)

        kernel(step, *blocks, *sums)

    return pl.pallas_call(
        body,
        grid=(k.shape[0], k.shape[2], walk.blocks + steps_behind, walk.shared),
        in_specs=[spec for _, spec in given],
        out_specs=[spec for _, spec in outputs],
        out_shape=[shape for shape, _ in outputs],
        scratch_shapes=[
            walk.ring(walk.block, k.shape[3], k.dtype),
            walk.ring(walk.block, v.shape[3], v.dtype),
            walk.ring(1, walk.block, jnp.int32),
            *(walk.ring(walk.block, size, jnp.float32) for size in sums),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=vmem_bytes(),
        ),
        name=kernel.__name__.strip("_"),
    )(*(tensor for tensor, _ in given))


def apart(x):
    """x [B, T, ..., size] with its heads side by side, as layers make and take it.

    Where a head fills no vectors, XLA brings its tokens together: [B, H, T, size].
    """
    if x.shape[-1] % LANES == 0:
        return x.reshape(*x.shape[:2], -1)
    return jnp.swapaxes(x.reshape(*x.shape[:2], -1, x.shape[-1]), 1, 2)


def together(x, shape):
    """The opposite of `apart`."""
    return (x if x.ndim == 3 else jnp.swapaxes(x, 1, 2)).reshape(shape)


def column(row):
    """[1, N] as [N, 1]."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T[:, :1]


def row(column):
    """[N, 1] as [1, N]."""
    return jnp.broadcast_to(column, (column.shape[0], LANES)).T[:1]


def _real(document, x):
    """x [N, size], and zeros where there is no token, whatever stood there."""
    return jnp.where(jnp.broadcast_to(column(document), x.shape) > 0, x, 0)
