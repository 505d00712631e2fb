"""h_t = exp(log_a_t) * h_{t-1} + x_t.  De et al. 2024, arXiv:2402.19427, section 2.4.

The backward pass runs from the last token to the first, with the state c_t = a_t g_t:

    g_t = dh_t + c_{t+1},  dx_t = g_t,  dlog_a_t = c_t h_{t-1}
"""

import jax.numpy as jnp

from ..constants import CONTINUES
from ..jax import linear_scan as plain
from ..jax._common import default_zero_state, default_zero_state_gradient
from ..jax._scan import state_shape
from ..jax._shards import per_shard
from ..signatures import SIGNATURES
from ._common import unsupported_reason
from ._streaming import (
    F32,
    adjoint_scan,
    applied_decay,
    fit_blocks,
    mask_padding,
    output_before,
    previous,
    scan,
    stream,
)


@default_zero_state_gradient
def backward(_, log_a, initial_state, token_kind, output, d_output, d_final):
    tensors = (log_a, initial_state, token_kind, output, d_output, d_final)
    return *_backward(*tensors), None


def _forward_kernel(block, x, log_a, initial, h, final, state):
    def tile(i, rows, kind, state):
        (u,) = mask_padding(kind, x[rows, :].astype(F32))
        a = jnp.exp(log_a[rows, :].astype(F32))
        a, one_minus_a = applied_decay(kind, a, 1 - a)
        tile, state = scan(a, one_minus_a, u, state)
        h[rows, :] = tile.astype(h.dtype)
        return state

    block.scan_states(tile, initial, state, final)


def _forward(x, log_a, initial_state, token_kind):
    blocks = fit_blocks(x, [x, log_a, x])
    state = blocks.row(initial_state[:, None])
    inputs, outputs = [*blocks.sequences(x, log_a), state], [*blocks.sequences(x), state]
    h, final = stream(_forward_kernel, blocks, token_kind, inputs, outputs)
    return h, final[:, 0]


def _backward_kernel(
    block, log_a, h, rows_before, initial, dh, d_final, dx, d_log_a, d_initial, state
):
    def tile(i, rows, kind, d_next):
        d = block.mask_end(i, dh[rows, :].astype(F32))
        a = jnp.exp(log_a[rows, :].astype(F32))
        applied, one_minus_a = applied_decay(kind, a, 1 - a)
        g = adjoint_scan(applied, one_minus_a, d, d_next)
        c = applied * g
        before = previous(h[rows, :].astype(F32), output_before(block, i, rows_before, h, initial))
        d_decay = c * before
        if kind is not None:
            d_decay = jnp.where(kind == CONTINUES, d_decay, 0)
        dx[rows, :] = mask_padding(kind, g)[0].astype(dx.dtype)
        d_log_a[rows, :] = d_decay.astype(d_log_a.dtype)
        return c[:1]

    block.scan_states(tile, d_final, state, d_initial)


def _backward(log_a, initial_state, token_kind, h, dh, d_final):
    blocks = fit_blocks(h, [log_a, h, dh, h, log_a], reverse=True)
    state, d_state = (blocks.row(x[:, None]) for x in (initial_state, d_final))
    inputs = (
        *blocks.sequences(log_a, h),
        blocks.rows_before(h),
        state,
        *blocks.sequences(dh),
        d_state,
    )
    outputs = [*blocks.sequences(h, log_a), d_state]
    dx, d_log_a, d_initial = stream(_backward_kernel, blocks, token_kind, inputs, outputs)
    return dx, d_log_a, d_initial[:, 0]


_TENSORS, _RESULTS, _CHANNELS = SIGNATURES["linear_scan"].layout
forward = default_zero_state(state_shape)(per_shard(_forward, _TENSORS, _RESULTS, _CHANNELS))
_backward = per_shard(_backward, (*_TENSORS[1:], _RESULTS[0], *_RESULTS), _TENSORS[:-1], _CHANNELS)

linear_scan = plain.linear_scan.replace_passes(forward, backward, unsupported_reason)
