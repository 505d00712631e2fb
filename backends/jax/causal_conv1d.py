"""y_t = bias + sum_j kernel[j] * x_{t-W+1+j}: one filter a channel, over a document's real tokens.

De et al. 2024, arXiv:2402.19427, section 2.3 (the temporal convolution before the recurrence).

Padding may stand anywhere in a row, and the filter passes over it: the real tokens of a row are
first moved together, where the filter is a sum of shifts, and its outputs are moved back.
"""

import jax
import jax.numpy as jnp

from keras_recurrent.backends.jax._real_tokens import RealTokens, rows
from keras_recurrent.backends.jax._tokens import accumulate, first_state


def unsupported(x, kernel, bias=None, initial_state=None, token_kind=None):
    return None


@jax.jit
def causal_conv1d(x, kernel, bias=None, initial_state=None, token_kind=None):
    """x: [B, T, D]; kernel: [W, D]; bias: [D].

    Returns ([B, T, D] in x's dtype, the last W - 1 real inputs [B, W - 1, D] in float32).
    """
    dtype = accumulate(x, kernel, *([] if bias is None else [bias]))
    state_shape = (x.shape[0], kernel.shape[0] - 1, x.shape[2])
    initial_state = first_state(initial_state, state_shape, dtype)
    return _causal_conv1d(x, kernel, bias, initial_state, token_kind)


@jax.custom_vjp
def _causal_conv1d(x, kernel, bias, initial_state, token_kind):
    dtype = initial_state.dtype
    tokens = _tokens(token_kind)
    inputs, window = _inputs(x, initial_state, tokens), kernel.astype(dtype)
    output = sum(
        window[j] * jnp.where(met, inputs[:, j : j + x.shape[1]], 0)
        for j, met in enumerate(_same_document(tokens, kernel.shape[0]))
    )
    if bias is not None:
        output = output + bias.astype(dtype)
    if tokens is not None:
        output = tokens.back(output)
    # What reads the output several times should not convolve each time.
    output = jax.lax.optimization_barrier(output.astype(x.dtype))
    if tokens is None:
        return output, inputs[:, x.shape[1] :]
    last, met = _last(kernel.shape[0], tokens)
    return output, jnp.where(met, rows(inputs, last), 0)


def _forward(*arguments):
    return _causal_conv1d(*arguments), arguments


def _backward(arguments, d_outputs):
    x, kernel, bias, initial_state, token_kind = arguments
    dtype, width, length = initial_state.dtype, kernel.shape[0], x.shape[1]
    tokens = _tokens(token_kind)
    inputs, window = _inputs(x, initial_state, tokens), kernel.astype(dtype)
    d_output, d_final = d_outputs
    d_output = d_output.astype(dtype)
    if tokens is not None:
        d_output = tokens.together(d_output)

    if tokens is None:
        d_inputs = jnp.pad(d_final, ((0, 0), (length, 0), (0, 0)))
    else:
        last, met = _last(width, tokens)
        add = jax.vmap(lambda d, i, g: d.at[i].add(g))
        d_inputs = add(jnp.zeros_like(inputs), last, jnp.where(met, d_final, 0))
    d_kernel = []
    for j, met in enumerate(_same_document(tokens, width)):
        d_y = jnp.where(met, d_output, 0)
        d_kernel.append(jnp.sum(d_y * inputs[:, j : j + length], axis=(0, 1)))
        d_inputs = d_inputs.at[:, j : j + length].add(window[j] * d_y)

    d_x = d_inputs[:, width - 1 :]
    if tokens is not None:
        d_x = tokens.back(d_x)
    d_bias = None if bias is None else jnp.sum(d_output, axis=(0, 1)).astype(bias.dtype)
    return (
        d_x.astype(x.dtype),
        jnp.stack(d_kernel).astype(kernel.dtype),
        d_bias,
        d_inputs[:, : width - 1],
        None,
    )


_causal_conv1d.defvjp(_forward, _backward)


def _tokens(token_kind):
    return None if token_kind is None else RealTokens(token_kind)


def _inputs(x, initial_state, tokens):
    """[B, W - 1 + T, D]: what came before, then the real tokens."""
    x = x.astype(initial_state.dtype)
    return jnp.concatenate([initial_state, x if tokens is None else tokens.together(x)], axis=1)


def _documents(width, tokens):
    """The document of each of the inputs [B, W - 1 + T]; what came before is of document 0."""
    return jnp.pad(tokens.document, ((0, 0), (width - 1, 0)))


def _same_document(tokens, width):
    """For each weight, whether it meets an input of the token's own document."""
    if tokens is None:
        return [True] * width
    documents, length = _documents(width, tokens), tokens.document.shape[1]
    return [(documents[:, j : j + length] == tokens.document)[:, :, None] for j in range(width)]


def _last(width, tokens):
    """Places [B, W - 1] of the last real inputs, and whether they are of the last document."""
    last = tokens.count + jnp.arange(width - 1)
    document = jnp.take_along_axis(_documents(width, tokens), last, axis=1)
    return last, (document == tokens.document[:, -1:])[:, :, None]
