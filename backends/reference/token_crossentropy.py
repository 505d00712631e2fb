"""loss = log Σ_v exp(logits_v) - logits_token.

The largest logit is subtracted first, so that nothing overflows. It is added to the label's
logit, since adding it to the logarithm of the sum would lose digits.
"""

import numpy as np

from ._common import cast


def token_crossentropy(logits, tokens, dtype=np.float64):
    """logits: [..., V]; tokens: [...], integers. Returns [...], NaN for a token not in 0..V-1."""
    (logits,) = cast(dtype, logits)
    largest, _, total = _sums(logits)
    label_logits = np.take_along_axis(logits, _token_index(logits, tokens), axis=-1)
    losses = np.log(total) + (largest - label_logits)
    return np.where(_is_in_vocabulary(logits, tokens), losses[..., 0], np.nan)


def token_crossentropy_gradient(d_output, logits, tokens, dtype=np.float64):
    """Returns the gradient of logits, and None for tokens.

    The gradient is NaN for a token that is not in 0..V-1.
    """
    logits, d_output = cast(dtype, logits, d_output)
    _, exponentials, total = _sums(logits)
    d_output = np.where(_is_in_vocabulary(logits, tokens), d_output, np.nan)[..., None]
    label_mask = np.arange(logits.shape[-1]) == _token_index(logits, tokens)
    return (exponentials / total - label_mask) * d_output, None


def _sums(logits):
    """The largest logit of each token, exp(logits - largest), and the sum of these."""
    largest = np.max(logits, axis=-1, keepdims=True)
    exponentials = np.exp(logits - largest)
    return largest, exponentials, np.sum(exponentials, axis=-1, keepdims=True)


def _is_in_vocabulary(logits, tokens):
    return (tokens >= 0) & (tokens < logits.shape[-1])


def _token_index(logits, tokens):
    """The tokens as indices of their logits, clipped to the vocabulary."""
    return np.clip(np.asarray(tokens, np.int64), 0, logits.shape[-1] - 1)[..., None]
