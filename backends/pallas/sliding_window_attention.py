"""o_t = sum_s softmax_s(q_t · k_s) v_s over a window of keys.  De et al. 2024, arXiv:2402.19427.

A block of queries attends to the blocks of keys in its window, which are in VMEM, from its own to
the oldest. So the first logits of each query include its own key, and the running maximum of its
softmax is finite from the start. Positions without a token, whose document is 0, hold zeros and
attend to one another.

JAX's own kernel, splash attention, would fetch the window again for every head and every block of
queries, and write the sums of the softmax 128 times.
"""

import functools
import math

import jax
import jax.numpy as jnp

from ..jax import sliding_window_attention as plain
from ..jax._shards import per_shard
from . import _common, _window
from . import _pallas as pl
from ._linear_attention import products


def unsupported(
    q, k, v, sliding_window=None, initial_state=None, token_kind=None, capacity=None
) -> str | None:
    """Reason these arguments are unsupported, or None."""
    if reason := _common.unsupported_reason(q=q, k=k, v=v):
        return reason
    before = 0 if initial_state is None else initial_state["key"].shape[1]
    if _window.fit_grid(q, k, v, sliding_window, before) is None:
        visible = min(sliding_window or math.inf, before + k.shape[1])
        return (
            f"needs a token's window in VMEM: {_common.vmem_bytes() // 2**20} MiB are too small "
            f"for {visible} keys of {k.shape[3]} and values of {v.shape[3]} in {k.dtype}"
        )
    return None


def forward(q, k, v, query_documents, key_documents, *, window, **_):
    run = _per_shard(functools.partial(_forward, window), k, _GIVEN, (_OUTPUT,))
    (output,) = run(q, k, v, query_documents, key_documents)
    return output, ()


def backward(q, k, v, query_documents, key_documents, sums, d_output, *, window, dtype, **_):
    del sums  # not used: logits of the forward pass may be rounded differently
    run = _per_shard(
        functools.partial(_backward, window),
        k,
        (*_GIVEN, _OUTPUT),
        (_QUERY, _QUERY, _OUTPUT),
    )
    d_q, *d_shared = run(q, k, v, query_documents, key_documents, d_output)
    # If the heads that share a key are split, each shard has a partial sum of its gradient.
    return d_q.astype(dtype), *(jnp.sum(d.astype(dtype), axis=3) for d in d_shared)


_QUERY, _OUTPUT = "B T G R K", "B T G R V"
_GIVEN = (_QUERY, "B T G K", "B T G V", "B T", "B T")


def _per_shard(function, k, arguments, results):
    """Applies `per_shard` to the key heads, or to the query heads if all share one key head."""
    return per_shard(function, arguments, results, ("R",) if k.shape[2] == 1 else ("G",))


def _forward(window, q, k, v, query_documents, key_documents):
    grid = _window.fit_grid(q, k, v, window, k.shape[1] - q.shape[1])
    product = products((q, k, v))

    def attention(step, q, output):
        @pl.when(step.has_queries)
        def _():
            queries = step.mask_queries(q)

            def attend(slot, visible, sums):
                highest, total, values = sums
                logits = product(queries, step.keys[slot], over=(1, 1))
                logits = jnp.where(visible, logits, -jnp.inf)
                higher = jnp.maximum(highest, jnp.max(logits, axis=1, keepdims=True))
                weights, fade = jnp.exp(logits - higher), jnp.exp(highest - higher)
                total = fade * total + jnp.sum(weights, axis=1, keepdims=True)
                return higher, total, fade * values + product(weights, step.values[slot])

            zeros = jnp.zeros((grid.block, 1), jnp.float32)
            start = zeros - jnp.inf, zeros, jnp.zeros(output.shape, jnp.float32)
            _, total, values = step.scan_window(attend, start)
            output[...] = (values / total).astype(output.dtype)

    output = jax.ShapeDtypeStruct((*q.shape[:4], v.shape[3]), q.dtype)
    inputs, outputs = ([grid.head(x, grid.queries)] for x in (q, output))
    (values,) = _window.call(grid, attention, k, v, query_documents, key_documents, inputs, outputs)
    return (_window.undo_head_layout(values, output.shape),)


def _backward(window, q, k, v, query_documents, key_documents, d_output):
    grid = _window.fit_grid(q, k, v, window, k.shape[1] - q.shape[1])
    product = products((q, k, v))

    def attention_backward(step, q, d_output, d_q, d_k, d_v, d_keys, d_values):
        @pl.when(step.has_new_keys)
        def _():
            for buffer in (d_keys, d_values):
                buffer[step.slot(step.number)] = jnp.zeros(buffer.shape[1:], jnp.float32)

        @pl.when(step.has_queries)
        def _():
            queries, d_out = step.mask_queries(q), step.mask_queries(d_output)

            def logits_of(slot, visible):
                logits = product(queries, step.keys[slot], over=(1, 1))
                return jnp.where(visible, logits, -jnp.inf)

            def add(slot, visible, sums):
                highest, total, mean = sums
                logits = logits_of(slot, visible)
                d_weights = product(d_out, step.values[slot], over=(1, 1))
                higher = jnp.maximum(highest, jnp.max(logits, axis=1, keepdims=True))
                weights, fade = jnp.exp(logits - higher), jnp.exp(highest - higher)
                total = fade * total + jnp.sum(weights, axis=1, keepdims=True)
                mean = fade * mean + jnp.sum(weights * d_weights, axis=1, keepdims=True)
                return higher, total, mean

            zeros = jnp.zeros((grid.block, 1), jnp.float32)
            # The output would give the same mean, but it has been rounded.
            highest, total, mean = step.scan_window(add, (zeros - jnp.inf, zeros, zeros))
            mean /= total

            def attend(slot, visible, d_queries):
                weights = jnp.exp(logits_of(slot, visible) - highest) / total
                d_weights = product(d_out, step.values[slot], over=(1, 1))
                d_logits = weights * (d_weights - mean)
                d_values[slot] += product(weights, d_out, over=(0, 0))
                d_keys[slot] += product(d_logits, queries, over=(0, 0))
                return d_queries + product(d_logits, step.keys[slot])

            d_queries = step.scan_window(attend, jnp.zeros(d_q.shape, jnp.float32))
            d_q[...] = d_queries.astype(d_q.dtype)

        @pl.when(step.has_dropped_keys)
        def _():
            number, _ = grid.dropped_keys(0, step.number, step.head)
            d_k[...] = d_keys[step.slot(number)].astype(d_k.dtype)
            d_v[...] = d_values[step.slot(number)].astype(d_v.dtype)

    inputs = [grid.head(x, grid.queries) for x in (q, d_output)]
    aligned = [jax.eval_shape(grid.aligned, x) for x in (k, v)]
    outputs = [grid.head(jax.ShapeDtypeStruct(q.shape, q.dtype), grid.queries)]
    outputs += [grid.head(x, grid.dropped_keys) for x in aligned]
    d_q, *d_aligned = _window.call(
        grid,
        attention_backward,
        k,
        v,
        query_documents,
        key_documents,
        inputs,
        outputs,
        sums=(k.shape[3], v.shape[3]),
        # The grid adds `shared` times this number of steps: one for each block in the buffers.
        steps_after=pl.cdiv(grid.buffer_blocks - 1, grid.shared),
    )
    d_k, d_v = (
        _window.undo_head_layout(d, x.shape)[:, x.shape[1] - k.shape[1] :, :, None]
        for d, x in zip(d_aligned, aligned, strict=True)
    )
    return _window.undo_head_layout(d_q, q.shape), d_k, d_v


sliding_window_attention = plain.sliding_window_attention.replace_passes(
    forward, backward, unsupported
)
