"""y_t = bias + sum_j kernel[j] * x_{t-W+1+j}: one filter a channel, over a document's real tokens.

De et al. 2024, arXiv:2402.19427, section 2.3 (the temporal convolution before the recurrence).
With the activation "silu" the output is y_t σ(y_t).
"""

import numpy as np

from ..constants import PADDING, STARTS
from ._common import broadcast_kinds, cast, sigmoid


def causal_conv1d(
    x,
    kernel,
    bias=None,
    initial_state=None,
    token_kind=None,
    activation=None,
    dtype=np.float64,
):
    """x: [B, T, D]; kernel: [W, D]; bias: [D]; activation: None or "silu".

    Returns ([B, T, D], [B, W - 1, D]).
    """
    x, kernel = cast(dtype, x, kernel)
    bias = 0 if bias is None else np.asarray(bias).astype(dtype)
    window = _initial_window(x, kernel, initial_state, dtype)
    kind = broadcast_kinds(token_kind, x)
    output = np.empty_like(x)
    for t in range(x.shape[1]):
        window = _next_window(window, x[:, t], kind[:, t])
        z = bias + np.sum(kernel * window, axis=1)
        output[:, t] = z * sigmoid(z) if activation == "silu" else z
    return output, window[:, 1:]


def causal_conv1d_gradient(
    d_output,
    d_final_state,
    x,
    kernel,
    bias=None,
    initial_state=None,
    token_kind=None,
    activation=None,
    dtype=np.float64,
):
    """Returns the gradients of x, kernel, bias and initial_state.

    The gradient of the output of a padding token is ignored.
    """
    x, kernel, d_output, d_final_state = cast(dtype, x, kernel, d_output, d_final_state)
    bias = 0 if bias is None else np.asarray(bias).astype(dtype)
    kind = broadcast_kinds(token_kind, x)
    windows = [_initial_window(x, kernel, initial_state, dtype)]
    for t in range(x.shape[1]):
        windows.append(_next_window(windows[-1], x[:, t], kind[:, t]))

    d_x, d_kernel, d_bias = np.zeros_like(x), np.zeros_like(kernel), np.zeros_like(kernel[0])
    g = np.zeros_like(windows[0])  # the gradient of the window after token t
    g[:, 1:] = d_final_state
    for t in reversed(range(x.shape[1])):
        k = kind[:, t]
        d_z = np.where(k == PADDING, 0, d_output[:, t])
        if activation == "silu":
            z = bias + np.sum(kernel * windows[t + 1], axis=1)
            d_z = d_z * sigmoid(z) * (1 + z * sigmoid(-z))
        d_kernel += np.sum(d_z[:, None] * windows[t + 1], axis=0)
        d_bias += np.sum(d_z, axis=0)
        g = g + kernel * d_z[:, None]
        d_x[:, t] = np.where(k == PADDING, 0, g[:, -1])
        k = k[:, None]
        before = np.concatenate([np.zeros_like(g[:, :1]), g[:, :-1]], axis=1)
        g = np.where(k == PADDING, g, np.where(k == STARTS, 0, before))
    return d_x, d_kernel, d_bias, g[:, 1:]


def _initial_window(x, kernel, initial_state, dtype):
    """The last W inputs before the first token; the oldest is never used, and is 0."""
    window = np.zeros((x.shape[0], *kernel.shape), dtype)
    if initial_state is not None:
        window[:, 1:] = np.asarray(initial_state, dtype)
    return window


def _next_window(window, x, kind):
    kept = np.where(kind[:, None] == STARTS, 0, window[:, 1:])
    return np.where(kind[:, None] == PADDING, window, np.concatenate([kept, x[:, None]], axis=1))
