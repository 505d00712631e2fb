"""y_t = bias + sum_j kernel[j] * x_{t-W+1+j}: one filter a channel, over a document's real tokens.

De et al. 2024, arXiv:2402.19427, section 2.3 (the temporal convolution before the recurrence).

Padding may be anywhere in a sequence, and the filter skips it. So the real tokens are first moved
to the front, where the filter is a sum of shifted sequences, and the outputs are moved back. The
backward pass recomputes the argument of the activation.
"""

import jax
import jax.numpy as jnp

from ._common import (
    default_zero_state,
    default_zero_state_gradient,
    sum_over_tokens,
    take,
)
from ._operation import kernel_over_time
from ._real_tokens import RealTokens
from ._time_chunks import elements_before, scan_chunks


def state_shape(x, kernel, bias):
    return x.shape[0], kernel.shape[0] - 1, x.shape[2]


@default_zero_state(state_shape)
def forward(x, kernel, bias, initial_state, token_kind, activation=None):
    dtype = initial_state.dtype
    tokens, window = _tokens(token_kind), kernel.astype(dtype)
    real_first, document = _to_front(x, tokens)

    def step(carry, start, x_chunk, document_chunk):
        inputs = _inputs(real_first, x_chunk, start, initial_state)
        output = _filtered(
            inputs, window, bias, _document_masks(document, document_chunk, start, window)
        )
        if activation == "silu":
            output = jax.nn.silu(output)
        return carry, (output.astype(x.dtype),)

    _, (output,) = scan_chunks(step, (), (real_first, document), min_tokens=window.shape[0])
    if tokens is None:
        whole = jnp.concatenate([initial_state, x[:, -window.shape[0] :].astype(dtype)], axis=1)
        return output, whole[:, whole.shape[1] - initial_state.shape[1] :]
    last, valid = _last_inputs(window.shape[0], tokens)
    whole = jnp.concatenate([initial_state, real_first.astype(dtype)], axis=1)
    return tokens.put_back(output), take(whole, last, valid)


@default_zero_state_gradient
def backward(x, kernel, bias, initial_state, token_kind, _, d_output, d_final, activation=None):
    dtype, width = initial_state.dtype, kernel.shape[0]
    tokens, window = _tokens(token_kind), kernel.astype(dtype)
    real_first, document = _to_front(x, tokens)
    d_real_first, _ = _to_front(d_output, tokens)

    def step(carry, start, x_chunk, document_chunk, d_y):
        # d_next: the gradient of the last inputs, from the following chunk.
        d_next, d_window, d_bias = carry
        length, d_z = x_chunk.shape[1], d_y.astype(dtype)
        inputs = _inputs(real_first, x_chunk, start, initial_state)
        document_masks = _document_masks(document, document_chunk, start, window)
        if activation == "silu":
            d_z = _silu_gradient(d_z, _filtered(inputs, window, bias, document_masks))
        d_inputs = jnp.pad(d_next, ((0, 0), (length, 0), (0, 0)))
        padded = jnp.pad(d_z, ((0, 0), (width - 1, width - 1), (0, 0)))
        d_taps = []
        for j, same in enumerate(document_masks):
            d_taps.append(sum_over_tokens(jnp.where(same, d_z, 0) * inputs[:, j : j + length]))
            if document is not None:
                same = jnp.pad(same, ((0, 0), (j, width - 1 - j), (0, 0)))
            start_of_tap = width - 1 - j
            d_tap = padded[:, start_of_tap : start_of_tap + inputs.shape[1]]
            d_inputs += window[j] * jnp.where(same, d_tap, 0)
        carry = (
            d_inputs[:, : width - 1],
            d_window + jnp.stack(d_taps),
            d_bias + sum_over_tokens(d_z),
        )
        return carry, (d_inputs[:, width - 1 :].astype(x.dtype),)

    d_next = d_final if tokens is None else jnp.zeros_like(d_final)
    carry = d_next, jnp.zeros_like(window), jnp.zeros(x.shape[2], dtype)
    (d_initial, d_window, d_bias), (d_x,) = scan_chunks(
        step, carry, (real_first, document, d_real_first), reverse=True, min_tokens=width
    )
    if tokens is not None:
        last, valid = _last_inputs(width, tokens)
        add = jax.vmap(lambda d, i, g: d.at[i].add(g))
        d_inputs = jnp.concatenate([d_initial, d_x.astype(dtype)], axis=1)
        d_inputs = add(d_inputs, last, jnp.where(valid[:, :, None], d_final, 0))
        d_initial, d_x = d_inputs[:, : width - 1], tokens.put_back(d_inputs[:, width - 1 :])
    return (
        d_x.astype(x.dtype),
        d_window.astype(kernel.dtype),
        None if bias is None else d_bias.astype(bias.dtype),
        d_initial,
        None,
    )


causal_conv1d = kernel_over_time(
    "causal_conv1d", forward, backward, options=("activation",), keep_output=False
)


def _tokens(token_kind):
    return None if token_kind is None else RealTokens(token_kind)


def _to_front(x, tokens):
    """x with the real tokens first, and the document number [B, T] of each token."""
    return (x, None) if tokens is None else (tokens.to_front(x), tokens.document)


def _inputs(x, chunk, start, initial_state):
    """[B, W - 1 + C, D]: a chunk of x, preceded by the W - 1 tokens before it."""
    chunk = chunk.astype(initial_state.dtype)
    return jnp.concatenate([elements_before(x, start, initial_state), chunk], axis=1)


def _filtered(inputs, window, bias, document_masks):
    """The filter on the chunk at the end of its inputs [B, W - 1 + C, D]."""
    length = inputs.shape[1] - window.shape[0] + 1
    output = sum(
        window[j] * jnp.where(same, inputs[:, j : j + length], 0)
        for j, same in enumerate(document_masks)
    )
    return output if bias is None else output + bias.astype(window.dtype)


def _silu_gradient(d_y, z):
    """The gradient of z from that of y = z σ(z)."""
    s = jax.nn.sigmoid(z)
    return d_y * s * (1 + z * jax.nn.sigmoid(-z))


def _document_masks(document, chunk, start, window):
    """For each weight, a mask of the inputs that belong to the document of the output token.

    The inputs in the initial state belong to document 0.
    """
    width = window.shape[0]
    if document is None:
        return [True] * width
    first = jnp.zeros((chunk.shape[0], width - 1), chunk.dtype)
    documents = jnp.concatenate([elements_before(document, start, first), chunk], axis=1)
    return [(documents[:, j : j + chunk.shape[1]] == chunk)[:, :, None] for j in range(width)]


def _last_inputs(width, tokens):
    """Indices [B, W - 1] of the last real inputs, and a mask of those in the last document."""
    last = tokens.count + jnp.arange(width - 1)
    documents = jnp.pad(tokens.document, ((0, 0), (width - 1, 0)))
    document = jnp.take_along_axis(documents, last, axis=1)
    return last, document == tokens.document[:, -1:]
