"""Linear attention along time: blocks of tokens stream through VMEM, and are cut into chunks.

A program has some heads of a row, and goes through their blocks one after another. The states stay
in VMEM, transposed to [V, K], where the decays of keys lie along a vector. Of a block, one chunk
after another is worked on, by matrix products. The backward meets each block once, from the last
to the first: it goes through the chunks forwards for the states between them, then backwards for
the gradients. Only if a row has several blocks, a kernel before it collects the states with which
they begin.

One token, a step of generation, is refused: the plain version reads and writes the state once, too,
and a chunk would multiply 128 tokens for it.

An operation brings a class, a chunk of a head, whose `working_set` says how many arrays [C, C] or
[C, K] it computes with at a time. It is made of `Tokens`, the head's number out of
`per_head` if there are such, and the tensors, [C, K or V]. With states [V, K], it has the methods

    after(state): the state after the chunk, to which the first tensor, q, does not add: it is None;
    forward(state): the output [C, V], and the state after the chunk;
    backward(state, g, d_output): a list, the gradient of each tensor; and that of the state before
        the chunk, where g is that of the state after it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from keras_recurrent.backends.pallas import _common
from keras_recurrent.backends.pallas._common import LANES, PADDING, STARTS, vmem_bytes
from keras_recurrent.backends.pallas._lazy import pl, pltpu

CHUNK = 128  # tokens: their pairs fill the matrix unit


def refusal(*tensors):
    """Why the kernels refuse q, k, v and others, by what is static; None if they accept them."""
    reason = _common.refusal(*tensors)
    if reason is None and tensors[0].shape[1] == 1:
        return "needs more than one token: for one, XLA reads and writes the state once, too"
    return reason


class Tokens:
    """The kinds of a chunk's tokens, as a row [1, C] and as a column [C, 1]."""

    def __init__(self, kind, there):
        """kind: int32 [1, C]; all but the first `there` are beyond the sequence: padding."""
        place = jax.lax.broadcasted_iota(jnp.int32, kind.shape, 1)
        self.row = jnp.where(place < there, kind, PADDING)
        self.column = column(self.row)

    def real(self, x):
        """x [C, K], and zeros at padding, whatever stood there."""
        return jnp.where(jnp.broadcast_to(self.column, x.shape) == PADDING, 0, x)

    def where_going_on(self, decay):
        """The decay [C, K] that each token really applies."""
        kind = jnp.broadcast_to(self.column, decay.shape)
        return jnp.where(kind == PADDING, 1, jnp.where(kind == STARTS, 0, decay))


def places(size):
    """Numbers of the rows and of the columns of a square."""
    square = (size, size)
    return tuple(jax.lax.broadcasted_iota(jnp.int32, square, axis) for axis in (0, 1))


def token(x):
    """The number of each token of x [C, K], everywhere in its row."""
    return jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)


def column(row):
    """[1, C] as [C, 1]: the diagonal of a square, which is cheap beside a chunk's products."""
    rows, columns = places(row.shape[1])
    return jnp.sum(jnp.where(rows == columns, row, 0), axis=1, keepdims=True)


def row(column):
    """[C, 1] as [1, C]."""
    rows, columns = places(column.shape[0])
    return jnp.sum(jnp.where(rows == columns, column, 0), axis=0, keepdims=True)


def short(tensors):
    """Whether q, k and v have 16 bits."""
    return all(x is None or x.dtype == jnp.bfloat16 for x in tensors[:3])


def products(tensors):
    """The matrix product a b for chunks of these tensors; with `over`, other axes are summed over.

    Numbers of 16 bits meet in one pass of the matrix unit, and what was computed from them is
    rounded to that for it. Others contract as float32.
    """
    one_pass = short(tensors)
    dtype = jnp.bfloat16 if one_pass else jnp.float32
    precision = jax.lax.Precision.DEFAULT if one_pass else jax.lax.Precision.HIGHEST

    def product(a, b, over=(1, 0)):
        dimensions = (((over[0],), (over[1],)), ((), ()))
        return jax.lax.dot_general(
            a.astype(dtype), b.astype(dtype), dimensions, precision, jnp.float32
        )

    return product


class _Block(NamedTuple):
    """A tensor, or its shape and dtype, and which part of it a program has at a time."""

    tensor: jax.Array | jax.ShapeDtypeStruct
    spec: "pl.BlockSpec"


class _Walk(NamedTuple):
    """The grid: rows, groups of heads, and blocks of time one after another."""

    batch: int
    length: int
    heads: int
    together: int  # heads of a group: as many as fill whole vectors, or all
    keys: int
    values: int
    chunks: int  # of a block

    @property
    def block(self):
        return self.chunks * CHUNK

    @property
    def blocks(self):
        return pl.cdiv(self.length, self.block)

    @property
    def states(self):
        return (self.together, self.values, self.keys)

    def in_order(self, t):
        return t

    def from_last(self, t):
        return self.blocks - 1 - t

    def given(self, tensors, token_kind, per_head, at):
        if token_kind is None:
            token_kind = jnp.zeros((self.batch, self.length), jnp.int32)
        kind = token_kind.astype(jnp.int32)[:, None]
        spec = pl.BlockSpec((None, 1, self.block), lambda b, h, t: (b, 0, at(t)))
        if per_head is not None:
            per_head = _Block(per_head.astype(jnp.float32), pl.BlockSpec(memory_space=pltpu.SMEM))
        tensors = [None if x is None else self.tokens(x, at) for x in tensors]
        return _Block(kind, spec), per_head, tensors

    def tokens(self, x, at):
        """x [B, T, H, ...] with its heads side by side, as the layers make and take it."""
        shape = (self.batch, self.length, self.heads * x.shape[3])
        spec = pl.BlockSpec(
            (None, self.block, self.together * x.shape[3]), lambda b, h, t: (b, at(t), h)
        )
        return _Block(x.reshape(shape), spec)

    def state(self, x):
        block = (None, self.together, self.keys, self.values)
        return _Block(x, pl.BlockSpec(block, lambda b, h, t: (b, h, 0, 0)))

    def first_states(self, x, at):
        """x: [B, H, blocks, V, K]"""
        block = (None, self.together, None, self.values, self.keys)
        return _Block(x, pl.BlockSpec(block, lambda b, h, t: (b, h, at(t), 0, 0)))

    def lanes(self, ref, head):
        width = ref.shape[1] // self.together
        return slice(head * width, (head + 1) * width)

    def over_chunks(self, chunk, given, block, work, reverse=False):
        """`work(c, head, rows, chunk of that head)` for one chunk of a block after another."""
        kind, per_head, tensors = given
        product = products(tensors)
        first = pl.program_id(1) * self.together
        there = self.length - block * self.block
        count = jnp.minimum(self.chunks, pl.cdiv(there, CHUNK))

        def step(i, _):
            c = count - 1 - i if reverse else i
            rows = pl.ds(pl.multiple_of(c * CHUNK, CHUNK), CHUNK)
            tokens = Tokens(kind[:, rows], there - c * CHUNK)
            for head in range(self.together):
                constant = None if per_head is None else per_head[first + head]
                parts = [None if x is None else x[rows, self.lanes(x, head)] for x in tensors]
                work(c, head, rows, chunk(product, tokens, constant, *parts))

        jax.lax.fori_loop(0, count, step, None)

    def call(self, kernel, inputs, outputs, scratch):
        def each(what, blocks):
            return jax.tree.map(what, blocks, is_leaf=lambda x: isinstance(x, _Block))

        def spec(block):
            return block.spec

        return pl.pallas_call(
            kernel,
            grid=(self.batch, self.heads // self.together, self.blocks),
            in_specs=each(spec, inputs),
            out_specs=each(spec, outputs),
            out_shape=each(
                lambda block: jax.ShapeDtypeStruct(block.tensor.shape, block.tensor.dtype), outputs
            ),
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary"),
                vmem_limit_bytes=vmem_bytes(),
            ),
            name=kernel.__qualname__.split(".")[0].strip("_"),
        )(*each(lambda block: block.tensor, inputs))


def _walk(chunk, tensors, streams):
    """The walk for q, k, v, ... with blocks as long as VMEM has room for all `streams`."""
    (batch, length, heads, keys), values = tensors[0].shape, tensors[2].shape[3]
    together = next(
        (
            n
            for n in range(1, heads)
            if heads % n == 0 and n * keys % LANES == 0 and n * values % LANES == 0
        ),
        heads,
    )
    chunks = pl.cdiv(length, CHUNK)
    # Of a stream, one block is worked on and another on its way.
    widths = sum(x.shape[3] * x.dtype.itemsize for x in streams if x is not None)
    bytes_of_chunk = together * (2 * CHUNK * widths + 4 * keys * values)
    working_set = 4 * CHUNK * max(CHUNK, keys, values) * chunk.working_set
    if not short(tensors):
        working_set *= 2  # a product of float32 takes its operands to pieces
    blocks = pl.cdiv(chunks, max(1, (vmem_bytes() - working_set) // bytes_of_chunk))
    return _Walk(batch, length, heads, together, keys, values, pl.cdiv(chunks, blocks))


def forward(chunk, tensors, initial_state, token_kind, per_head=None):
    """Returns the output, [B, T, H, V] as v, and the final state [B, H, K, V].

    tensors: q, k, v and perhaps others, [B, T, H, ...] or None; per_head: float32 [H] or None.
    """
    v = tensors[2]
    walk = _walk(chunk, tensors, [*tensors, v])

    def kernel(given, initial, output, final, state):
        @pl.when(pl.program_id(2) == 0)
        def _():
            for head in range(walk.together):
                state[head] = initial[head].T

        def work(_, head, rows, this):
            out, state[head] = this.forward(state[head])
            output[rows, walk.lanes(output, head)] = out.astype(output.dtype)

        walk.over_chunks(chunk, given, pl.program_id(2), work)

        @pl.when(pl.program_id(2) == walk.blocks - 1)
        def _():
            for head in range(walk.together):
                final[head] = state[head].T

    state = walk.state(initial_state)
    output, final_state = walk.call(
        kernel,
        [walk.given(tensors, token_kind, per_head, walk.in_order), state],
        [walk.tokens(v, walk.in_order), state],
        [walk.states],
    )
    return output.reshape(v.shape), final_state


def backward(chunk, tensors, initial_state, token_kind, d_output, d_final, per_head=None):
    """Returns the gradients of the tensors that are not None, and that of the initial state."""
    walk = _walk(chunk, tensors, [*tensors, *tensors, d_output])

    def kernel(given, begin, d_output, d_final, gradients, d_initial, states, g):
        block = walk.from_last(pl.program_id(2))

        @pl.when(block == walk.blocks - 1)
        def _():
            for head in range(walk.together):
                g[head] = d_final[head].T

        for head in range(walk.together):
            states[0, head] = begin[head] if walk.blocks > 1 else begin[head].T

        def forwards(c, head, rows, this):
            @pl.when(c + 1 < walk.chunks)
            def _():
                states[c + 1, head] = this.after(states[c, head])

        def backwards(c, head, rows, this):
            d_out = d_output[rows, walk.lanes(d_output, head)]
            found, g[head] = this.backward(states[c, head], g[head], d_out)
            for gradient, d in zip(jax.tree.leaves(gradients), found, strict=True):
                gradient[rows, walk.lanes(gradient, head)] = d.astype(gradient.dtype)

        if walk.chunks > 1:
            walk.over_chunks(chunk, given, block, forwards)
        walk.over_chunks(chunk, given, block, backwards, reverse=True)

        @pl.when(block == 0)
        def _():
            for head in range(walk.together):
                d_initial[head] = g[head].T

    at, state = walk.from_last, walk.state(initial_state)
    begin = state
    if walk.blocks > 1:
        begin = _states(chunk, walk, tensors, initial_state, token_kind, per_head)
        begin = walk.first_states(begin, at)
    gradients, d_initial = walk.call(
        kernel,
        [
            walk.given(tensors, token_kind, per_head, at),
            begin,
            walk.tokens(d_output, at),
            walk.state(d_final),
        ],
        [[walk.tokens(x, at) for x in tensors if x is not None], state],
        [(walk.chunks, *walk.states), walk.states],
    )
    given = [x for x in tensors if x is not None]
    return [d.reshape(x.shape) for d, x in zip(gradients, given, strict=True)], d_initial


def _states(chunk, walk, tensors, initial_state, token_kind, per_head):
    """The states [B, H, blocks, V, K] with which blocks begin. The last block is not read."""

    def kernel(given, initial, begin, state):
        block = pl.program_id(2)

        @pl.when(block == 0)
        def _():
            for head in range(walk.together):
                state[head] = initial[head].T

        begin[...] = state[...]

        def work(_, head, rows, this):
            state[head] = this.after(state[head])

        @pl.when(block < walk.blocks - 1)
        def _():
            walk.over_chunks(chunk, given, block, work)

    def at(t):
        return jnp.minimum(t, walk.blocks - 2)

    shape = (walk.batch, walk.heads, walk.blocks, walk.values, walk.keys)
    (states,) = walk.call(
        kernel,
        [
            walk.given([None, *tensors[1:]], token_kind, per_head, at),
            walk.state(initial_state),
        ],
        [walk.first_states(jax.ShapeDtypeStruct(shape, jnp.float32), walk.in_order)],
        [walk.states],
    )
    return states
