"""How attention passes a row through VMEM: block by block, with the keys of the window in rings.

The grid is (B, G, blocks of tokens, heads of queries that share a key). Its last two axes are
sequential. Blocks go from the first to the last; those of keys before the first query have no
queries. A block of keys and values is copied into ring buffers once, and stays there as long as
queries attend to it. The sums of the gradients of keys are kept in rings as well. They are written
when their block leaves the ring; for the blocks that are in the ring at the end, the grid has
steps after the last block.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ._call import pallas_call
from ._common import LANES, rounded_up, vmem_bytes
from ._lazy import pl, pltpu

# Tokens of a block, the first that fits VMEM. Longer blocks would compute more logits in vain, for
# keys that are outside the window of a query.
BLOCKS = (256, 128)


class Grid(NamedTuple):
    """How the tokens are cut, and how the grid goes through the blocks."""

    length: int  # queries
    block: int  # tokens
    before: int  # blocks of keys before the first query
    ring_blocks: int
    window: int | None
    shared: int  # heads of queries that share one of keys

    @property
    def blocks(self):
        return self.before + pl.cdiv(self.length, self.block)

    def queries(self, g, s, r):
        """The block and the head of queries in a step (g, s, r) of the grid."""
        block = jnp.clip(s - self.before, 0, self.blocks - self.before - 1)
        head = jnp.where(s < self.before, 0, jnp.where(s < self.blocks, r, self.shared - 1))
        return block, g * self.shared + head

    def keys(self, g, s, r):
        """The block and the head of keys in a step, which are copied into the rings."""
        return jnp.minimum(s, self.blocks - 1), g

    def dropped_keys(self, g, s, r):
        """The block and the head of keys to which no query attends after a step."""
        oldest = jnp.maximum(s - self.ring_blocks + 1, 0)
        # After the last block each step is for one of the blocks that are left in the ring.
        left = self.blocks - self.ring_blocks + 1 + (s - self.blocks) * self.shared + r
        return jnp.where(s < self.blocks, oldest, jnp.minimum(left, self.blocks - 1)), g

    def aligned(self, x):
        """x [B, S, ...] padded in front, so that the first query is at the beginning of a block."""
        missing = self.before * self.block + self.length - x.shape[1]
        return jnp.pad(x, [(0, 0), (missing, 0)] + [(0, 0)] * (x.ndim - 2))

    def head(self, x, block_of):
        """x [B, T, ..., size], or its shape and dtype, in the layout of `by_head`, and its blocks.

        A block has one head; `block_of` gives the number of the block and of the head in a step.
        """
        size = x.shape[-1]
        x = jax.eval_shape(by_head, x) if isinstance(x, jax.ShapeDtypeStruct) else by_head(x)
        if x.ndim == 3:
            return x, pl.BlockSpec((None, self.block, size), lambda b, *step: (b, *block_of(*step)))
        return x, pl.BlockSpec(
            (None, None, self.block, size), lambda b, *step: (b, *block_of(*step)[::-1], 0)
        )

    def row(self, x, block_of):
        """x [B, 1, T], a number for each token, and its blocks."""
        return x, pl.BlockSpec((None, 1, self.block), lambda b, *step: (b, 0, block_of(*step)[0]))

    def ring(self, rows, size, dtype):
        return pltpu.VMEM((self.ring_blocks, rows, size), dtype)


class Step(NamedTuple):
    """A step of the grid, with the rings of keys, values and numbers of their documents."""

    grid: Grid
    number: jax.Array
    head: jax.Array
    of_queries: "jax.Ref"
    of_keys: "jax.Ref"
    keys: "jax.Ref"
    values: "jax.Ref"
    documents: "jax.Ref"

    @property
    def has_new_keys(self):
        """Whether a new block of keys is to be copied into the rings."""
        return (self.head == 0) & (self.number < self.grid.blocks)

    @property
    def has_queries(self):
        """Whether there is a block of queries."""
        return (self.number >= self.grid.before) & (self.number < self.grid.blocks)

    @property
    def has_dropped_keys(self):
        """Whether there is a block of keys to which no query attends after this step."""
        last = (self.number >= self.grid.ring_blocks - 1) & (self.head == self.grid.shared - 1)
        return (self.number >= self.grid.blocks) | last

    def slot(self, number):
        """The slot of a block in the rings."""
        return jax.lax.rem(number, self.grid.ring_blocks)

    def put(self, k, v):
        """Copy the blocks of keys and values into the rings."""
        slot, document = self.slot(self.number), self._documents(self.of_keys[...])
        self.keys[slot] = _of_tokens(document, k[...])
        self.values[slot] = _of_tokens(document, v[...])
        self.documents[slot] = document

    def of_tokens(self, x):
        """x [N, size], a block with a row for each query, with zeros where there is no token."""
        return _of_tokens(self._documents(self.of_queries[...]), x[...])

    def _documents(self, document):
        """The numbers of documents [1, N] of a block, 0 beyond the end of the sequence."""
        number = jax.lax.broadcasted_iota(jnp.int32, document.shape, 1)
        count = self.grid.length - (self.number - self.grid.before) * self.grid.block
        return jnp.where(number < count, document, 0)

    def over_window(self, attend, carry):
        """`carry = attend(slot, visible, carry)` for the blocks of keys in the window, last first.

        `slot` is the block's place in the rings, `visible` [N, N] whether a query attends to a key.
        """
        grid, square = self.grid, (self.grid.block, self.grid.block)
        of_queries = column(self._documents(self.of_queries[...]))
        own_distance = jax.lax.broadcasted_iota(jnp.int32, square, 0) - jax.lax.broadcasted_iota(
            jnp.int32, square, 1
        )

        def step(age, carry):
            slot = self.slot(self.number - age)
            distance = own_distance + age * grid.block
            visible = (distance >= 0) & (of_queries == self.documents[slot])
            if grid.window is not None:
                visible &= distance < grid.window
            return attend(slot, visible, carry)

        return jax.lax.fori_loop(0, jnp.minimum(self.number + 1, grid.ring_blocks), step, carry)


def grid_for(q, k, v, window, keys_before):
    """The `Grid` for q [B, T, ..., K], k [B, S, G, K], v [B, S, G, V]; None if none fits VMEM."""
    length, shared = q.shape[1], math.prod(q.shape[2:-1]) // k.shape[2]
    for block in BLOCKS:
        before = pl.cdiv(keys_before, block)
        ring_blocks = before + pl.cdiv(length, block)
        if window is not None:
            ring_blocks = min(ring_blocks, pl.cdiv(window - 1, block) + 1)
        if _bytes(block, ring_blocks, q, k, v) <= vmem_bytes():
            return Grid(length, block, before, ring_blocks, window, shared)
    return None


def _bytes(block, ring_blocks, *tensors):
    """The VMEM that the backward needs, which is more than the forward does."""
    _, k, v = tensors
    item = max(x.dtype.itemsize for x in tensors)
    width = sum(rounded_up(x.shape[-1], LANES) for x in (k, v))
    # Twice the blocks of q, k, v and of their gradients: the next ones are fetched meanwhile.
    rings, streams = ring_blocks * block * width * (item + 4), 2 * block * 4 * width * item
    # Products of float32 are split into several of bfloat16.
    working = 4 * block * (6 * block + 2 * width) * (1 if item == 2 else 2)
    return rings + streams + working


def call(grid, kernel, k, v, of_queries, of_keys, inputs, outputs, sums=(), steps_after=0):
    """Call `kernel(step, *inputs, *outputs, *sums)` for one step of the grid after another.

    Args:
        inputs: pairs of a tensor and its blocks.
        outputs: pairs of a shape with its dtype and its blocks.
        sums: for each float32 ring that the kernel needs for sums, the size of a head.
        steps_after: how many steps come after the last block.
    """
    given = [
        grid.row(of_queries[:, None], grid.queries),
        grid.row(grid.aligned(of_keys)[:, None], grid.keys),
        grid.head(grid.aligned(k), grid.keys),
        grid.head(grid.aligned(v), grid.keys),
        *inputs,
    ]
    streamed = len(inputs) + len(outputs)

    def body(of_queries, of_keys, k, v, *references):
        blocks, rings, sums = (
            references[:streamed],
            references[streamed : streamed + 3],
            references[streamed + 3 :],
        )
        step = Step(grid, pl.program_id(2), pl.program_id(3), of_queries, of_keys, *rings)

        @pl.when(step.has_new_keys)
        def _():
            step.put(k, v)

        kernel(step, *blocks, *sums)

    return pallas_call(
        body,
        grid=(k.shape[0], k.shape[2], grid.blocks + steps_after, grid.shared),
        in_specs=[spec for _, spec in given],
        out_specs=[spec for _, spec in outputs],
        out_shape=[shape for shape, _ in outputs],
        scratch_shapes=[
            grid.ring(grid.block, k.shape[3], k.dtype),
            grid.ring(grid.block, v.shape[3], v.dtype),
            grid.ring(1, grid.block, jnp.int32),
            *(grid.ring(grid.block, size, jnp.float32) for size in sums),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=vmem_bytes(),
        ),
        name=kernel.__name__.strip("_"),
    )(*(tensor for tensor, _ in given))


def by_head(x):
    """x [B, T, ..., size] as kernels read one head of it.

    [B, T, heads * size], as layers make and take it, if a head fills whole vectors. Else XLA
    transposes it to [B, heads, T, size].
    """
    if x.shape[-1] % LANES == 0:
        return x.reshape(*x.shape[:2], -1)
    return jnp.swapaxes(x.reshape(*x.shape[:2], -1, x.shape[-1]), 1, 2)


def from_by_head(x, shape):
    """The opposite of `by_head`."""
    return (x if x.ndim == 3 else jnp.swapaxes(x, 1, 2)).reshape(shape)


def column(row):
    """[1, N] as [N, 1]."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T[:, :1]


def _of_tokens(document, x):
    """x [N, size] with zeros where the document is 0."""
    return jnp.where(jnp.broadcast_to(column(document), x.shape) > 0, x, 0)
