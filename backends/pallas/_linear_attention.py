"""Streaming of linear attention through VMEM, in blocks of tokens, cut into chunks.

A program computes a group of heads of one sequence, block by block. The states stay in VMEM,
transposed to [V, K], so that the decays of the key channels lie along a vector. A block is computed
chunk by chunk, by matrix products. The backward pass reads each block once, from the last to the
first, and scans its chunks twice: forwards for the states between them, then backwards for the
gradients. If a sequence has several blocks, another kernel first computes the states at their
beginnings.

A single token, as in a decoding step, is unsupported: the plain version also reads and writes the
state only once, and a chunk would multiply 128 tokens for it.

An operation defines a class, a chunk of one head, with the attribute `working_set`: the number of
arrays [C, C] or [C, K] that it uses at a time. Its constructor takes a matrix product, `Tokens`,
the head's entry of `per_head` (or None) and the tensors, [C, K or V]. Its methods take states [V,
K]:

    next_state(state): the state after the chunk. q, the first tensor, is None here;
    forward(state): the output [C, V] and the state after the chunk;
    backward(state, g, d_output): a list with the gradient of each tensor, and the gradient of the
        state before the chunk, where g is the gradient of the state after it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..constants import CONTINUES, PADDING, STARTS
from . import _common
from . import _pallas as pl
from ._common import LANES, pallas_call, vmem_bytes

CHUNK = 128  # tokens: the side of the matrix unit


def unsupported_reason(**arguments):
    """Reason the kernels do not support an operation's arguments, or None."""
    reason = _common.unsupported_reason(**arguments)
    if reason is None and arguments["q"].shape[1] == 1:
        return "needs more than one token: for one, XLA reads and writes the state once, too"
    return reason


class Tokens:
    """The kinds of a chunk's tokens, as a row [1, C] and as a column [C, 1]."""

    def __init__(self, kind, left):
        """kind: int32 [1, C]; tokens from index `left`, beyond the sequence, are padding."""
        number = jax.lax.broadcasted_iota(jnp.int32, kind.shape, 1)
        self.row = jnp.where(number < left, kind, PADDING)
        self.column = column(self.row)

    def mask_padding(self, x):
        """x [C, K] with zeros at padding."""
        return jnp.where(jnp.broadcast_to(self.column, x.shape) == PADDING, 0, x)

    def applied_decay(self, decay):
        """The decay [C, K] applied to the state: 0 at a start, 1 at padding."""
        kind = jnp.broadcast_to(self.column, decay.shape)
        return jnp.where(kind == PADDING, 1, jnp.where(kind == STARTS, 0, decay))


def row_and_column_numbers(size):
    """The row number and the column number of each element of a square."""
    square = (size, size)
    return tuple(jax.lax.broadcasted_iota(jnp.int32, square, axis) for axis in (0, 1))


def token_number(x):
    """The index of each token of x [C, K], broadcast over channels."""
    return jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)


def column(row):
    """[1, C] as [C, 1], through the diagonal of a square: cheap compared with the products."""
    rows, columns = row_and_column_numbers(row.shape[1])
    return jnp.sum(jnp.where(rows == columns, row, 0), axis=1, keepdims=True)


def row(column):
    """[C, 1] as [1, C]."""
    rows, columns = row_and_column_numbers(column.shape[0])
    return jnp.sum(jnp.where(rows == columns, column, 0), axis=0, keepdims=True)


def are_bfloat16(tensors):
    """Returns True if q, k and v are bfloat16."""
    return all(x is None or x.dtype == jnp.bfloat16 for x in tensors[:3])


def products(tensors):
    """Returns a matrix product of chunks of these tensors; `over`: the axes summed over.

    If q, k and v have 16 bits, both operands are rounded to bfloat16, for which the matrix unit
    needs one pass. Else the product is exact to float32.
    """
    one_pass = are_bfloat16(tensors)
    dtype = jnp.bfloat16 if one_pass else jnp.float32
    precision = jax.lax.Precision.DEFAULT if one_pass else jax.lax.Precision.HIGHEST

    def product(a, b, over=(1, 0)):
        dimensions = (((over[0],), (over[1],)), ((), ()))
        return jax.lax.dot_general(
            a.astype(dtype), b.astype(dtype), dimensions, precision, jnp.float32
        )

    return product


class _Block(NamedTuple):
    """A tensor, or its shape and dtype, and the block that each step of the grid accesses."""

    tensor: jax.Array | jax.ShapeDtypeStruct
    spec: Any  # a `pl.BlockSpec`


class _Grid(NamedTuple):
    """The grid of a kernel: sequences, groups of heads, and sequential blocks of tokens."""

    batch: int
    length: int
    heads: int
    group: int  # heads in a group: the fewest whose channels fill whole vectors, else all
    keys: int
    values: int
    chunks: int  # in a block

    @property
    def block(self):
        return self.chunks * CHUNK

    @property
    def blocks(self):
        return pl.cdiv(self.length, self.block)

    @property
    def states(self):
        return (self.group, self.values, self.keys)

    def forward_block(self, t):
        return t

    def backward_block(self, t):
        return self.blocks - 1 - t

    def inputs(self, tensors, token_kind, per_head, block_of):
        """Blocks of token kinds, `per_head` and tensors; step t has block `block_of(t)`."""
        if token_kind is None:
            token_kind = jnp.full((self.batch, self.length), CONTINUES, jnp.int32)
        kind = token_kind.astype(jnp.int32)[:, None]
        spec = pl.BlockSpec((None, 1, self.block), lambda b, h, t: (b, 0, block_of(t)))
        if per_head is not None:
            per_head = _Block(per_head.astype(jnp.float32), pl.BlockSpec(memory_space=pl.SMEM))
        tensors = [None if x is None else self.tokens(x, block_of) for x in tensors]
        return _Block(kind, spec), per_head, tensors

    def tokens(self, x, block_of):
        """Blocks of x [B, T, H, ...], with heads in the channel axis, as in the layers."""
        shape = (self.batch, self.length, self.heads * x.shape[3])
        spec = pl.BlockSpec(
            (None, self.block, self.group * x.shape[3]), lambda b, h, t: (b, block_of(t), h)
        )
        return _Block(x.reshape(shape), spec)

    def state(self, x):
        """Blocks of x [B, H, K, V]: the states of a group, the same block in all steps."""
        block = (None, self.group, self.keys, self.values)
        return _Block(x, pl.BlockSpec(block, lambda b, h, t: (b, h, 0, 0)))

    def block_states(self, x, block_of):
        """Blocks of x [B, H, blocks, V, K]: the states of a group before each block of tokens."""
        block = (None, self.group, None, self.values, self.keys)
        return _Block(x, pl.BlockSpec(block, lambda b, h, t: (b, h, block_of(t), 0, 0)))

    def transpose_states(self, condition, source, target):
        """Writes the transposed states of a group to `target` in the step of the condition."""

        @pl.when(condition)
        def _():
            for head in range(self.group):
                target[head] = source[head].T

    def lanes(self, ref, head):
        """The channels of a head of the group."""
        width = ref.shape[1] // self.group
        return slice(head * width, (head + 1) * width)

    def scan_chunks(self, chunk_class, inputs, block, work, reverse=False):
        """Calls `work(c, head, rows, chunk of the head)` for one chunk of a block after another."""
        kind, per_head, tensors = inputs
        product = products(tensors)
        first = pl.program_id(1) * self.group
        left = self.length - block * self.block
        count = jnp.minimum(self.chunks, pl.cdiv(left, jnp.int32(CHUNK)))

        def step(i, _):
            c = count - 1 - i if reverse else i
            rows = pl.ds(pl.multiple_of(c * CHUNK, CHUNK), CHUNK)
            tokens = Tokens(kind[:, rows], left - c * CHUNK)
            for head in range(self.group):
                constant = None if per_head is None else per_head[first + head]
                parts = [None if x is None else x[rows, self.lanes(x, head)] for x in tensors]
                work(c, head, rows, chunk_class(product, tokens, constant, *parts))

        jax.lax.fori_loop(0, count, step, None)

    def call(self, kernel, inputs, outputs, scratch):
        def map_blocks(function, blocks):
            return jax.tree.map(function, blocks, is_leaf=lambda x: isinstance(x, _Block))

        def spec(block):
            return block.spec

        return pallas_call(
            kernel,
            grid=(self.batch, self.heads // self.group, self.blocks),
            in_specs=map_blocks(spec, inputs),
            out_specs=map_blocks(spec, outputs),
            out_shape=map_blocks(
                lambda block: jax.ShapeDtypeStruct(block.tensor.shape, block.tensor.dtype), outputs
            ),
            scratch_shapes=[pl.VMEM(shape, jnp.float32) for shape in scratch],
            name=kernel.__qualname__.split(".")[0].strip("_"),
        )(*map_blocks(lambda block: block.tensor, inputs))


def _grid(chunk_class, tensors, streams):
    """The grid for q, k, v, ... with the longest blocks of all `streams` that fit VMEM."""
    (batch, length, heads, keys), values = tensors[0].shape, tensors[2].shape[3]
    group = next(
        (
            n
            for n in range(1, heads)
            if heads % n == 0 and n * keys % LANES == 0 and n * values % LANES == 0
        ),
        heads,
    )
    chunks = pl.cdiv(length, CHUNK)
    # Twice the block of a stream, since the next one is prefetched.
    widths = sum(x.shape[3] * x.dtype.itemsize for x in streams if x is not None)
    bytes_of_chunk = group * (2 * CHUNK * widths + 4 * keys * values)
    working_set = 4 * CHUNK * max(CHUNK, keys, values) * chunk_class.working_set
    if not are_bfloat16(tensors):
        working_set *= 2  # products of float32 are split into several of bfloat16
    blocks = pl.cdiv(chunks, max(1, (vmem_bytes() - working_set) // bytes_of_chunk))
    return _Grid(batch, length, heads, group, keys, values, pl.cdiv(chunks, blocks))


def forward(chunk_class, tensors, initial_state, token_kind, per_head=None):
    """Returns the output, [B, T, H, V] as v, and the final state [B, H, K, V].

    tensors: q, k, v and optional others, [B, T, H, ...] or None; per_head: float32 [H] or None.
    """
    v = tensors[2]
    grid = _grid(chunk_class, tensors, [*tensors, v])

    def kernel(inputs, initial, output, final, state):
        grid.transpose_states(pl.program_id(2) == 0, initial, state)

        def work(_, head, rows, chunk):
            out, state[head] = chunk.forward(state[head])
            output[rows, grid.lanes(output, head)] = out.astype(output.dtype)

        grid.scan_chunks(chunk_class, inputs, pl.program_id(2), work)

        grid.transpose_states(pl.program_id(2) == grid.blocks - 1, state, final)

    state = grid.state(initial_state)
    output, final_state = grid.call(
        kernel,
        [grid.inputs(tensors, token_kind, per_head, grid.forward_block), state],
        [grid.tokens(v, grid.forward_block), state],
        [grid.states],
    )
    return output.reshape(v.shape), final_state


def backward(chunk_class, tensors, initial_state, token_kind, d_output, d_final, per_head=None):
    """Returns the gradients of tensors other than None, and that of the initial state."""
    grid = _grid(chunk_class, tensors, [*tensors, *tensors, d_output])

    def kernel(inputs, begin, d_output, d_final, gradients, d_initial, states, g):
        block = grid.backward_block(pl.program_id(2))

        grid.transpose_states(block == grid.blocks - 1, d_final, g)

        for head in range(grid.group):
            states[0, head] = begin[head] if grid.blocks > 1 else begin[head].T

        def forwards(c, head, rows, chunk):
            @pl.when(c + 1 < grid.chunks)
            def _():
                states[c + 1, head] = chunk.next_state(states[c, head])

        def backwards(c, head, rows, chunk):
            d_out = d_output[rows, grid.lanes(d_output, head)]
            found, g[head] = chunk.backward(states[c, head], g[head], d_out)
            for gradient, d in zip(jax.tree.leaves(gradients), found, strict=True):
                gradient[rows, grid.lanes(gradient, head)] = d.astype(gradient.dtype)

        if grid.chunks > 1:
            grid.scan_chunks(chunk_class, inputs, block, forwards)
        grid.scan_chunks(chunk_class, inputs, block, backwards, reverse=True)

        grid.transpose_states(block == 0, g, d_initial)

    block_of, state = grid.backward_block, grid.state(initial_state)
    begin = state
    if grid.blocks > 1:
        begin = _states(chunk_class, grid, tensors, initial_state, token_kind, per_head)
        begin = grid.block_states(begin, block_of)
    gradients, d_initial = grid.call(
        kernel,
        [
            grid.inputs(tensors, token_kind, per_head, block_of),
            begin,
            grid.tokens(d_output, block_of),
            grid.state(d_final),
        ],
        [[grid.tokens(x, block_of) for x in tensors if x is not None], state],
        [(grid.chunks, *grid.states), grid.states],
    )
    given = [x for x in tensors if x is not None]
    return [d.reshape(x.shape) for d, x in zip(gradients, given, strict=True)], d_initial


def _states(chunk_class, grid, tensors, initial_state, token_kind, per_head):
    """The states [B, H, blocks, V, K] at the beginning of each block."""

    def kernel(inputs, initial, begin, state):
        block = pl.program_id(2)

        grid.transpose_states(block == 0, initial, state)

        begin[...] = state[...]

        def work(_, head, rows, chunk):
            state[head] = chunk.next_state(state[head])

        @pl.when(block < grid.blocks - 1)
        def _():
            grid.scan_chunks(chunk_class, inputs, block, work)

    def block_of(t):  # The last block is not needed and not read again in the last step.
        return jnp.minimum(t, grid.blocks - 2)

    shape = (grid.batch, grid.heads, grid.blocks, grid.values, grid.keys)
    (states,) = grid.call(
        kernel,
        [
            grid.inputs([None, *tensors[1:]], token_kind, per_head, block_of),
            grid.state(initial_state),
        ],
        [grid.block_states(jax.ShapeDtypeStruct(shape, jnp.float32), grid.forward_block)],
        [grid.states],
    )
    return states
