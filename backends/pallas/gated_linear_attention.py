"""S_t = diag(exp(log_f_t)) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t,  in every head.

Qin et al. 2024, arXiv:2404.07904, section 3 (HGRN2, where k_t = 1 - exp(log_f_t)); Yang et al.
2023, arXiv:2312.06635, section 4 (gated linear attention).

As in `keras_recurrent/portable`, a chunk is halved recursively: where u is in a right half and s in
the adjacent left half, q_u is multiplied by the decays from the boundary to u and k_s by the decays
from s to the boundary. Here each level is a product of the whole chunk, masked to the weights
between its halves. The matrix unit would need the same time for the halves only, and slicing them
would move data between vectors.
"""

import jax.numpy as jnp

from ..jax._common import default_zero_state, default_zero_state_gradient
from ..jax._shards import per_shard
from ..jax._time_groups import linear_attention_kernel, state_shape
from ..signatures import SIGNATURES
from . import _linear_attention
from . import _pallas as pl
from ._linear_attention import CHUNK, row_and_column_numbers, unsupported_reason

HALVES = [2**level for level in range(CHUNK.bit_length() - 1)]  # tokens: 1, 2, 4 ...


@default_zero_state(state_shape)
def forward(q, k, v, log_f, initial_state, token_kind):
    return _forward(q, k, v, log_f, initial_state, token_kind), None


@default_zero_state_gradient
def backward(q, k, v, log_f, initial_state, token_kind, _, d_output, d_final):
    tensors = (q, k, v, log_f, initial_state, token_kind, d_output, d_final)
    d_q, *d_k, d_v, d_log_f, d_initial = (_backward if k is not None else _backward_tied)(*tensors)
    return d_q, d_k[0] if d_k else None, d_v, d_log_f, d_initial, None


def _forward(q, k, v, log_f, initial_state, token_kind):
    return _linear_attention.forward(_Chunk, (q, k, v, log_f), initial_state, token_kind)


def _backward(q, k, v, log_f, initial_state, token_kind, d_output, d_final):
    gradients, d_initial = _linear_attention.backward(
        _Chunk, (q, k, v, log_f), initial_state, token_kind, d_output, d_final
    )
    return *gradients, d_initial


_TENSORS, _RESULTS, _CHANNELS = SIGNATURES["gated_linear_attention"].layout
_SAVED = (*_TENSORS, *_RESULTS)
_forward = per_shard(_forward, _TENSORS, _RESULTS, _CHANNELS)
_backward_tied = per_shard(_backward, _SAVED, (_TENSORS[0], *_TENSORS[2:-1]), _CHANNELS)
_backward = per_shard(_backward, _SAVED, _TENSORS[:-1], _CHANNELS)


class _Chunk:
    working_set = 48

    def __init__(self, product, tokens, _, q, k, v, log_f):
        self.product, self.tokens, self.tied = product, tokens, k is None
        self.log_f = log_f.astype(jnp.float32)
        k = _one_minus_exp(self.log_f) if k is None else k.astype(jnp.float32)
        self.k, self.v = tokens.mask_padding(k), tokens.mask_padding(v)
        f = tokens.applied_decay(jnp.exp(self.log_f))
        self.later, self.earlier = row_and_column_numbers(CHUNK)

        # Products of decays in blocks of 1, 2, 4 ... tokens: from the start of the block to each
        # token; from a token, without its own, to the end of the block; and over the block.
        from_start, to_end, total = f, jnp.ones_like(f), f
        self.levels = []
        for half in HALVES:
            self.levels.append((half, from_start, to_end))
            other_half, in_right = _exchange_halves(total, half), _right_half_mask(f, half)
            from_start = jnp.where(in_right, from_start * other_half, from_start)
            to_end = jnp.where(in_right, to_end, to_end * other_half)
            total = total * other_half
        self.k_out, self.from_start, self.to_end = self.k * to_end, from_start, to_end
        self.total = total[:1]
        if q is not None:
            self.q = tokens.mask_padding(q.astype(jnp.float32))
            self.q_in = self.q * from_start

    def next_state(self, state):
        return self.total * state + self.product(self.v, self.k_out, over=(0, 0))

    def forward(self, state):
        output = self.product(self.q_in, state, over=(1, 1)) + self.product(self.weights(), self.v)
        return output, self.next_state(state)

    def weights(self):
        """a_us for s <= u, [C, C]."""
        diagonal = jnp.sum(self.q * self.k, axis=1, keepdims=True)
        weights = jnp.where(self.later == self.earlier, diagonal, 0)
        for half, from_boundary, to_boundary in self.levels:
            pairs = self.product(self.q * from_boundary, self.k * to_boundary, over=(1, 1))
            weights += jnp.where(self.half_pair_mask(half), pairs, 0)
        return weights

    def half_pair_mask(self, half):
        """Mask [C, C] of u in a right half and s in the adjacent left half."""
        # The highest bit in which their indices differ is `half`, and it is set in u.
        differ = self.later ^ self.earlier
        return (half <= differ) & (differ < 2 * half) & (self.later > self.earlier)

    def backward(self, state, g, d_output):
        product, q, k = self.product, self.q, self.k
        d_output = self.tokens.mask_padding(d_output)
        d_weights = product(d_output, self.v, over=(1, 1))
        d_v = product(self.k_out, g, over=(1, 1))
        d_v += product(self.weights(), d_output, over=(0, 0))
        diagonal = jnp.sum(
            jnp.where(self.later == self.earlier, d_weights, 0), axis=1, keepdims=True
        )
        d_q = product(d_output, state) * self.from_start
        d_k = product(self.v, g) * self.to_end

        # The gradient of log f_t is a sum over all pairs s < t <= u of which f_t is a factor: the
        # gradient of the logarithm of a product of decays applies to each of its factors. So the
        # gradients of a block are propagated to its halves, from the chunk down to single tokens,
        # in the reverse order of the products. Nothing is subtracted, so the result is as exact
        # as the gradients of q and k.
        of_start, of_end = q * d_q, k * d_k
        of_total = jnp.where(
            _linear_attention.token_number(q) == 0,
            jnp.sum(self.total * state * g, axis=0, keepdims=True),
            0,
        )
        for half, from_boundary, to_boundary in reversed(self.levels):
            in_right = _right_half_mask(q, half)
            of_total += _exchange_halves(of_total + jnp.where(in_right, of_start, of_end), half)
            pairs = jnp.where(self.half_pair_mask(half), d_weights, 0)
            d_right = product(pairs, k * to_boundary) * from_boundary
            d_left = product(pairs, q * from_boundary, over=(0, 0)) * to_boundary
            d_q, d_k = d_q + d_right, d_k + d_left
            of_start, of_end = of_start + q * d_right, of_end + k * d_left
        d_log_f = of_start + of_total
        d_q, d_k = d_q + diagonal * k, d_k + diagonal * q
        g = self.total * g + product(d_output, self.q_in, over=(0, 0))
        found = [d_q, d_v, d_log_f]
        if self.tied:
            found[2] -= d_k * jnp.exp(self.log_f)
        else:
            found.insert(1, d_k)
        return [self.tokens.mask_padding(d) for d in found], g


def _right_half_mask(x, half):
    """Mask of the tokens of x [C, K] in the right half of 2 * `half`."""
    return jnp.bitwise_and(_linear_attention.token_number(x), half) != 0


def _exchange_halves(x, half):
    """x [C, K] with the two halves of every 2 * `half` tokens exchanged."""
    return jnp.where(
        _right_half_mask(x, half), pl.roll(x, half, 0), pl.roll(x, x.shape[0] - half, 0)
    )


def _one_minus_exp(x):
    """1 - exp(x) for x <= 0, accurate to float32 even where exp(x) is near 1."""
    series = 1.0
    for n in range(10, 1, -1):
        series = 1 + x / n * series
    return jnp.where(x > -0.5, -x * series, 1 - jnp.exp(x))


gated_linear_attention = linear_attention_kernel(
    "gated_linear_attention", forward, backward, unsupported_reason
)
