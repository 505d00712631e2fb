"""S_t = exp(log_decay) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t,  in every head."""

import jax.numpy as jnp

from ..constants import PADDING, STARTS
from ..jax._common import default_zero_state, default_zero_state_gradient
from ..jax._shards import per_shard
from ..jax._time_groups import linear_attention_kernel, state_shape
from ..signatures import SIGNATURES
from . import _linear_attention
from ._linear_attention import row, row_and_column_numbers, unsupported_reason


@default_zero_state_gradient
def backward(q, k, v, log_decay, initial_state, token_kind, _, d_output, d_final):
    tensors = (q, k, v, log_decay, initial_state, token_kind, d_output, d_final)
    d_q, d_k, d_v, d_initial = _backward(*tensors)
    return d_q, d_k, d_v, jnp.zeros_like(log_decay), d_initial, None


def _forward(q, k, v, log_decay, initial_state, token_kind):
    return _linear_attention.forward(_Chunk, (q, k, v), initial_state, token_kind, log_decay)


def _backward(q, k, v, log_decay, initial_state, token_kind, d_output, d_final):
    gradients, d_initial = _linear_attention.backward(
        _Chunk, (q, k, v), initial_state, token_kind, d_output, d_final, log_decay
    )
    return *gradients, d_initial


_TENSORS, _RESULTS, _CHANNELS = SIGNATURES["lightning_attention"].layout
forward = default_zero_state(state_shape)(per_shard(_forward, _TENSORS, _RESULTS, _CHANNELS))
_backward = per_shard(_backward, (*_TENSORS, *_RESULTS), (*_TENSORS[:3], _RESULTS[1]), _CHANNELS)


class _Chunk:
    working_set = 20

    def __init__(self, product, tokens, log_decay, q, k, v):
        self.product, self.mask_padding = product, tokens.mask_padding
        self.q, self.k, self.v = (None if x is None else tokens.mask_padding(x) for x in (q, k, v))
        later, earlier = row_and_column_numbers(k.shape[0])

        def count(mask):
            """The number of masked tokens up to and including each, [C, 1], from a mask [1, C]."""
            ones = jnp.broadcast_to(mask.astype(jnp.float32), later.shape)
            return jnp.sum(jnp.where(later >= earlier, ones, 0), axis=1, keepdims=True)

        def decay(steps, reaches):
            # Not 0 * log_decay: that is NaN if the decay is 0.
            logarithm = jnp.where(steps == 0, 0, steps * log_decay)
            return jnp.where(reaches, jnp.exp(logarithm), 0)

        steps, document = count(tokens.row != PADDING), count(tokens.row == STARTS)
        whole, last = steps[-1:], document[-1:]
        visible = (later >= earlier) & (document == row(document))
        self.between = decay(jnp.maximum(steps - row(steps), 0), visible)
        self.from_start = decay(steps, document == 0)
        self.to_end = decay(whole - steps, document == last)
        self.total = decay(whole, last == 0)

    def next_state(self, state):
        return self.total * state + self.product(self.v, self.k * self.to_end, over=(0, 0))

    def forward(self, state):
        weights = self.product(self.q, self.k, over=(1, 1)) * self.between
        output = self.product(weights, self.v)
        output += self.product(self.q * self.from_start, state, over=(1, 1))
        return output, self.next_state(state)

    def backward(self, state, g, d_output):
        product, d_output = self.product, self.mask_padding(d_output)
        weights = product(self.q, self.k, over=(1, 1)) * self.between
        d_weights = product(d_output, self.v, over=(1, 1)) * self.between
        d_q = product(d_weights, self.k) + product(d_output, state) * self.from_start
        d_k = product(d_weights, self.q, over=(0, 0)) + product(self.v, g) * self.to_end
        d_v = product(weights, d_output, over=(0, 0)) + product(
            self.k * self.to_end, g, over=(1, 1)
        )
        g = self.total * g + product(d_output, self.q * self.from_start, over=(0, 0))
        return [self.mask_padding(d) for d in (d_q, d_k, d_v)], g


lightning_attention = linear_attention_kernel(
    "lightning_attention", forward, backward, unsupported_reason
)
