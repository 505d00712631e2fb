"""y_t = bias + sum_j kernel[j] * x_{t-W+1+j}, over the real tokens of a document.

The input of a tap is the input of the next tap at the previous real token. Padding repeats it, by
a recurrence with decays of 0 and 1, which is exact. In a loop over time, the last inputs are the
state.
"""

from keras import ops

from keras_recurrent.portable import _loop, _opset_27
from keras_recurrent.portable._common import fill_where, state_or_zeros, sum_dtype, token_masks
from keras_recurrent.portable._scan import scan, states_before


def causal_conv1d(x, kernel, bias=None, initial_state=None, token_kind=None, activation=None):
    """x: [B, T, D]; kernel: [W, D]. Returns ([B, T, D], [B, W - 1, D])."""
    dtype = sum_dtype(x, kernel, bias, initial_state)
    batch, length, width = ops.shape(x)
    taps = kernel.shape[0] - 1
    kernel = ops.cast(kernel, dtype)
    state = state_or_zeros(initial_state, (batch, taps, width), dtype)
    if _opset_27.is_active() and taps and (token_kind is None or x.shape[1] == 1):
        starts, padding = token_masks(token_kind, 3)
        bias = ops.zeros((width,), dtype) if bias is None else ops.cast(bias, dtype)
        inputs = fill_where(padding, 0.0, ops.cast(x, dtype))
        seen = fill_where(starts, 0.0, state)
        y, after = _opset_27.causal_conv1d(inputs, kernel, bias, seen, activation)
        after = after if padding is None else ops.where(padding, state, after)
        return ops.cast(y, x.dtype), after
    if _loop.is_needed(x):
        y, after = _loop_over_time(ops.cast(x, dtype), kernel, state, token_kind)
    elif x.shape[1] == 1:
        y, after = _convolve_one_token(ops.cast(x, dtype), kernel, state, token_kind)
    elif token_kind is None:
        inputs = ops.concatenate([state, ops.cast(x, dtype)], axis=1)
        y = inputs[:, taps:] * kernel[taps]
        for tap in range(taps):
            y = y + inputs[:, tap : tap + length] * kernel[tap]
        after = inputs[:, length:]
    else:
        y, after = _convolve_with_kinds(ops.cast(x, dtype), kernel, state, token_kind)
    y = y if bias is None else y + ops.cast(bias, dtype)
    y = y * ops.sigmoid(y) if activation == "silu" else y
    return ops.cast(y, x.dtype), after


def _loop_over_time(x, kernel, state, token_kind):
    def step(last, x, *masks):
        continues, padding = masks or (None, None)
        before = last if continues is None else last * continues
        inputs = ops.concatenate([before, ops.expand_dims(x, 1)], axis=1)
        after = inputs[:, 1:]
        return after if padding is None else ops.where(padding, last, after), inputs

    starts, padding = token_masks(token_kind, 4)
    masks = () if padding is None else (ops.cast(~starts, x.dtype), padding)
    x = x if padding is None else fill_where(padding[..., 0], 0.0, x)
    # The loop returns all inputs of each token: on torch its steps cannot use weights or numbers
    # from outside.
    inputs, after = _loop.loop(step, state, (x, *masks))
    return ops.sum(inputs * kernel, axis=2), after


def _convolve_one_token(x, kernel, state, token_kind):
    starts, padding = token_masks(token_kind, 3)
    inputs = [fill_where(starts, 0.0, state), fill_where(padding, 0.0, x)]
    inputs = ops.concatenate(inputs, axis=1)
    after = inputs[:, 1:] if padding is None else ops.where(padding, state, inputs[:, 1:])
    return ops.sum(inputs * kernel, axis=1, keepdims=True), after


def _convolve_with_kinds(x, kernel, state, token_kind):
    taps = kernel.shape[0] - 1
    starts, padding = token_masks(token_kind, 3)
    repeats, continues = (ops.cast(mask, x.dtype) for mask in (padding, ~(starts | padding)))
    seen = fill_where(padding, 0.0, x)
    y, after = seen * kernel[taps], []
    for tap in reversed(range(taps)):
        held = scan(repeats, seen, state[:, tap])
        after.append(held[:, -1])
        seen = states_before(held, state[:, tap]) * continues
        y = y + seen * kernel[tap]
    after = ops.stack(after[::-1], axis=1) if after else state
    return y, after
