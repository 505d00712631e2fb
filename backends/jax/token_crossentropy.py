"""loss = log Σ_v exp(logits_v) - logits_token.

Residuals are the logits in their own dtype, and the largest logit and the sum of each token; JAX's
own derivative would save the softmax in float32. XLA casts the logits as it reads them, so only
their gradient is written at their size (except for 16-bit logits on a CPU).
"""

import jax.numpy as jnp

from ._common import accumulation_dtype
from ._operation import token_wise_kernel


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


token_crossentropy = token_wise_kernel("token_crossentropy", forward, backward)


def _label_mask(logits, tokens):
    """Mask of the label's logit."""
    return jnp.arange(logits.shape[-1]) == tokens[..., None]


def _nan_where_unknown(losses, logits, tokens):
    return jnp.where((tokens >= 0) & (tokens < logits.shape[-1]), losses, jnp.nan)
