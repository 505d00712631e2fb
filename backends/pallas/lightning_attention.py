"""S_t = exp(log_decay) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t,  in every head.

Qin et al. 2024, arXiv:2405.17381 (Lightning Attention), and 2023, arXiv:2307.14995
(TransNormerLLM): inside a chunk (Q K^T * M) V with M_us = decay^(u - s), across chunks Q (K^T V).
Padding does not tick the decay: M and its like are powers of it by the number of real tokens
between two places, and 0 where a document begins between them.
"""

import jax.numpy as jnp

from keras_recurrent.backends.jax import lightning_attention as plain
from keras_recurrent.backends.pallas import _linear_attention
from keras_recurrent.backends.pallas._common import PADDING, STARTS
from keras_recurrent.backends.pallas._linear_attention import places, row
from keras_recurrent.backends.pallas._platform import per_shard


def unsupported(q, k, v, log_decay, initial_state=None, token_kind=None) -> str | None:
    """Why this kernel refuses these arguments; None if it accepts them."""
    return _linear_attention.refusal(q, k, v, log_decay, initial_state)


def forward(q, k, v, log_decay, initial_state, token_kind):
    return _forward(q, k, v, log_decay, initial_state, token_kind)


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


_KEY, _VALUE, _STATE = "b t h k", "b t h v", "b h k v"
_TENSORS = (_KEY, _KEY, _VALUE, "h", _STATE, "b t")
_forward = per_shard(_forward, _TENSORS, (_VALUE, _STATE), "h")
_backward = per_shard(_backward, (*_TENSORS, _VALUE, _STATE), (_KEY, _KEY, _VALUE, _STATE), "h")


class _Chunk:
    working_set = 20

    def __init__(self, product, tokens, log_decay, q, k, v):
        self.product, self.real = product, tokens.real
        self.q, self.k, self.v = (None if x is None else tokens.real(x) for x in (q, k, v))
        later, earlier = places(k.shape[0])

        def so_far(tokens_that):
            """How many of the tokens, up to and with each one: [C, 1]."""
            here = jnp.broadcast_to(tokens_that.astype(jnp.float32), later.shape)
            return jnp.sum(jnp.where(later >= earlier, here, 0), axis=1, keepdims=True)

        def decay(ticks, reaches):
            # Not 0 * log_decay, which is not a number if the decay is 0.
            logarithm = jnp.where(ticks == 0, 0, ticks * log_decay)
            return jnp.where(reaches, jnp.exp(logarithm), 0)

        count, document = so_far(tokens.row != PADDING), so_far(tokens.row == STARTS)
        whole, last = count[-1:], document[-1:]
        meet = (later >= earlier) & (document == row(document))
        self.between = decay(jnp.maximum(count - row(count), 0), meet)
        self.from_start = decay(count, document == 0)
        self.to_end = decay(whole - count, document == last)
        self.total = decay(whole, last == 0)

    def after(self, state):
        return self.total * state + self.product(self.v, self.k * self.to_end, over=(0, 0))

    def forward(self, state):
        weights = self.product(self.q, self.k, over=(1, 1)) * self.between
        output = self.product(weights, self.v)
        output += self.product(self.q * self.from_start, state, over=(1, 1))
        return output, self.after(state)

    def backward(self, state, g, d_output):
        product, d_output = self.product, self.real(d_output)
        weights = product(self.q, self.k, over=(1, 1)) * self.between
        d_weights = product(d_output, self.v, over=(1, 1)) * self.between
        d_q = product(d_weights, self.k) + product(d_output, state) * self.from_start
        d_k = product(d_weights, self.q, over=(0, 0)) + product(self.v, g) * self.to_end
        d_v = product(weights, d_output, over=(0, 0)) + product(
            self.k * self.to_end, g, over=(1, 1)
        )
        g = self.total * g + product(d_output, self.q * self.from_start, over=(0, 0))
        return [self.real(d) for d in (d_q, d_k, d_v)], g


lightning_attention = plain.operation(forward, backward)
