"""Softmax attention of queries to the keys before them, block by block, as in `backends/jax`.

q: [B, G, T, R, K]; k: [B, G, S, K]; v: [B, G, S, V]; documents: of queries [B, T] and keys [B, S].
"""

import itertools

import tensorflow as tf

from ..constants import ATTENTION_BLOCK, span_edges


def attend(q, k, v, documents, window):
    """Returns [B, G, T, R, V]."""

    @tf.custom_gradient
    def run(q, k, v):
        output = _forward(q, k, v, documents, window)
        return output, lambda d_output: _backward(d_output, q, k, v, documents, window)

    return run(q, k, v)


def _forward(q, k, v, documents, window):
    blocks = _Blocks(q, k, documents, window)
    q, k, v = blocks.padded_queries(q), blocks.padded_keys(k), blocks.padded_keys(v)

    def attend(block, carry):
        logits = block.hide(tf.matmul(block.queries(q), block.keys(k), transpose_b=True))
        highest = tf.reduce_max(logits, axis=-1, keepdims=True)
        weights = tf.exp(logits - highest)
        total = tf.reduce_sum(weights, axis=-1, keepdims=True)
        return carry, [tf.matmul(weights, block.keys(v)) / total]

    _, (output,) = blocks.scan_blocks(attend, [], [v.shape[-1]], v.dtype)
    return blocks.join_blocks(output, blocks.heads)[:, :, : blocks.length]


def _backward(d_output, q, k, v, documents, window):
    """Returns the gradients of q, k and v."""
    blocks = _Blocks(q, k, documents, window)
    q, d_output = map(blocks.padded_queries, (q, d_output))
    num_keys = tf.shape(k)[2]
    k, v = blocks.padded_keys(k), blocks.padded_keys(v)

    def attend(block, carry):
        q_b, k_b, v_b, d_o = block.queries(q), block.keys(k), block.keys(v), block.queries(d_output)
        # As in `backends/jax`, sums of the forward pass are not used, and the difference is first.
        weights = softmax(block.hide(tf.matmul(q_b, k_b, transpose_b=True)))
        d_weights = tf.matmul(d_o, v_b, transpose_b=True)
        mean = tf.reduce_sum(weights * d_weights, axis=-1, keepdims=True)
        d_logits = weights * (d_weights - mean)
        d_keys = [
            tf.matmul(d_logits, q_b, transpose_a=True),
            tf.matmul(weights, d_o, transpose_a=True),
        ]
        carry, done = block.add(carry, d_keys)
        return carry, [tf.matmul(d_logits, k_b), *done]

    sizes = [k.shape[-1], v.shape[-1]]
    carry = [tf.zeros_like(x[:, :, : blocks.overlap]) for x in (k, v)]
    sizes_of_results = [q.shape[-1], *(sizes if window else [])]
    carry, (d_q, *done) = blocks.scan_blocks(attend, carry, sizes_of_results, q.dtype)
    if window:
        done = [blocks.join_blocks(d, 1)[:, :, :, 0] for d in done]
        carry = [tf.concat(pair, axis=2) for pair in zip(done, carry, strict=True)]
    d_q = blocks.join_blocks(d_q, blocks.heads)[:, :, : blocks.length]
    return d_q, *(d[:, :, :num_keys] for d in carry)


def softmax(logits):
    """Softmax over the last axis, with a division.

    `tf.nn.softmax` multiplies by a reciprocal, which CPUs without AVX-512 approximate: a key with
    all the weight gets 1 - 2^-24, and the gradients of its logits do not vanish.
    """
    weights = tf.exp(logits - tf.reduce_max(logits, axis=-1, keepdims=True))
    return weights / tf.reduce_sum(weights, axis=-1, keepdims=True)


class _Blocks:
    """Partition of queries and keys into blocks. Any size except those of heads may be a tensor."""

    def __init__(self, q, k, documents, window):
        self.batch, self.groups, self.length = tf.shape(q)[0], q.shape[1], _size(q, 2)
        self.heads, self.window = q.shape[3], window
        self.before = _size(k, 2) - self.length
        self.size = ATTENTION_BLOCK
        while self.size > 8 and (
            (isinstance(self.length, int) and self.size >= 2 * self.length)
            or (window and self.size > window)
        ):
            self.size //= 2
        self.count = -(-self.length // self.size)
        self.missing = self.count * self.size - self.length
        # The number of keys that a block shares with the next one.
        self.overlap = window - 1 if window else 0
        # Padding of the last block is a separate document, so that no query has an empty sum.
        self.documents = [
            tf.pad(d, [[0, 0], [0, self.missing]], constant_values=-1) for d in documents
        ]

    def padded_queries(self, x):
        """[B, G, T, R, ...] as [B, G, blocks * size * R, ...]."""
        x = tf.pad(x, [[0, 0], [0, 0], [0, self.missing], [0, 0], [0, 0]])
        return tf.reshape(x, [self.batch, self.groups, -1, x.shape[4]])

    def padded_keys(self, x):
        return tf.pad(x, [[0, 0], [0, 0], [0, self.missing], [0, 0]])

    def join_blocks(self, results, heads):
        """[blocks, B, G, size * heads, K] as [B, G, blocks * size, heads, K]."""
        rows = tf.transpose(results, [1, 2, 0, 3, 4])
        return tf.reshape(rows, [self.batch, self.groups, -1, heads, results.shape[4]])

    def scan_blocks(self, step, carry, sizes, dtype):
        """Calls `step(block, carry) -> (carry, results)` for one block after another.

        Returns the last carry and the stacked results; `sizes` are the sizes of their last axes.
        """
        edges = [0, self.count]
        # Spans need a known length: otherwise a span may be empty, with no results to stack.
        if not self.window and isinstance(self.count, int):
            edges = span_edges(self.count)
        parts = []
        for first, end in itertools.pairwise(edges):
            width = self.overlap + self.size if self.window else self.before + end * self.size
            if not self.window:
                carry = [_pad_time(x, width) for x in carry]
            carry, results = self._scan_span(step, carry, first, end, width, sizes, dtype)
            parts.append(results)
        return carry, [tf.concat(part, axis=0) for part in zip(*parts, strict=True)]

    def _scan_span(self, step, carry, first, end, width, sizes, dtype):
        if isinstance(first, int) and isinstance(end, int) and end - first == 1:
            carry, results = step(_Block(self, first, width), carry)
            return carry, [r[None] for r in results]

        shapes = [x.shape for x in carry]

        def body(number, carry, arrays):
            carry, results = step(_Block(self, number, width), carry)
            for x, shape in zip(carry, shapes, strict=True):
                x.set_shape(shape)  # lost if sizes are tensors
            arrays = [a.write(number - first, r) for a, r in zip(arrays, results, strict=True)]
            return number + 1, carry, arrays

        arrays = [
            tf.TensorArray(dtype, end - first, element_shape=[None, self.groups, None, size])
            for size in sizes
        ]
        _, carry, arrays = tf.while_loop(
            lambda number, *_: number < end,
            body,
            (tf.convert_to_tensor(first), carry, arrays),
            shape_invariants=(tf.TensorShape([]), shapes, [None] * len(arrays)),
        )
        return carry, [a.stack() for a in arrays]


class _Block:
    """A block of queries, and the keys that at least one of them attends to."""

    def __init__(self, blocks, number, width):
        self.blocks, self.width = blocks, width
        self.start = number * blocks.size
        self.first = self.start if blocks.window else 0

    def queries(self, x):
        rows = self.blocks.size * self.blocks.heads
        return self._slice(x, self.start * self.blocks.heads, rows)

    def keys(self, x):
        return self._slice(x, self.first, self.width)

    def _slice(self, x, start, size):
        sizes = [self.blocks.batch, self.blocks.groups, size, x.shape[3]]
        return tf.slice(x, [0, 0, start, 0], sizes)

    def hide(self, logits):
        """Masks logits [B, G, size * R, width] where a query does not attend to a key."""
        b = self.blocks
        index = b.before + self.start + tf.range(b.size)[:, None]
        distance = index - (self.first + tf.range(self.width))
        in_window = distance >= 0
        if b.window:
            in_window &= distance < b.window
        of_queries, of_keys = b.documents
        of_queries = tf.slice(of_queries, [0, self.start], [b.batch, b.size])
        of_keys = tf.slice(of_keys, [0, self.first], [b.batch, self.width])
        visible = in_window & (of_queries[:, :, None] == of_keys[:, None])
        shape = tf.shape(logits)
        logits = tf.reshape(logits, [b.batch, b.groups, b.size, b.heads, self.width])
        hidden = tf.where(visible[:, None, :, None], logits, logits.dtype.min)
        return tf.reshape(hidden, shape)

    def add(self, carry, d_keys):
        """Adds to the gradients of keys; returns (sums that later blocks add to, final sums).

        Without a window, later blocks add to all of them.
        """
        if not self.blocks.window:
            return [c + d for c, d in zip(carry, d_keys, strict=True)], []
        size = self.blocks.size
        totals = [_pad_time(c, self.width) + d for c, d in zip(carry, d_keys, strict=True)]
        return [t[:, :, size:] for t in totals], [t[:, :, :size] for t in totals]


def _pad_time(x, length):
    return tf.pad(x, [[0, 0], [0, 0], [0, length - _size(x, 2)], [0, 0]])


def _size(x, axis):
    return tf.shape(x)[axis] if x.shape[axis] is None else x.shape[axis]
