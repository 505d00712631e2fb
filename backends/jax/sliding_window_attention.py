"""o_t = sum_s softmax_s(q_t · k_s) v_s over a window of keys.  De et al. 2024, arXiv:2402.19427.

Padding may be anywhere in a sequence. The real tokens are first moved to the front, after the
cached ones, where a window is a band of the logits; the outputs are moved back. If all padding is
already at the end, as in most batches, nothing is moved.
"""

import functools

import jax
import jax.numpy as jnp

from ..constants import CONTINUES, PADDING, STARTS
from ..kernel import make_kernel
from . import _banded_attention, _circular_buffer
from ._attention_inputs import AttentionInputs, attend_real_tokens_first, grouped
from ._common import accumulation_dtype, filled


def forward(q, k, v, of_queries, of_keys, *, window, dtype, one_document):
    """Attention within documents; the queries belong to the last of the keys.

    q: [B, T, G, R, K], where R heads share a key; k: [B, S, G, K]; v: [B, S, G, V]; of_queries,
    of_keys: document numbers, [B, T] and [B, S]; window: less than S, or None; one_document: True
    if the shapes alone imply that all tokens are real and belong to one document. Returns
    [B, T, G, R, V] in q's dtype, and the residuals: here two numbers for each query, a pair of
    [B, T, G, R]: its largest logit, and the sum of exp(logit - largest).

    Document 0 marks positions without a token, which may hold anything; their output is 0.
    """
    q, keys, values, documents = _banded_inputs(q, k, v, of_queries, of_keys, window)
    output, sums = _banded_attention.forward(q, keys, values, documents, window, dtype)
    return output.astype(q.dtype), sums


def backward(q, k, v, of_queries, of_keys, residuals, d_output, *, window, dtype, one_document):
    """Returns the gradients of q, k and v in `dtype`; `residuals`: of `forward`, not used."""
    d_output = _zero_without_token(of_queries, d_output).astype(dtype)
    q, keys, values, documents = _banded_inputs(q, k, v, of_queries, of_keys, window)
    d_q, *d_banded = _banded_attention.backward(d_output, q, keys, values, documents, window, dtype)
    return d_q, *(_pad_start(d, -_missing_keys(k, q, window)) for d in d_banded)


def operation(forward, backward):
    """Builds the operation from passes with the parameters of `forward` and `backward`."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
    def attention(window, capacity, q, k, v, initial_state, token_kind):
        return save(window, capacity, q, k, v, initial_state, token_kind)[0]

    def save(window, capacity, q, k, v, initial_state, token_kind):
        def attend(tokens, q, k, v):
            inputs = AttentionInputs(q, k, v, initial_state, token_kind, tokens, window)
            queries, keys, values = inputs.arrange()
            output, residuals = forward(
                queries, keys, values, *inputs.documents(), **inputs.options()
            )
            state = []
            if capacity is not None:
                end = inputs.next_position, inputs.end
                state = [
                    *(_circular_buffer.from_sequence(x, *end, capacity) for x in (keys, values)),
                    end[0],
                ]
            return inputs.put_back(output), state, residuals

        output, state, residuals = attend_real_tokens_first(attend, token_kind, q, k, v)
        results = (output.reshape(*q.shape[:3], v.shape[3]), *state)
        return results, (q, k, v, initial_state, token_kind, residuals)

    def gradients(window, capacity, saved, d_results):
        q, k, v, initial_state, token_kind, residuals = saved

        def attend(tokens, q, k, v, d_output):
            inputs = AttentionInputs(q, k, v, initial_state, token_kind, tokens, window)
            queries, keys, values = inputs.arrange()
            d_queries, *d_sequences = backward(
                queries,
                keys,
                values,
                *inputs.documents(),
                residuals,
                inputs.to_front(grouped(d_output, k)),
                **inputs.options(),
            )
            if capacity is not None:
                total = keys.shape[1]
                end = inputs.next_position, inputs.end
                d_sequences = [
                    d + _circular_buffer.to_sequence(d_buffer, *end, total)
                    for d, d_buffer in zip(d_sequences, d_results[1:3], strict=True)
                ]
            d_state = None
            if initial_state is not None:
                start = jnp.full_like(inputs.position, inputs.cached)
                d_key, d_value = (
                    _circular_buffer.from_sequence(
                        d[:, : inputs.cached], inputs.position, start, inputs.cached
                    ).astype(x.dtype)
                    for d, x in zip(d_sequences, (k, v), strict=True)
                )
                d_state = {"key": d_key, "value": d_value, "position": None}
            d_k, d_v = (inputs.put_back(d[:, inputs.cached :]) for d in d_sequences)
            d_q = inputs.put_back(d_queries)
            return (d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype)), d_state

        d_tensors, d_state = attend_real_tokens_first(attend, token_kind, q, k, v, d_results[0])
        d_tensors = [d.reshape(x.shape) for d, x in zip(d_tensors, (q, k, v), strict=True)]
        return *d_tensors, d_state, None

    attention.defvjp(save, gradients)

    @functools.partial(jax.jit, static_argnames=("sliding_window", "capacity"))
    def sliding_window_attention(
        q, k, v, sliding_window=None, initial_state=None, token_kind=None, capacity=None
    ):
        """q: [B, T, H, K]; k: [B, T, G, K]; v: [B, T, G, V]."""
        if initial_state is not None and q.shape[1] == 1:
            return _one_token(q, k, v, sliding_window, initial_state, token_kind)
        if initial_state is not None:
            capacity = initial_state["key"].shape[1]
        elif capacity is None and sliding_window is not None:
            capacity = sliding_window - 1
        output, *state = attention(sliding_window, capacity, q, k, v, initial_state, token_kind)
        return output, dict(zip(("key", "value", "position"), state, strict=False))

    return sliding_window_attention


sliding_window_attention = make_kernel(operation, forward, backward, has_residuals=True)


def _zero_without_token(documents, x):
    """x [B, N, ...] with zeros where the document is 0."""
    return filled(x, documents <= 0, 0)


def _banded_inputs(q, k, v, of_queries, of_keys, window):
    """Queries, keys, values and documents for `_banded_attention`, with zeros without a token.

    With a window, keys are cut or padded so that `window` - 1 keys precede that of the first query.
    """
    missing, q = _missing_keys(k, q, window), _zero_without_token(of_queries, q)
    k, v = (_pad_start(_zero_without_token(of_keys, x), missing) for x in (k, v))
    return q, k, v, (of_queries, _pad_start(of_keys, missing))


def _missing_keys(k, q, window):
    """The number of keys to add at the start; below 0, the number of keys to remove."""
    return 0 if window is None else window - 1 - (k.shape[1] - q.shape[1])


def _pad_start(x, count):
    """x [B, S, ...] with `count` zeros at the start, or without the first -`count` elements."""
    if count <= 0:
        return x[:, -count:]
    return jnp.pad(x, [(0, 0), (count, 0)] + [(0, 0)] * (x.ndim - 2))


def _one_token(q, k, v, window, state, token_kind):
    """A decoding step: reads the circular buffer without reordering it, and writes one slot."""
    dtype = accumulation_dtype(q, k, v)
    kind = jnp.full(q.shape[0], CONTINUES) if token_kind is None else token_kind[:, 0]
    real = (kind != PADDING)[:, None, None, None]
    q, k, v = (jnp.where(real, x, 0) for x in (q, k, v))
    position = jnp.where(kind == STARTS, 0, state["position"])
    capacity = state["key"].shape[1]
    age = _circular_buffer.ages(position, capacity)
    filled = (age < position[:, None])[:, :, None, None]
    keys, values = (jnp.where(filled, state[name], 0) for name in ("key", "value"))

    product = _banded_attention.product_in(q, k, v, dtype)
    queries = grouped(q, k)[:, 0]
    visible = age < (jnp.minimum(position[:, None], window - 1) if window else position[:, None])
    logits = jnp.where(visible[:, None, None], product("bgrk,bsgk->bgrs", queries, keys), -jnp.inf)
    logits = jnp.concatenate([logits, product("bgrk,bsgk->bgrs", queries, k)], axis=-1)
    weights = jax.nn.softmax(logits, axis=-1)
    output = product("bgrs,bsgv->bgrv", weights[..., :capacity], values)
    output = output + weights[..., capacity:] * v[:, 0, :, None].astype(dtype)
    output = output.reshape(q.shape[0], 1, q.shape[2], v.shape[3])
    output = jnp.where(real, output, 0).astype(q.dtype)

    if capacity:
        slot = (jnp.arange(capacity) == position[:, None] % capacity)[:, :, None, None] & real
        keys, values = jnp.where(slot, k, keys), jnp.where(slot, v, values)
    position = position + (kind != PADDING).astype(jnp.int32)
    return output, {"key": keys, "value": values, "position": position}
