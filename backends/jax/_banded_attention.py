"""Softmax attention of a row of queries to the keys before them, block by block.

Queries stand at the end of their keys: of S keys and T queries, query t is at the place of key
S - T + t. It sees that key and those before it, `window` in all (None: every one; else S - T is
`window` - 1), if they are of its own document. A block of queries meets the keys that some query
of it sees, so time grows as T times the window, and memory as T.

q: [B, T, G, R, K], where R heads share a key; k: [B, S, G, K]; v: [B, S, G, V]; documents: numbers
of the queries [B, T] and of the keys [B, S].
"""

import itertools

import jax
import jax.numpy as jnp

BLOCK = 64
# Without a window the keys of a block end where its span of blocks ends: with four spans a
# quarter of the work is on keys that nothing sees, with one half of it.
SPANS = 4


def forward(q, k, v, documents, window, dtype):
    """Returns [B, T, G, R, V] and the logarithms of the softmax's sums [B, T, G, R]."""
    length, before = q.shape[1], k.shape[1] - q.shape[1]
    q, k, v, documents = _padded(q, k, v, documents, _block(length, window))
    product = product_of(q, k, v, dtype)

    def attend(carry, q, k, v, visible):
        logits = jnp.where(visible, product("blgrk,bsgk->bglrs", q, k), -jnp.inf)
        highest = jnp.max(logits, axis=-1)
        weights = jnp.exp(logits - highest[..., None])
        total = jnp.sum(weights, axis=-1)
        output = product("bglrs,bsgv->blgrv", weights, v) / _beside_queries(total)[..., None]
        return carry, (output, _beside_queries(highest + jnp.log(total)))

    def step(carry, block):
        return attend(carry, block.of(q), block.seen(k), block.seen(v), block.visible(documents))

    _, (output, log_total) = _over_blocks(step, None, q.shape[1], before, window)
    return output[:, :length], log_total[:, :length]


def backward(d_output, log_total, q, k, v, documents, window, dtype):
    """Returns the gradients of q, k and v in `dtype`."""
    length, before = q.shape[1], k.shape[1] - q.shape[1]
    size = _block(length, window)
    d_output, log_total = (_fill(x, -length % size, 0) for x in (d_output, log_total))
    q, k, v, documents = _padded(q, k, v, documents, size)
    product = product_of(q, k, v, dtype)

    def step(gradients, block):
        q_b, k_b, v_b, d_o = block.of(q), block.seen(k), block.seen(v), block.of(d_output)
        logits = product("blgrk,bsgk->bglrs", q_b, k_b) - _beside_logits(block.of(log_total))
        weights = jnp.exp(jnp.where(block.visible(documents), logits, -jnp.inf))
        d_logits = weights * product("blgrv,bsgv->bglrs", d_o, v_b)
        # The sum could be had from the output, too, but that has been rounded.
        d_logits = d_logits - weights * jnp.sum(d_logits, axis=-1, keepdims=True)
        d_k, d_v = gradients
        d_k = block.add(d_k, product("bglrs,blgrk->bsgk", d_logits, q_b))
        d_v = block.add(d_v, product("bglrs,blgrv->bsgv", weights, d_o))
        return (d_k, d_v), product("bglrs,bsgk->blgrk", d_logits, k_b)

    zeros = (jnp.zeros(k.shape, dtype), jnp.zeros(v.shape, dtype))
    (d_k, d_v), d_q = _over_blocks(step, zeros, q.shape[1], before, window)
    return d_q[:, :length], d_k[:, : before + length], d_v[:, : before + length]


class _Block:
    """A block of queries, and the keys that one or the other of them sees."""

    def __init__(self, number, size, before, window, width):
        self.start, self.size, self.width = number * size, size, width
        self.first = self.start if window else 0
        place = before + self.start + jnp.arange(size)[:, None]
        distance = place - (self.first + jnp.arange(width))
        self.near = (distance >= 0) & (distance < (window or before + self.start + width))

    def of(self, x):
        return jax.lax.dynamic_slice_in_dim(x, self.start, self.size, axis=1)

    def seen(self, x):
        return jax.lax.dynamic_slice_in_dim(x, self.first, self.width, axis=1)

    def add(self, total, x):
        return jax.lax.dynamic_update_slice_in_dim(total, self.seen(total) + x, self.first, axis=1)

    def visible(self, documents):
        """[B, 1, size, 1, width]"""
        of_queries, of_keys = documents
        same = self.of(of_queries)[:, :, None] == self.seen(of_keys)[:, None]
        return (same & self.near)[:, None, :, None]


def _over_blocks(step, carry, length, before, window):
    """`step(carry, block) -> (carry, results [B, block, ...])` for one block after another."""
    size = _block(length, window)
    count = length // size
    edges = [0, count] if window else sorted({-(-count * i // SPANS) for i in range(SPANS + 1)})
    results = []
    for first, end in itertools.pairwise(edges):
        width = (window - 1 + size) if window else before + end * size

        def numbered(carry, number, width=width):
            return step(carry, _Block(number, size, before, window, width))

        if end - first == 1:
            carry, result = numbered(carry, first)
            results.append(result)
        else:
            carry, result = jax.lax.scan(numbered, carry, jnp.arange(first, end))
            results.append(jax.tree.map(_side_by_side, result))
    return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *results)


def _side_by_side(blocks):
    """[N, B, block, ...] as [B, N * block, ...]."""
    rows = jnp.moveaxis(blocks, 0, 1)
    return rows.reshape(rows.shape[0], -1, *rows.shape[3:])


def _block(length, window):
    """A size that wastes little of a window, and of a short row."""
    size = BLOCK
    while size > 8 and (size >= 2 * length or (window and size > window)):
        size //= 2
    return size


def _padded(q, k, v, documents, size):
    missing = -q.shape[1] % size
    # What fills up the last block sees itself: it is a document of its own.
    documents = [_fill(d, missing, -1) for d in documents]
    return *(_fill(x, missing, 0) for x in (q, k, v)), documents


def _fill(x, missing, value):
    """x [B, T, ...] with more places at its end."""
    return jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2), constant_values=value)


def product_of(q, k, v, dtype):
    # Numbers of 16 bits lose nothing in the short matrix products of accelerators; longer do.
    precision = jax.lax.Precision.HIGHEST if any(x.dtype.itemsize > 2 for x in (q, k, v)) else None

    def product(equation, a, b):
        return jnp.einsum(equation, a.astype(dtype), b.astype(dtype), precision=precision)

    return product


def _beside_queries(x):
    """[B, G, T, R] as [B, T, G, R]."""
    return jnp.swapaxes(x, 1, 2)


def _beside_logits(x):
    """[B, T, G, R] as [B, G, T, R, 1]."""
    return jnp.swapaxes(x, 1, 2)[..., None]
