"""losses = log Σ_v exp(z_v) - z_token of the logits z = x E^T, or with a cap c tanh(x E^T / c).

`token_crossentropy` of logits computed from hidden states and embeddings.
"""

import numpy as np

from . import token_crossentropy as of_logits
from ._common import cast, product


def linear_crossentropy(
    x, embedding, tokens, sample_weight=None, soft_cap=None, reduction="sum", dtype=np.float64
):
    """x: [..., D]; embedding: [V, D]; tokens, sample_weight: [...].

    Returns (losses times their weights, [...] or their sum; the token of the largest logit [...]).
    """
    logits, tokens, weights = _prepared(x, embedding, tokens, sample_weight, soft_cap, dtype)
    losses = weights * of_logits.token_crossentropy(logits, tokens, dtype)
    return np.sum(losses) if reduction == "sum" else losses, np.argmax(logits, axis=-1)


def linear_crossentropy_gradient(
    d_output,
    x,
    embedding,
    tokens,
    sample_weight=None,
    soft_cap=None,
    reduction="sum",
    dtype=np.float64,
):
    """Returns the gradients of x and embedding, None for tokens, then that of weights, if any.

    d_output: the gradient of the losses or of their sum.
    """
    logits, tokens, weights = _prepared(x, embedding, tokens, sample_weight, soft_cap, dtype)
    x, embedding, d_output = cast(dtype, x, embedding, d_output)
    d_output = np.broadcast_to(d_output, tokens.shape)
    d_logits, _ = of_logits.token_crossentropy_gradient(weights * d_output, logits, tokens, dtype)
    if soft_cap is not None:
        d_logits = d_logits * (1 - (logits / soft_cap) ** 2)
    rows = d_logits.reshape(-1, len(embedding)), x.reshape(-1, x.shape[-1])
    d_embedding = product(rows[0].T, rows[1])
    d_weight = None
    if sample_weight is not None:
        d_weight = of_logits.token_crossentropy(logits, tokens, dtype) * d_output
    return product(d_logits, embedding), d_embedding, None, d_weight


def _prepared(x, embedding, tokens, sample_weight, soft_cap, dtype):
    """Logits, tokens (0 where the weight is 0), and weights."""
    x, embedding = cast(dtype, x, embedding)
    logits = product(x, embedding.T)
    if soft_cap is not None:
        logits = soft_cap * np.tanh(logits / soft_cap)
    tokens = np.asarray(tokens)
    if sample_weight is None:
        return logits, tokens, np.ones(tokens.shape, dtype)
    (weights,) = cast(dtype, sample_weight)
    return logits, np.where(weights == 0, 0, tokens), weights
