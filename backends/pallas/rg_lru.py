"""The real-gated linear recurrent unit, with the equations of `backends/reference/rg_lru.py`.

Gates, square root and scan are one kernel, which reads three tensors and writes one. The backward
pass runs from the last token to the first, with the state c_t = a_t g_t, g_t = dh_t + c_{t+1}.
"""

import jax
import jax.numpy as jnp

from ..constants import CONTINUES, DECAY_EXPONENT, MAX_SQRT_GRADIENT, STARTS
from ..jax import rg_lru as plain
from ..jax._common import default_zero_state, default_zero_state_gradient
from ..jax._scan import state_shape
from ..jax._shards import per_shard
from ..signatures import SIGNATURES
from . import _pallas as pl
from ._common import unsupported_reason
from ._math import decay, sigmoids
from ._streaming import (
    F32,
    adjoint_scan,
    applied_decay,
    fit_blocks,
    kahan_add,
    mask_padding,
    output_before,
    previous,
    scan,
    stream,
    zero_sum,
)


@default_zero_state(state_shape)
def forward(x, gate_a, gate_x, a_logit, initial_state, token_kind):
    return _forward(x, gate_a, gate_x, _log_decay_of_open_gate(a_logit), initial_state, token_kind)


@default_zero_state_gradient
def backward(x, gate_a, gate_x, a_logit, initial_state, token_kind, output, d_output, d_final):
    tensors = (x, gate_a, gate_x, _log_decay_of_open_gate(a_logit), initial_state, token_kind)
    *d_tensors, d_rate, d_initial = _backward(*tensors, output, d_output, d_final)
    d_a_logit = jnp.sum(d_rate, axis=0) * DECAY_EXPONENT * jax.nn.sigmoid(-a_logit.astype(F32))
    return *d_tensors, d_a_logit.astype(a_logit.dtype), d_initial, None


def _log_decay_of_open_gate(a_logit):
    """log a for r = 1, [D]."""
    return -DECAY_EXPONENT * jax.nn.softplus(-a_logit.astype(F32))


def _forward_kernel(block, x, gate_a, gate_x, log_a_open, initial, h, final, state):
    def tile(i, rows, kind, state):
        u, z_a, z_x = mask_padding(kind, *(t[rows, :].astype(F32) for t in (x, gate_a, gate_x)))
        a, one_minus_a = decay(log_a_open[...] * sigmoids(z_a)[0])
        multiplier = _multiplier_at_start(kind, jnp.sqrt(_one_minus_a2(one_minus_a)))
        gated = multiplier * sigmoids(z_x)[0] * u
        a, one_minus_a = applied_decay(kind, a, one_minus_a)
        tile, state = scan(a, one_minus_a, gated, state)
        h[rows, :] = tile.astype(h.dtype)
        return state

    block.scan_states(tile, initial, state, final)


def _one_minus_a2(one_minus_a):
    """1 - a² = (1 - a)(1 + a)."""
    return one_minus_a * (2 - one_minus_a)


def _multiplier_at_start(kind, multiplier):
    return multiplier if kind is None else jnp.where(kind == STARTS, 1.0, multiplier)


def _forward(x, gate_a, gate_x, log_a_open, initial_state, token_kind):
    blocks = fit_blocks(x, [x, gate_a, gate_x, x])
    state = blocks.row(initial_state[:, None])
    inputs = *blocks.sequences(x, gate_a, gate_x), blocks.shared(log_a_open[None]), state
    outputs = [*blocks.sequences(x), state]
    h, final = stream(_forward_kernel, blocks, token_kind, inputs, outputs)
    return h, final[:, 0]


def _backward_kernel(
    block,
    x,
    gate_a,
    gate_x,
    log_a_open,
    h,
    rows_before,
    initial,
    dh,
    d_final,
    dx,
    d_gate_a,
    d_gate_x,
    d_rate,
    d_initial,
    state,
):
    @pl.when(block.first)
    def _():
        state[...] = d_final[...]
        d_rate[...] = jnp.zeros_like(d_rate)

    def tile(i, rows, kind, carry):
        d_next, d_sum = carry
        u, z_a, z_x = mask_padding(kind, *(t[rows, :].astype(F32) for t in (x, gate_a, gate_x)))
        d = block.mask_end(i, dh[rows, :].astype(F32))
        (r, not_r), (gate, not_gate) = sigmoids(z_a), sigmoids(z_x)
        log_a = log_a_open[...] * r
        a, one_minus_a = decay(log_a)
        one_minus_a2 = _one_minus_a2(one_minus_a)
        d_root = jax.lax.rsqrt(jnp.maximum(4 * one_minus_a2, 1 / MAX_SQRT_GRADIENT**2))
        multiplier = _multiplier_at_start(kind, jnp.sqrt(one_minus_a2))
        applied, one_minus_a = applied_decay(kind, a, one_minus_a)
        g = adjoint_scan(applied, one_minus_a, d, d_next)
        c = applied * g
        before = previous(h[rows, :].astype(F32), output_before(block, i, rows_before, h, initial))
        g_i = mask_padding(kind, g)[0] * gate
        d_log_a = c * before - g_i * u * d_root * 2 * a * a
        if kind is not None:
            d_log_a = jnp.where(kind == CONTINUES, d_log_a, 0)
        dx[rows, :] = (g_i * multiplier).astype(dx.dtype)
        d_gate_a[rows, :] = (d_log_a * log_a * not_r).astype(d_gate_a.dtype)
        d_gate_x[rows, :] = (g_i * multiplier * u * not_gate).astype(d_gate_x.dtype)
        return c[:1], kahan_add(d_sum, r * d_log_a)

    no_sum = zero_sum(block.blocks.channels)
    state[...], (d_sum, _) = block.scan_tiles(tile, (state[...], no_sum))
    d_rate[...] += jnp.sum(d_sum, axis=0, keepdims=True)

    @pl.when(block.last)
    def _():
        d_initial[...] = state[...]


def _backward(x, gate_a, gate_x, log_a_open, initial_state, token_kind, h, dh, d_final):
    blocks = fit_blocks(x, [x, gate_a, gate_x, h, dh, x, gate_a, gate_x], reverse=True)
    state, d_state = (blocks.row(t[:, None]) for t in (initial_state, d_final))
    inputs = [
        *blocks.sequences(x, gate_a, gate_x),
        blocks.shared(log_a_open[None]),
        *(*blocks.sequences(h), blocks.rows_before(h), state),
        *(*blocks.sequences(dh), d_state),
    ]
    outputs = [*blocks.sequences(x, gate_a, gate_x), d_state, d_state]
    *d_tensors, d_rate, d_initial = stream(_backward_kernel, blocks, token_kind, inputs, outputs)
    return *d_tensors, d_rate[:, 0], d_initial[:, 0]


_TENSORS, _RESULTS, _CHANNELS = SIGNATURES["rg_lru"].layout
_forward = per_shard(_forward, _TENSORS, _RESULTS, _CHANNELS)
# The gradient of the logits is summed over time alone, [B, D].
_backward = per_shard(
    _backward,
    (*_TENSORS, _RESULTS[0], *_RESULTS),
    (*_TENSORS[:3], "B D", _RESULTS[1]),
    _CHANNELS,
)

rg_lru = plain.rg_lru.replace_passes(forward, backward, unsupported_reason)
