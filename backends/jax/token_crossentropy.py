"""loss = log Σ_v exp(logits_v) - logits_token.

Residuals are the logits in their own dtype, and the largest logit and the sum of each token; JAX's
own derivative would save the softmax in float32. XLA casts the logits as it reads them, so only
their gradient is written at their size (except for 16-bit logits on a CPU).
"""

import jax
import jax.numpy as jnp

from ._common import accumulation_dtype


def forward(logits, tokens):
    """Returns losses, largest logits and Σ_v exp(logits_v - largest) of each token."""
    dtype = accumulation_dtype(logits)
    largest = jnp.max(logits, axis=-1).astype(dtype)
    total = jnp.sum(jnp.exp(logits.astype(dtype) - largest[..., None]), axis=-1)
    index = jnp.clip(tokens, 0, logits.shape[-1] - 1)[..., None]
    label_logits = jnp.take_along_axis(logits, index, axis=-1)[..., 0].astype(dtype)
    losses = _nan_where_unknown(jnp.log(total) + (largest - label_logits), logits, tokens)
    return losses, largest, total


def backward(logits, tokens, _, largest, total, d_losses):
    d_losses = _nan_where_unknown(d_losses, logits, tokens)[..., None]
    softmax = jnp.exp(logits.astype(total.dtype) - largest[..., None]) / total[..., None]
    d_logits = (softmax - _label_mask(logits, tokens)) * d_losses
    return d_logits.astype(logits.dtype), None


def operation(forward, backward):
    """Builds the operation from passes with the parameters of `forward` and `backward`."""

    @jax.custom_vjp
    def run(logits, tokens):
        return forward(logits, tokens)[0]

    def save(logits, tokens):
        losses, *sums = forward(logits, tokens)
        return losses, (logits, tokens, *sums)

    def gradients(saved, d_losses):
        # Without the barrier XLA would share the exponentials with the forward pass and save them.
        logits, tokens, *sums = jax.lax.optimization_barrier(saved)
        return backward(logits, tokens, None, *sums, d_losses)

    run.defvjp(save, gradients)

    @jax.jit
    def token_crossentropy(logits, tokens):
        """logits: [..., V]; tokens: [...], integers.

        Returns [...] in float32, or float64 if logits are float64; NaN for a token not in 0..V-1.
        """
        return run(logits, tokens.astype(int))

    return token_crossentropy


token_crossentropy = operation(forward, backward)


def _label_mask(logits, tokens):
    """Mask of the label's logit."""
    return jnp.arange(logits.shape[-1]) == tokens[..., None]


def _nan_where_unknown(losses, logits, tokens):
    return jnp.where((tokens >= 0) & (tokens < logits.shape[-1]), losses, jnp.nan)
