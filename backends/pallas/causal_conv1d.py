"""y_t = bias + sum_j kernel[j] * x_{t-W+1+j}: one filter a channel, over a document's real tokens.

De et al. 2024, arXiv:2402.19427, section 2.3 (the temporal convolution before the recurrence).

The filter skips padding. The j-th real input before a token is computed recursively: it is the
(j-1)-th real input before the token's predecessor. So each j is a shift by one token, in which
padding repeats the value before it and a start passes 0. In the backward pass, the same shifts
backwards in time give each input the gradients of the outputs after it, and one kernel computes the
gradients of inputs and filter. Blocks without padding use a faster path.

An activation is part of the kernel. Its gradient needs the filter's output, so the backward pass
begins with a kernel forward in time, for the gradient of that output.
"""

import functools

import jax
import jax.numpy as jnp

from ..constants import CONTINUES, PADDING, STARTS
from ..jax import causal_conv1d as plain
from ..jax._common import default_zero_state, default_zero_state_gradient
from ..jax._shards import per_shard
from ..signatures import SIGNATURES
from . import _pallas as pl
from ._common import ROWS, unsupported_reason
from ._math import sigmoids
from ._streaming import F32, fit_blocks, following, hold, mask_padding, previous, stream

MOST_TAPS = 16


def unsupported(kernel, **others) -> str | None:
    """Reason these arguments are unsupported, or None."""
    if not 2 <= kernel.shape[0] <= MOST_TAPS:
        return f"needs a kernel of 2 to {MOST_TAPS} taps, got one of {kernel.shape[0]}"
    return unsupported_reason(kernel=kernel, **others)


@default_zero_state(plain.state_shape)
def forward(x, kernel, bias, initial_state, token_kind, activation=None):
    weights, bias = _filter(x, kernel, bias)
    run = _forward_with_silu if activation == "silu" else _forward
    return run(x, weights, bias, initial_state, token_kind)


@default_zero_state_gradient
def backward(x, kernel, bias, initial_state, token_kind, _, d_output, d_final, activation=None):
    slot = _state_slots(x, kernel, token_kind)
    weights, row = _filter(x, kernel, bias)
    if activation == "silu":
        d_output, _ = _before_silu(x, weights, row, initial_state, token_kind, d_output)
    d_x, d_filter, d_initial = _backward(x, weights, row, initial_state, slot, d_output, d_final)
    d_filter = jnp.sum(d_filter, axis=0)
    d_kernel, d_bias = d_filter[:-1].astype(kernel.dtype), d_filter[-1]
    d_initial = d_initial + _kept_state_gradient(d_final, token_kind, x.shape[1])
    return d_x, d_kernel, None if bias is None else d_bias.astype(bias.dtype), d_initial, None


def _filter(x, kernel, bias):
    """The weights in float32, in reverse order, and the bias [1, D]."""
    bias = jnp.zeros(x.shape[2], F32) if bias is None else bias.astype(F32)
    return kernel[::-1].astype(F32), bias[None]


def _state_slots(x, kernel, token_kind):
    """An integer [B, T] for each token: its kind plus 4 times its slot in the final state.

    The slot is the number of real tokens that follow, at most the number of taps. It is the number
    of taps if a document starts after the token, whose input is then not in the final state.
    """
    if token_kind is None:
        token_kind = jnp.full(x.shape[:2], CONTINUES, jnp.int32)
    kind = token_kind.astype(jnp.int32)

    def count_after(mask):
        reversed_mask = mask[:, ::-1]
        return (jnp.cumsum(reversed_mask, axis=1) - reversed_mask)[:, ::-1]

    real_after, starts_after = count_after(kind != PADDING), count_after(kind == STARTS)
    taps = kernel.shape[0]
    return kind + 4 * jnp.where(starts_after > 0, taps, jnp.minimum(real_after, taps))


def _kept_state_gradient(d_final, token_kind, length):
    """The gradient of the initial state's inputs that are still in the final state."""
    if token_kind is None:
        token_kind = jnp.full((d_final.shape[0], length), CONTINUES, jnp.int8)
    real_tokens = jnp.sum(token_kind != PADDING, axis=1)
    displaced = jnp.where(jnp.any(token_kind == STARTS, axis=1), d_final.shape[1], real_tokens)
    source = jnp.arange(d_final.shape[1]) - displaced[:, None]
    kept = jnp.take_along_axis(d_final, jnp.maximum(source, 0)[:, :, None], axis=1)
    return jnp.where((source >= 0)[:, :, None], kept, 0)


def _forward_kernel(finish, block, x, weights, bias, initial, *references):
    *others, y, final, state = references

    @pl.when(block.first)
    def _():
        state[...] = initial[...]

    taps = weights.shape[0]

    def tile(padded, i, rows, kind, before):
        (value,) = mask_padding(kind, x[rows, :].astype(F32))
        total = bias[...] + weights[:1, :] * value
        newest = []
        for j in range(1, taps):
            held, last = _hold_padding(padded, kind, value, before[j - 1])
            value = previous(held, before[j - 1])
            if kind is not None:
                value = jnp.where(kind == CONTINUES, value, 0)
            total = total + weights[j : j + 1, :] * value
            newest.append(last)
        y[rows, :] = finish(total, *(t[rows, :].astype(F32) for t in others)).astype(y.dtype)
        return tuple(newest)

    _run(block, tile, lambda kind: kind == PADDING, state)

    @pl.when(block.last)
    def _():
        final[...] = state[...]


def _run(block, tile, special, state):
    """Runs `tile` over all tiles; `is_special` is True if `special` holds for a token of the block.

    `tile(is_special, i, rows, kind, state)` takes and returns the rows of the state as a tuple, the
    last row first.
    """
    count = state.shape[0]

    def over(is_special):
        newest_first = tuple(state[j : j + 1, :] for j in reversed(range(count)))
        rows = block.scan_tiles(functools.partial(tile, is_special), newest_first)
        for j, row in enumerate(rows):
            state[count - 1 - j : count - j, :] = row

    if block.kinds is None:
        over(False)
        return
    some = jnp.max(jnp.where(special(block.kinds[...]), 1.0, 0.0)) > 0
    pl.when(some)(functools.partial(over, True))
    pl.when(~some)(functools.partial(over, False))


def _hold_padding(padded, kind, value, before, reverse=False):
    """`value`, in which padding repeats the token before it, and its last row."""
    if padded:
        return hold(jnp.where(kind == PADDING, 1.0, 0.0), value, before, reverse)
    return value, value[:1] if reverse else value[ROWS - 1 :]


def _identity(z):
    return z


def _silu(z):
    return z * sigmoids(z)[0]


def _silu_gradient(z, dy):
    s, rest = sigmoids(z)
    return dy * s * (1 + z * rest)


def _filtered(finish, x, weights, bias, initial_state, token_kind, *others):
    """`finish(output of the filter, *others)`, and the final state."""
    y = jax.ShapeDtypeStruct(x.shape, F32 if others else x.dtype)
    blocks = fit_blocks(x, [x, *others, y])
    parameters, state = map(blocks.shared, (weights, bias)), blocks.row(initial_state)
    inputs = [*blocks.sequences(x), *parameters, state, *blocks.sequences(*others)]
    outputs = [*blocks.sequences(y), state]
    kernel = functools.partial(_forward_kernel, finish)
    functools.update_wrapper(kernel, _forward_kernel)
    return stream(kernel, blocks, token_kind, inputs, outputs, carried=len(weights) - 1)


def _backward_kernel(block, x, weights, bias, initial, dy, d_final, dx, d_filter, d_initial, state):
    """The state holds the gradients of the outputs after a token, the next token's last."""
    taps = weights.shape[0]

    @pl.when(block.first)
    def _():
        state[...] = jnp.zeros_like(state)
        d_filter[...] = jnp.zeros_like(d_filter)

    def tile(special, i, rows, slot, after):
        kind = slot & 3
        u, value = mask_padding(kind, x[rows, :].astype(F32), dy[rows, :].astype(F32))
        total = weights[:1, :] * value
        sums = [u * value]
        d_bias, before = value, []
        for j in range(1, taps):
            passed = jnp.where(kind == STARTS, 0, value)
            held, last = _hold_padding(special, kind, passed, after[j - 1], reverse=True)
            (value,) = mask_padding(kind, following(held, after[j - 1]))
            total = total + weights[j : j + 1, :] * value
            sums.append(u * value)
            before.append(last)
        if special:
            for j in range(1, taps):
                in_state = (slot >> 2 == j - 1) & (kind != PADDING)
                d_last = d_final[taps - 1 - j : taps - j, :]
                total = total + jnp.where(in_state, d_last, 0)
        dx[rows, :] = total.astype(dx.dtype)
        for j, product in enumerate((*sums, d_bias)):
            row = slice(taps - 1 - j, taps - j) if j < taps else slice(taps, taps + 1)
            d_filter[row, :] += jnp.sum(product, axis=0, keepdims=True)
        return tuple(before)

    _run(block, tile, lambda slot: (slot & 3 == PADDING) | (slot >> 2 < taps - 1), state)

    @pl.when(block.last)
    def _():
        # The inputs in the initial state come before the first token. The i-th from their end is
        # multiplied by weight j >= i for the output of token j - i.
        for i in range(1, taps):
            total = jnp.zeros_like(state[:1, :])
            for j in range(i, taps):
                d_y = state[taps - 2 - (j - i) : taps - 1 - (j - i), :]
                given = initial[taps - 1 - i : taps - i, :]
                total = total + weights[j : j + 1, :] * d_y
                d_filter[taps - 1 - j : taps - j, :] += given * d_y
            d_initial[taps - 1 - i : taps - i, :] = total


def _backward(x, weights, bias, initial_state, slot, dy, d_final):
    taps, width = weights.shape
    blocks = fit_blocks(x, [x, dy, x], reverse=True)
    parameters = map(blocks.shared, (weights, bias))
    state, d_state = map(blocks.row, (initial_state, d_final))
    inputs = [*blocks.sequences(x), *parameters, state, *blocks.sequences(dy), d_state]
    d_filter = blocks.row(jax.ShapeDtypeStruct((x.shape[0], taps + 1, width), F32))
    outputs = [*blocks.sequences(x), d_filter, d_state]
    return stream(_backward_kernel, blocks, slot, inputs, outputs, carried=taps - 1)


(_X, _KERNEL, _, *_CONTEXT), _RESULTS, _CHANNELS = SIGNATURES["causal_conv1d"].layout
_TENSORS = (_X, _KERNEL, "1 D", *_CONTEXT)  # the bias as a row


def _per_shard(function, saved=(), results=_RESULTS):
    return per_shard(function, (*_TENSORS, *saved), results, _CHANNELS)


_forward = _per_shard(functools.partial(_filtered, _identity))
_forward_with_silu = _per_shard(functools.partial(_filtered, _silu))
_before_silu = _per_shard(functools.partial(_filtered, _silu_gradient), saved=(_X,))
# Gradients of the filter and the bias are rows F of one tensor, for each row of the batch.
_backward = _per_shard(_backward, saved=_RESULTS, results=(_X, "B F D", _RESULTS[1]))

causal_conv1d = plain.causal_conv1d.replace_passes(forward, backward, unsupported)
