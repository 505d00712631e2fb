"""S_t = exp(log_decay_t) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t,  in every head.

Dao and Gu 2024, arXiv:2405.21060, section 3 (Mamba-2). The output within a chunk is (Q K^T * M) V,
where M_us is the product of the decays of the tokens from s + 1 to u; across chunks it is
Q (K^T V). Groups of heads share Q and K, which are not copied for each head.

Decays are [B, T, H], or [H] if they are constant, as in `lightning_attention`:

- [B, T, H]: M is a product of decays, as in `gated_linear_attention`, and the start of a document
  is a decay of 0.
- [H]: M is a power of the constant, and equal for all chunks of real tokens. The exponent is the
  number of real tokens between s and u, and M_us is 0 if a document starts between them.
"""

import jax
import jax.numpy as jnp

from ..constants import CONTINUES, PADDING, STARTS
from ._common import (
    applied_decay,
    default_zero_state,
    default_zero_state_gradient,
    filled,
    kind_masks,
)
from ._linear_attention import (
    chunked,
    decay_products,
    inner_products,
    plan,
    product,
    scan_groups,
    state_shape,
    states,
    states_before_groups,
    sum_over_pairs,
    transposed,
    unchunked,
    weights_of_pairs,
)
from ._operation import kernel_over_time

CHUNK = 64


@default_zero_state(state_shape)
def forward(q, k, v, log_decay, initial_state, token_kind):
    if q.shape[1] == 1:
        return _one_token(q, k, v, log_decay, initial_state, token_kind)
    cut, groups = plan(q, v, CHUNK), q.shape[2]

    def step(state, _, tokens, __):
        *tokens, kind, varying = tokens
        between, from_start, to_end, total = _decays(log_decay, varying, kind, cut, groups, state)
        q, k, w = _chunk_group(tokens, kind, cut, groups, state.dtype)
        before, state = states(total, product(transposed(k), w * to_end), state)
        output = product(q, before) * from_start
        output += product(_decayed(inner_products(q, k), between), w)
        return state, _unchunked(output).astype(v.dtype)

    tensors = q, k, v, _padded_kinds(token_kind, q, cut), _varying(log_decay)
    state = _grouped(initial_state, groups)
    state, output = scan_groups(step, state, tensors, jnp.zeros_like(v), cut)
    return output, state.reshape(initial_state.shape)


def _one_token(q, k, v, log_decay, state, token_kind):
    groups = q.shape[2]
    cut, grouped = plan(q, v, CHUNK), _grouped(state, groups)
    *_, decay = _decays(log_decay, _varying(log_decay), token_kind, cut, groups, state)
    q, k, w = (
        x[..., 0, 0, :, None] for x in _chunk_group((q, k, v), token_kind, cut, groups, state.dtype)
    )
    grouped = decay[..., 0, :, :] * grouped + k * transposed(w)
    output = jnp.sum(q * grouped, axis=3).reshape(v.shape)
    return output.astype(v.dtype), grouped.reshape(state.shape)


@default_zero_state_gradient
def backward(q, k, v, log_decay, initial_state, token_kind, _, d_output, d_final):
    dtype, cut, groups = initial_state.dtype, plan(q, v, CHUNK), q.shape[2]
    tensors = q, k, v, _padded_kinds(token_kind, q, cut), _varying(log_decay)

    def state_after(state, tokens):
        _, k, v, kind, varying = tokens
        *_, to_end, total = _decays(log_decay, varying, kind, cut, groups, state)
        k, w = _chunk_group((k, v), kind, cut, groups, dtype)
        return states(total, product(transposed(k), w * to_end), state)[1]

    first = _grouped(initial_state, groups)
    before = states_before_groups(state_after, first, tensors, cut)

    def step(g, group, tokens, old):
        *tokens, kind, varying = tokens
        between, from_start, to_end, total = _decays(log_decay, varying, kind, cut, groups, g)
        q, k, w, d_output = _chunk_group((*tokens, old[2]), kind, cut, groups, dtype)
        state = jax.lax.dynamic_index_in_dim(before, group, keepdims=False)
        w_out, d_in = w * to_end, d_output * from_start
        earlier, _ = states(total, product(transposed(k), w_out), state)
        later, g = states(total, product(transposed(q), d_in), g, reverse=True)

        weights = _decayed(inner_products(q, k), between)
        d_weights = _decayed(inner_products(d_output, w), between)
        d_pairs = jnp.sum(d_weights, axis=2, keepdims=True)  # over the heads of a group
        d_q = _sum_over_heads(d_in, earlier) + product(d_pairs, k)
        d_k = _sum_over_heads(w_out, later) + product(transposed(d_pairs), q)
        from_later = product(k, later) * to_end
        d_v = from_later + product(transposed(weights), d_output)
        found = [d_q, d_k, d_v]
        if varying is not None:
            pairs = inner_products(q, k) * d_weights
            to_later = jnp.sum(product(q, earlier) * d_in, axis=-1, keepdims=True)
            from_earlier = jnp.sum(from_later * w, axis=-1, keepdims=True)
            through = total * jnp.sum(earlier * later, axis=(-2, -1), keepdims=True)
            found.append(through + sum_over_pairs(pairs, to_later, from_earlier))
        found = [_unchunked(d).reshape(x.shape) for d, x in zip(found, old, strict=True)]
        _, padding = kind_masks(kind)
        return g, [filled(d.astype(x.dtype), padding, 0) for d, x in zip(found, old, strict=True)]

    # d_v overwrites d_output: a group of d_output is not read again after its step.
    outputs = [jnp.zeros_like(q), jnp.zeros_like(k), d_output]
    if _varying(log_decay) is not None:
        outputs.append(jnp.zeros_like(log_decay))
    g, gradients = scan_groups(step, _grouped(d_final, groups), tensors, outputs, cut, reverse=True)
    d_q, d_k, d_v, *d_log_decay = gradients
    d_log_decay = d_log_decay[0] if d_log_decay else jnp.zeros_like(log_decay)
    return d_q, d_k, d_v, d_log_decay, g.reshape(d_final.shape), None


scalar_decay_attention = kernel_over_time(
    "scalar_decay_attention", forward, backward, keep_output=False
)


# Below, tensors are [B, G, heads of a group, chunks, C, K or V]. If the heads of a group share a
# tensor, its axis for heads has size 1.


def _varying(log_decay):
    """Returns decays that have a time axis, or None if they are constant."""
    return None if log_decay.ndim == 1 else log_decay


def _grouped(x, groups):
    """Reshapes [B, H, ...] to [B, G, heads of a group, ...]."""
    return x.reshape(x.shape[0], groups, -1, *x.shape[2:])


def _unchunked(y):
    return unchunked(y.reshape(y.shape[0], -1, *y.shape[3:]))


def _sum_over_heads(a, b):
    """a b^T, summed over the heads of a group."""
    total = jnp.einsum("bgrncv,bgrnkv->bgnck", a, b, precision=jax.lax.Precision.HIGHEST)
    return total[:, :, None]


def _padded_kinds(token_kind, q, cut):
    """Token kinds padded to full groups; None if nothing is padded and all tokens continue."""
    missing = cut.tokens - q.shape[1]
    if missing and token_kind is None:
        token_kind = jnp.full(q.shape[:2], CONTINUES, jnp.int8)
    if missing:
        token_kind = jnp.pad(token_kind, [(0, 0), (0, missing)], constant_values=PADDING)
    return token_kind


def _chunk_group(tensors, kind, cut, groups, dtype):
    """Tensors of a group of chunks, with zeros at padding."""
    _, padding = kind_masks(kind)
    return [_grouped(chunked(filled(x.astype(dtype), padding, 0), cut), groups) for x in tensors]


def _decayed(weights, between):
    """Weights times their decays, and 0 where a decay is 0, even for NaN weights."""
    return jnp.where(between == 0, 0, weights * between)


def _decays(log_decay, varying, kind, cut, groups, state):
    """Decays in the chunks of a group: from s to u, from the start, to the end, and in total.

    The shapes are [..., C, C], [..., C, 1], [..., C, 1] and [..., 1, 1]. The dtype is that of the
    state. `varying` has the logarithms of the group's decays, or is None if they are constant.
    """
    dtype = state.dtype
    if varying is not None:
        decay = applied_decay(jnp.exp(varying.astype(dtype)), *kind_masks(kind))
        levels, from_start, to_end = decay_products(
            _grouped(chunked(decay[..., None], cut), groups)
        )
        between = weights_of_pairs(jnp.ones_like(to_end), jnp.ones_like(to_end), levels)
        return between, from_start, to_end, from_start[..., -1:, :]

    log_decay = log_decay.astype(dtype).reshape(groups, -1, 1, 1, 1)
    if kind is None:
        count = jnp.arange(1, cut.size + 1)[:, None]
        document = jnp.zeros_like(count)
    else:
        kind = kind.reshape(-1, 1, 1, cut.chunks, cut.size, 1)
        count = jnp.cumsum(kind != PADDING, axis=-2)
        document = jnp.cumsum(kind == STARTS, axis=-2)

    def power(steps, reaches):
        # 0 * log_decay would be NaN for a decay of 0.
        logarithm = jnp.where(steps == 0, 0, steps.astype(dtype) * log_decay)
        return jnp.where(reaches, jnp.exp(logarithm), 0)

    whole, last = count[..., -1:, :], document[..., -1:, :]
    index = jnp.arange(cut.size)
    earlier = index[:, None] >= index
    return (
        power(jnp.abs(count - transposed(count)), earlier & (document == transposed(document))),
        power(count, document == 0),
        power(whole - count, document == last),
        power(whole, last == 0),
    )
