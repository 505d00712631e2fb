"""The real-gated linear recurrent unit.  De et al. 2024, arXiv:2402.19427, section 2.4.

    r_t = σ(gate_a_t),  i_t = σ(gate_x_t),  log a_t = -8 softplus(-Λ) r_t
    h_t = a_t h_{t-1} + s_t i_t x_t,  s_t = sqrt(1 - a_t²); a_t = 0, s_t = 1 at a start

Gates, square root and scan in one pass: three tensors are read and one is written. The backward
goes from the last token to the first, with the state c_t = a_t g_t, g_t = dh_t + c_{t+1}:

    dx = g s i,  di = g s x,  dlog a = c h_{t-1} - g i x a² / s
    dr = -8 softplus(-Λ) dlog a,  dΛ = 8 σ(-Λ) Σ r dlog a

where the s that divides is bounded below as in the released code.
"""

import jax
import jax.numpy as jnp

from keras_recurrent.backends.constants import GOES_ON, MAX_SQRT_GRADIENT, STARTS
from keras_recurrent.backends.jax import rg_lru as plain
from keras_recurrent.backends.pallas._common import refusal
from keras_recurrent.backends.pallas._lazy import pl
from keras_recurrent.backends.pallas._math import decay, sigmoids
from keras_recurrent.backends.pallas._platform import per_shard
from keras_recurrent.backends.pallas._streaming import (
    F32,
    add,
    blocks,
    effective,
    gradient,
    nothing,
    output_before,
    real,
    scan,
    shift,
    stream,
)


def unsupported(x, gate_a, gate_x, a_logit, initial_state=None, token_kind=None) -> str | None:
    """Why this kernel refuses these arguments; None if it accepts them."""
    return refusal(x, gate_a, gate_x, a_logit, initial_state)


def forward(x, gate_a, gate_x, a_logit, initial_state, token_kind):
    return _forward(x, gate_a, gate_x, _strongest(a_logit), initial_state, token_kind)


def backward(x, gate_a, gate_x, a_logit, initial_state, token_kind, output, d_output, d_final):
    tensors = (x, gate_a, gate_x, _strongest(a_logit), initial_state, token_kind)
    *d_tensors, d_rate, d_initial = _backward(*tensors, output, d_output, d_final)
    d_a_logit = jnp.sum(d_rate, axis=0) * plain.C * jax.nn.sigmoid(-a_logit.astype(F32))
    return *d_tensors, d_a_logit.astype(a_logit.dtype), d_initial, None


def _strongest(a_logit):
    """log a where the gate is open, [D]."""
    return -plain.C * jax.nn.softplus(-a_logit.astype(F32))


def _forward_kernel(here, x, gate_a, gate_x, strongest, initial, h, final, state):
    @pl.when(here.first)
    def _():
        state[...] = initial[...]

    def tile(i, rows, kind, state):
        u, z_a, z_x = real(kind, *(t[rows, :].astype(F32) for t in (x, gate_a, gate_x)))
        a, lost = decay(strongest[...] * sigmoids(z_a)[0])
        multiplier = _at_start(kind, jnp.sqrt(_rest(lost)))
        gated = multiplier * sigmoids(z_x)[0] * u
        a, lost = effective(kind, a, lost)
        tile, state = scan(a, lost, gated, state)
        h[rows, :] = tile.astype(h.dtype)
        return state

    state[...] = here.over_tiles(tile, state[...])

    @pl.when(here.last)
    def _():
        final[...] = state[...]


def _rest(lost):
    """1 - a² = (1 - a)(1 + a)."""
    return lost * (2 - lost)


def _at_start(kind, multiplier):
    return multiplier if kind is None else jnp.where(kind == STARTS, 1.0, multiplier)


def _forward(x, gate_a, gate_x, strongest, initial_state, token_kind):
    cut = blocks(x, [x, gate_a, gate_x, x])
    inputs = [
        (x, cut.sequence()),
        (gate_a, cut.sequence()),
        (gate_x, cut.sequence()),
        (strongest[None], cut.shared()),
        (initial_state[:, None], cut.row()),
    ]
    outputs = [(x.shape, x.dtype, cut.sequence()), (cut.row_shape, F32, cut.row())]
    h, final = stream(_forward_kernel, cut, token_kind, inputs, outputs)
    return h, final[:, 0]


def _backward_kernel(
    here,
    x,
    gate_a,
    gate_x,
    strongest,
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
    @pl.when(here.first)
    def _():
        state[...] = d_final[...]
        d_rate[...] = jnp.zeros_like(d_rate)

    def tile(i, rows, kind, carry):
        after, d_sum = carry
        u, z_a, z_x = real(kind, *(t[rows, :].astype(F32) for t in (x, gate_a, gate_x)))
        d = here.inside(i, dh[rows, :].astype(F32))
        (r, not_r), (gate, not_gate) = sigmoids(z_a), sigmoids(z_x)
        log_a = strongest[...] * r
        a, lost = decay(log_a)
        rest = _rest(lost)
        d_root = jax.lax.rsqrt(jnp.maximum(4 * rest, 1 / MAX_SQRT_GRADIENT**2))
        multiplier = _at_start(kind, jnp.sqrt(rest))
        applied, lost = effective(kind, a, lost)
        g = gradient(applied, lost, d, after)
        c = applied * g
        before = shift(h[rows, :].astype(F32), output_before(here, i, rows_before, h, initial))
        g_i = real(kind, g)[0] * gate
        d_log_a = c * before - g_i * u * d_root * 2 * a * a
        if kind is not None:
            d_log_a = jnp.where(kind == GOES_ON, d_log_a, 0)
        dx[rows, :] = (g_i * multiplier).astype(dx.dtype)
        d_gate_a[rows, :] = (d_log_a * log_a * not_r).astype(d_gate_a.dtype)
        d_gate_x[rows, :] = (g_i * multiplier * u * not_gate).astype(d_gate_x.dtype)
        return c[:1], add(d_sum, r * d_log_a)

    nothing_yet = nothing(here.blocks.channels)
    state[...], (d_sum, _) = here.over_tiles(tile, (state[...], nothing_yet))
    d_rate[...] += jnp.sum(d_sum, axis=0, keepdims=True)

    @pl.when(here.last)
    def _():
        d_initial[...] = state[...]


def _backward(x, gate_a, gate_x, strongest, initial_state, token_kind, h, dh, d_final):
    cut = blocks(x, [x, gate_a, gate_x, h, dh, x, gate_a, gate_x], reverse=True)
    inputs = [
        (x, cut.sequence()),
        (gate_a, cut.sequence()),
        (gate_x, cut.sequence()),
        (strongest[None], cut.shared()),
        (h, cut.sequence()),
        (h, cut.rows_before()),
        (initial_state[:, None], cut.row()),
        (dh, cut.sequence()),
        (d_final[:, None], cut.row()),
    ]
    outputs = [(t.shape, t.dtype, cut.sequence()) for t in (x, gate_a, gate_x)]
    outputs += [(cut.row_shape, F32, cut.row())] * 2
    *d_tensors, d_rate, d_initial = stream(_backward_kernel, cut, token_kind, inputs, outputs)
    return *d_tensors, d_rate[:, 0], d_initial[:, 0]


_TENSORS = ("b t d",) * 3
_ARGUMENTS = (*_TENSORS, "d", "b d", "b t")
_forward = per_shard(_forward, _ARGUMENTS, ("b t d", "b d"))
_backward = per_shard(_backward, (*_ARGUMENTS, "b t d", "b t d", "b d"), (*_TENSORS, "b d", "b d"))

rg_lru = plain.operation(forward, backward)
