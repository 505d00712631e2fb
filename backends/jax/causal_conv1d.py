"""y_t = bias + sum_j kernel[j] * x_{t-W+1+j}: one filter a channel, over a document's real tokens.

De et al. 2024, arXiv:2402.19427, section 2.3 (the temporal convolution before the recurrence).

Padding may be anywhere in a sequence, and the filter skips it. So the real tokens are first moved
to the front, where the filter is a sum of shifted sequences, and the outputs are moved back. The
backward pass recomputes the argument of the activation.
"""

import functools

import jax
import jax.numpy as jnp

from ._common import (
    default_zero_state,
    default_zero_state_gradient,
    scaled,
    sigmoid,
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
        masks = _document_masks(document, document_chunk, start, window)
        return carry, (_filtered(masks, activation, inputs, window, bias).astype(x.dtype),)

    _, (output,) = scan_chunks(step, (), (real_first, document), min_tokens=window.shape[0])
    if tokens is None:
        whole = jnp.concatenate([initial_state, x[:, -window.shape[0] :].astype(dtype)], axis=1)
        return output, whole[:, whole.shape[1] - initial_state.shape[1] :]
    return tokens.put_back(output), _last_inputs(initial_state, real_first.astype(dtype), tokens)


@default_zero_state_gradient
def backward(x, kernel, bias, initial_state, token_kind, _, d_output, d_final, activation=None):
    dtype, width = initial_state.dtype, kernel.shape[0]
    tokens, window = _tokens(token_kind), kernel.astype(dtype)
    real_first, document = _to_front(x, tokens)
    d_real_first, _ = _to_front(d_output, tokens)

    def step(carry, start, x_chunk, document_chunk, d_y):
        # d_next: the gradient of the last inputs, from the following chunk.
        d_next, d_parameters = carry
        masks = _document_masks(document, document_chunk, start, window)
        inputs = _inputs(real_first, x_chunk, start, initial_state)
        run = functools.partial(_filtered, masks, activation)
        _, pull_back = jax.vjp(run, inputs, *parameters)
        d_inputs, *added = pull_back(d_y.astype(dtype))
        d_inputs += jnp.pad(d_next, ((0, 0), (x_chunk.shape[1], 0), (0, 0)))
        d_parameters = jax.tree.map(jnp.add, d_parameters, added)
        return (d_inputs[:, : width - 1], d_parameters), (d_inputs[:, width - 1 :].astype(x.dtype),)

    parameters = [window] if bias is None else [window, bias.astype(dtype)]
    d_next = d_final if tokens is None else jnp.zeros_like(d_final)
    chunks = real_first, document, d_real_first
    carry = d_next, jax.tree.map(jnp.zeros_like, parameters)
    (d_initial, (d_window, *d_bias)), (d_x,) = scan_chunks(
        step, carry, chunks, reverse=True, min_tokens=width
    )
    if tokens is not None:
        inputs = initial_state, real_first.astype(dtype)
        _, pull_back = jax.vjp(lambda state, x: _last_inputs(state, x, tokens), *inputs)
        d_initial, d_x = map(jnp.add, (d_initial, d_x), pull_back(d_final))
        d_x = tokens.put_back(d_x).astype(x.dtype)
    d_bias = d_bias[0].astype(bias.dtype) if d_bias else None
    return d_x, d_window.astype(kernel.dtype), d_bias, d_initial, None


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


def _filtered(document_masks, activation, inputs, window, bias=None):
    """Returns the filtered and activated chunk [B, C, D]; inputs [B, W - 1 + C, D] end with it."""
    length = inputs.shape[1] - window.shape[0] + 1
    output = sum(
        scaled(window[j], jnp.where(same, inputs[:, j : j + length], 0))
        for j, same in enumerate(document_masks)
    )
    if bias is not None:
        output += scaled(bias.astype(window.dtype), jnp.ones_like(output))
    return output * sigmoid(output) if activation == "silu" else output


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


def _last_inputs(initial_state, real_first, tokens):
    """Returns the state after the tokens: the last W - 1 inputs, 0 if of another document.

    The inputs in the initial state belong to document 0.
    """
    width = initial_state.shape[1]
    last = tokens.count + jnp.arange(width)
    documents = jnp.pad(tokens.document, ((0, 0), (width, 0)))
    document = jnp.take_along_axis(documents, last, axis=1)
    whole = jnp.concatenate([initial_state, real_first], axis=1)
    return take(whole, last, document == tokens.document[:, -1:])
