"""Softmax attention of a sequence of queries to the keys before them, block by block.

The T queries belong to the last T of the S keys: query t attends to key S - T + t and to the keys
before it in the same document, to `window` in all. `window` None means all of them; else
S - T is `window` - 1. A block of queries is multiplied with the keys that at least one of its
queries attends to, so time grows with T times the window, and memory with T.

q: [B, T, G, R, K], where R heads share a key; k: [B, S, G, K]; v: [B, S, G, V]; documents:
document numbers of the queries [B, T] and of the keys [B, S].
"""

import itertools

import jax
import jax.numpy as jnp

from ..constants import ATTENTION_BLOCK, span_edges


def forward(q, k, v, documents, window, dtype):
    """Returns [B, T, G, R, V] and a pair of [B, T, G, R], residuals for the TPU kernels.

    The pair is the largest logit of each query, and the sum of exp(logit - largest). Their
    logarithm, largest + log(sum), would have no more fractional digits than the largest logit.
    """
    length, before = q.shape[1], k.shape[1] - q.shape[1]
    q, k, v, documents = _pad_blocks(q, k, v, documents, _block_size(length, window))
    product = product_in(q, k, v, dtype)

    def attend(carry, q, k, v, visible):
        logits = jnp.where(visible, product("blgrk,bsgk->bglrs", q, k), -jnp.inf)
        highest = jnp.max(logits, axis=-1)
        weights = jnp.exp(logits - highest[..., None])
        total = jnp.sum(weights, axis=-1)
        output = product("bglrs,bsgv->blgrv", weights, v) / _query_major(total)[..., None]
        return carry, (output, _query_major(highest), _query_major(total))

    def step(carry, block):
        return attend(
            carry, block.queries(q), block.keys(k), block.keys(v), block.visible(documents)
        )

    _, results = _scan_blocks(step, None, q.shape[1], before, window)
    output, *sums = (x[:, :length] for x in results)
    return output, tuple(sums)


def backward(d_output, q, k, v, documents, window, dtype):
    """Returns the gradients of q, k and v in `dtype`."""
    length, before = q.shape[1], k.shape[1] - q.shape[1]
    size = _block_size(length, window)
    d_output = _pad_time(d_output, -length % size, 0)
    q, k, v, documents = _pad_blocks(q, k, v, documents, size)
    product = product_in(q, k, v, dtype)

    def step(gradients, block):
        q_b, k_b, v_b, d_o = block.queries(q), block.keys(k), block.keys(v), block.queries(d_output)
        logits = product("blgrk,bsgk->bglrs", q_b, k_b)
        # Not from the sums of the forward pass: another program rounds logits differently, which
        # matters where they are large.
        weights = jax.nn.softmax(jnp.where(block.visible(documents), logits, -jnp.inf), axis=-1)
        d_weights = product("blgrv,bsgv->bglrs", d_o, v_b)
        # The output would give the same sum, but it has been rounded. The difference is computed
        # first: a difference of products with the weights is rounded once more, which matters
        # where one key has nearly all the weight.
        mean = jnp.sum(weights * d_weights, axis=-1, keepdims=True)
        d_logits = weights * (d_weights - mean)
        d_k, d_v = gradients
        d_k = block.add(d_k, product("bglrs,blgrk->bsgk", d_logits, q_b))
        d_v = block.add(d_v, product("bglrs,blgrv->bsgv", weights, d_o))
        return (d_k, d_v), product("bglrs,bsgk->blgrk", d_logits, k_b)

    zeros = (jnp.zeros(k.shape, dtype), jnp.zeros(v.shape, dtype))
    (d_k, d_v), d_q = _scan_blocks(step, zeros, q.shape[1], before, window)
    return d_q[:, :length], d_k[:, : before + length], d_v[:, : before + length]


class _Block:
    """A block of queries, and the keys that at least one of them attends to."""

    def __init__(self, number, size, before, window, width):
        self.start, self.size, self.width = number * size, size, width
        self.first = self.start if window else 0
        index = before + self.start + jnp.arange(size)[:, None]
        distance = index - (self.first + jnp.arange(width))
        self._in_window = (distance >= 0) & (distance < (window or before + self.start + width))

    def queries(self, x):
        return jax.lax.dynamic_slice_in_dim(x, self.start, self.size, axis=1)

    def keys(self, x):
        return jax.lax.dynamic_slice_in_dim(x, self.first, self.width, axis=1)

    def add(self, total, x):
        return jax.lax.dynamic_update_slice_in_dim(total, self.keys(total) + x, self.first, axis=1)

    def visible(self, documents):
        """Mask of the keys that a query attends to, [B, 1, size, 1, width]."""
        of_queries, of_keys = documents
        same = self.queries(of_queries)[:, :, None] == self.keys(of_keys)[:, None]
        return (same & self._in_window)[:, None, :, None]


def _scan_blocks(step, carry, length, before, window):
    """Scans `step(carry, block) -> (carry, results [B, block, ...])` over the blocks."""
    size = _block_size(length, window)
    count = length // size
    edges = [0, count] if window else span_edges(count)
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
            results.append(jax.tree.map(_join_blocks, result))
    return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *results)


def _join_blocks(blocks):
    """[N, B, block, ...] as [B, N * block, ...]."""
    rows = jnp.moveaxis(blocks, 0, 1)
    return rows.reshape(rows.shape[0], -1, *rows.shape[3:])


def _block_size(length, window):
    """Number of queries in a block: fewer for short sequences or narrow windows, to pad less."""
    size = ATTENTION_BLOCK
    while size > 8 and (size >= 2 * length or (window and size > window)):
        size //= 2
    return size


def _pad_blocks(q, k, v, documents, size):
    missing = -q.shape[1] % size
    # Padding of the last block is a separate document, so that no query has an empty sum.
    documents = [_pad_time(d, missing, -1) for d in documents]
    return *(_pad_time(x, missing, 0) for x in (q, k, v)), documents


def _pad_time(x, missing, value):
    """x [B, T, ...] with `missing` more positions at its end."""
    return jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2), constant_values=value)


def product_in(q, k, v, dtype):
    """Returns an `einsum` of two operands that computes in `dtype`."""
    # By default accelerators round the operands of a product to 16 bits, which changes only wider
    # dtypes.
    precision = jax.lax.Precision.HIGHEST if any(x.dtype.itemsize > 2 for x in (q, k, v)) else None

    def product(equation, a, b):
        return jnp.einsum(equation, a.astype(dtype), b.astype(dtype), precision=precision)

    return product


def _query_major(x):
    """[B, G, T, R] as [B, T, G, R]."""
    return jnp.swapaxes(x, 1, 2)
