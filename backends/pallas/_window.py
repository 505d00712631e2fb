"""Streaming of attention through VMEM, with the keys of the window in circular buffers.

The grid is (B, G, blocks of tokens, heads of queries that share a key). Its last two axes are
sequential. Blocks are computed from the first to the last; blocks of keys before the first query
have no queries. A block of keys and values is copied into circular buffers once, and stays there as
long as queries attend to it. The gradients of keys are summed in circular buffers as well. They are
written when their block leaves the buffer; for blocks that are in the buffer at the end, the grid
has steps after the last block.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from . import _pallas as pl
from ._common import LANES, pallas_call, round_up, vmem_bytes
from ._linear_attention import row_and_column_numbers

# Tokens in a block; the first size that fits VMEM is used. Longer blocks would compute more logits
# of keys outside the window of a query.
BLOCKS = (256, 128)


class Grid(NamedTuple):
    """Partition of the tokens into blocks, and the order in which the grid visits them."""

    length: int  # queries
    block: int  # tokens
    before: int  # blocks of keys before the first query
    buffer_blocks: int
    window: int | None
    shared: int  # query heads that share a key head

    @property
    def blocks(self):
        return self.before + pl.cdiv(self.length, self.block)

    def queries(self, g, s, r):
        """The block and the head of the queries in a step (g, s, r) of the grid."""
        block = jnp.clip(s - self.before, 0, self.blocks - self.before - 1)
        head = jnp.where(s < self.before, 0, jnp.where(s < self.blocks, r, self.shared - 1))
        return block, g * self.shared + head

    def keys(self, g, s, r):
        """The block and the head of the keys that a step copies into the buffers."""
        return jnp.minimum(s, self.blocks - 1), g

    def dropped_keys(self, g, s, r):
        """The block and the head of keys to which no query attends after a step."""
        oldest = jnp.maximum(s - self.buffer_blocks + 1, 0)
        # After the last block, each step writes one of the blocks that remain in the buffer.
        remaining = self.blocks - self.buffer_blocks + 1 + (s - self.blocks) * self.shared + r
        return jnp.where(s < self.blocks, oldest, jnp.minimum(remaining, self.blocks - 1)), g

    def aligned(self, x):
        """x [B, S, ...] padded in front, so that the first query is at the beginning of a block."""
        missing = self.before * self.block + self.length - x.shape[1]
        return jnp.pad(x, [(0, 0), (missing, 0)] + [(0, 0)] * (x.ndim - 2))

    def head(self, x, block_of):
        """x [B, T, ..., size], or its shape and dtype, in the `head_layout`, and its blocks.

        A block has one head; `block_of` returns the indices of the block and the head in a step.
        """
        size = x.shape[-1]
        x = (
            jax.eval_shape(head_layout, x)
            if isinstance(x, jax.ShapeDtypeStruct)
            else head_layout(x)
        )
        if x.ndim == 3:
            return x, pl.BlockSpec((None, self.block, size), lambda b, *step: (b, *block_of(*step)))
        return x, pl.BlockSpec(
            (None, None, self.block, size), lambda b, *step: (b, *block_of(*step)[::-1], 0)
        )

    def row(self, x, block_of):
        """x [B, 1, T], a number for each token, and its blocks."""
        return x, pl.BlockSpec((None, 1, self.block), lambda b, *step: (b, 0, block_of(*step)[0]))

    def buffer(self, rows, size, dtype):
        return pl.VMEM((self.buffer_blocks, rows, size), dtype)


class Step(NamedTuple):
    """A step of the grid, with the buffers of keys, values and their document numbers."""

    grid: Grid
    number: jax.Array
    head: jax.Array
    query_documents: "jax.Ref"
    key_documents: "jax.Ref"
    keys: "jax.Ref"
    values: "jax.Ref"
    documents: "jax.Ref"

    @property
    def has_new_keys(self):
        """True if a new block of keys must be copied into the buffers."""
        return (self.head == 0) & (self.number < self.grid.blocks)

    @property
    def has_queries(self):
        """True if there is a block of queries."""
        return (self.number >= self.grid.before) & (self.number < self.grid.blocks)

    @property
    def has_dropped_keys(self):
        """True if no query attends to a block of keys after this step."""
        last = (self.number >= self.grid.buffer_blocks - 1) & (self.head == self.grid.shared - 1)
        return (self.number >= self.grid.blocks) | last

    def slot(self, number):
        """The slot of a block in the buffers."""
        return jax.lax.rem(number, jnp.int32(self.grid.buffer_blocks))

    def put(self, k, v):
        """Copies the blocks of keys and values into the buffers."""
        slot, document = self.slot(self.number), self._documents(self.key_documents[...])
        self.keys[slot] = _mask_positions(document, k[...])
        self.values[slot] = _mask_positions(document, v[...])
        self.documents[slot] = document

    def mask_queries(self, x):
        """x [N, size], a block with a row for each query, with zeros where there is no token."""
        return _mask_positions(self._documents(self.query_documents[...]), x[...])

    def _documents(self, document):
        """The document numbers [1, N] of a block, 0 beyond the end of the sequence."""
        number = jax.lax.broadcasted_iota(jnp.int32, document.shape, 1)
        count = self.grid.length - (self.number - self.grid.before) * self.grid.block
        return jnp.where(number < count, document, 0)

    def scan_window(self, attend, carry):
        """Calls `carry = attend(slot, visible, carry)` for key blocks in the window, last first.

        `slot` is the slot of the block, `visible` [N, N] a mask of keys that a query attends to.
        """
        grid = self.grid
        query_documents = column(self._documents(self.query_documents[...]))
        queries, keys = row_and_column_numbers(grid.block)
        distance_in_block = queries - keys

        def step(age, carry):
            slot = self.slot(self.number - age)
            distance = distance_in_block + age * grid.block
            visible = (distance >= 0) & (query_documents == self.documents[slot])
            if grid.window is not None:
                visible &= distance < grid.window
            return attend(slot, visible, carry)

        return jax.lax.fori_loop(0, jnp.minimum(self.number + 1, grid.buffer_blocks), step, carry)


def fit_grid(q, k, v, window, keys_before):
    """The `Grid` for q [B, T, ..., K], k [B, S, G, K], v [B, S, G, V]; None if none fits VMEM."""
    length, shared = q.shape[1], math.prod(q.shape[2:-1]) // k.shape[2]
    for block in BLOCKS:
        before = pl.cdiv(keys_before, block)
        buffer_blocks = before + pl.cdiv(length, block)
        if window is not None:
            buffer_blocks = min(buffer_blocks, pl.cdiv(window - 1, block) + 1)
        if _bytes(block, buffer_blocks, q, k, v) <= vmem_bytes():
            return Grid(length, block, before, buffer_blocks, window, shared)
    return None


def _bytes(block, buffer_blocks, *tensors):
    """The VMEM of the backward pass, which needs more than the forward pass."""
    _, k, v = tensors
    item = max(x.dtype.itemsize for x in tensors)
    width = sum(round_up(x.shape[-1], LANES) for x in (k, v))
    # Twice the blocks of q, k, v and their gradients, since the next ones are prefetched.
    buffers, streams = buffer_blocks * block * width * (item + 4), 2 * block * 4 * width * item
    # Products of float32 are split into several of bfloat16.
    working = 4 * block * (6 * block + 2 * width) * (1 if item == 2 else 2)
    return buffers + streams + working


def call(
    grid, kernel, k, v, query_documents, key_documents, inputs, outputs, sums=(), steps_after=0
):
    """Calls `kernel(step, *inputs, *outputs, *sums)` for one step of the grid after another.

    Args:
        inputs: pairs of a tensor and its blocks.
        outputs: pairs of a shape with its dtype and its blocks.
        sums: the head sizes of the float32 buffers in which the kernel accumulates sums.
        steps_after: the number of steps after the last block.
    """
    given = [
        grid.row(query_documents[:, None], grid.queries),
        grid.row(grid.aligned(key_documents)[:, None], grid.keys),
        grid.head(grid.aligned(k), grid.keys),
        grid.head(grid.aligned(v), grid.keys),
        *inputs,
    ]
    streamed = len(inputs) + len(outputs)

    def body(query_documents, key_documents, k, v, *references):
        blocks, (keys, values, documents, *sums) = references[:streamed], references[streamed:]
        number, head, buffers = pl.program_id(2), pl.program_id(3), (keys, values, documents)
        step = Step(grid, number, head, query_documents, key_documents, *buffers)

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
            grid.buffer(grid.block, k.shape[3], k.dtype),
            grid.buffer(grid.block, v.shape[3], v.dtype),
            grid.buffer(1, grid.block, jnp.int32),
            *(grid.buffer(grid.block, size, jnp.float32) for size in sums),
        ],
        name=kernel.__name__.strip("_"),
    )(*(tensor for tensor, _ in given))


def head_layout(x):
    """x [B, T, ..., size] in the layout from which kernels read one head.

    [B, T, heads * size], as in the layers, if a head fills whole vectors. Else XLA transposes it to
    [B, heads, T, size].
    """
    if x.shape[-1] % LANES == 0:
        return x.reshape(*x.shape[:2], -1)
    return jnp.swapaxes(x.reshape(*x.shape[:2], -1, x.shape[-1]), 1, 2)


def undo_head_layout(x, shape):
    """The inverse of `head_layout`."""
    return (x if x.ndim == 3 else jnp.swapaxes(x, 1, 2)).reshape(shape)


def column(row):
    """[1, N] as [N, 1]."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T[:, :1]


def _mask_positions(document, x):
    """x [N, size] with zeros where the document is 0."""
    return jnp.where(jnp.broadcast_to(column(document), x.shape) > 0, x, 0)
