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
    default_zero_state,
    default_zero_state_gradient,
    filled,
    kind_masks,
)
from ._linear_attention import (
    backward_groups,
    chunked,
    decay_products,
    forward_groups,
    inner_products,
    plan,
    product,
    state_shape,
    states,
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
    return forward_groups(*_arguments_of_groups(q, k, v, log_decay, initial_state, token_kind))


@default_zero_state_gradient
def backward(q, k, v, log_decay, initial_state, token_kind, _, d_output, d_final):
    group, state, tensors, cut = _arguments_of_groups(q, k, v, log_decay, initial_state, token_kind)
    *gradients, d_decay, d_state = backward_groups(group, state, tensors, cut, d_output, d_final)
    d_decay = jnp.zeros_like(log_decay) if d_decay is None else d_decay
    return *gradients, d_decay, d_state, None


def _arguments_of_groups(q, k, v, log_decay, initial_state, token_kind):
    """Returns the arguments of `forward_groups`."""
    cut, groups, dtype = plan(q, v, CHUNK), q.shape[2], initial_state.dtype

    def group(state, q, k, v, varying, kind):
        between, from_start, to_end, total = _decays(log_decay, varying, kind, cut, groups, dtype)
        q, k, w = _chunk_group((q, k, v), kind, cut, groups, dtype)
        added = product(transposed(k), w * to_end)
        before, last = states(total, added, _grouped(state, groups))
        output = product(q, before) * from_start
        output += product(_decayed(inner_products(q, k), between), w)
        return _unchunked(output), last.reshape(state.shape)

    tensors = q, k, v, _varying(log_decay), _padded_kinds(token_kind, q, cut)
    return group, initial_state, tensors, cut


def _one_token(q, k, v, log_decay, state, token_kind):
    groups, dtype = q.shape[2], state.dtype
    cut, grouped = plan(q, v, CHUNK), _grouped(state, groups)
    *_, decay = _decays(log_decay, _varying(log_decay), token_kind, cut, groups, dtype)
    q, k, w = (
        x[..., 0, 0, :, None] for x in _chunk_group((q, k, v), token_kind, cut, groups, dtype)
    )
    grouped = decay[..., 0, :, :] * grouped + k * transposed(w)
    output = jnp.sum(q * grouped, axis=3).reshape(v.shape)
    return output.astype(v.dtype), grouped.reshape(state.shape)


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


def _decays(log_decay, varying, kind, cut, groups, dtype):
    """Returns decays within chunks: from token s to u, from the start, to the end, and in total.

    The shapes are [..., C, C], [..., C, 1], [..., C, 1] and [..., 1, 1].
    `varying` has the logarithms of the group's decays, or is None if they are constant.
    """
    if varying is not None:
        starts, padding = kind_masks(kind)
        log_decay = filled(filled(varying.astype(dtype), starts, -jnp.inf), padding, 0)
        return _products(_grouped(chunked(log_decay[..., None], cut), groups))

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


@jax.custom_vjp
def _products(log_decay):
    """Returns the results of `_decays` for varying decays, from their logarithms [..., C, 1]."""
    levels, from_start, to_end = decay_products(jnp.exp(log_decay))
    between = weights_of_pairs(jnp.ones_like(to_end), jnp.ones_like(to_end), levels)
    return between, from_start, to_end, from_start[..., -1:, :]


def _gradient_of_products(products, d_products):
    terms = [x * d for x, d in zip(products, d_products, strict=True)]
    pairs, to_later, from_earlier, through = terms
    return (through + sum_over_pairs(pairs, to_later, from_earlier),)


_products.defvjp(lambda log_decay: (_products(log_decay),) * 2, _gradient_of_products)
