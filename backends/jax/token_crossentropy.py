"""loss = log Σ_v exp(logits_v) - logits_token.

For the backward pass the logits are kept in their own dtype, with the largest logit and the sum of
each row; JAX's own derivative would keep the softmax in float32. XLA casts the logits as it reads
them, so nothing of their size is written but their gradient (logits of 16 bits on a CPU excepted).
"""

import jax
import jax.numpy as jnp

from keras_recurrent.backends.jax._common import accumulation_dtype


@jax.jit
def token_crossentropy(logits, tokens):
    """logits: [..., V]; tokens: [...], integers.

    Returns [...] in float32, or float64 if logits are float64; NaN for a token not in 0..V-1.
    """
    return _losses(logits, tokens.astype(int))


@jax.custom_vjp
def _losses(logits, tokens):
    return _forward(logits, tokens)[0]


def _forward(logits, tokens):
    dtype = accumulation_dtype(logits)
    largest = jnp.max(logits, axis=-1).astype(dtype)
    total = jnp.sum(jnp.exp(logits.astype(dtype) - largest[..., None]), axis=-1)
    place = jnp.clip(tokens, 0, logits.shape[-1] - 1)[..., None]
    own = jnp.take_along_axis(logits, place, axis=-1)[..., 0].astype(dtype)
    losses = _nan_where_unknown(jnp.log(total) + (largest - own), logits, tokens)
    return losses, (logits, tokens, largest, total)


def _backward(saved, d_losses):
    # Without the barrier XLA would share the exponentials with the forward pass, and keep them.
    logits, tokens, largest, total = jax.lax.optimization_barrier(saved)
    d_losses = _nan_where_unknown(d_losses, logits, tokens)[..., None]
    softmax = jnp.exp(logits.astype(total.dtype) - largest[..., None]) / total[..., None]
    d_logits = (softmax - _own(logits, tokens)) * d_losses
    return d_logits.astype(logits.dtype), None


_losses.defvjp(_forward, _backward)


def _own(logits, tokens):
    """True at the token's logit."""
    return jnp.arange(logits.shape[-1]) == tokens[..., None]


def _nan_where_unknown(losses, logits, tokens):
    return jnp.where((tokens >= 0) & (tokens < logits.shape[-1]), losses, jnp.nan)
