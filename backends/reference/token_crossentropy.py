"""loss = log Σ_v exp(logits_v) - logits_token.

With the largest logit taken out of the sum: beside it nothing overflows, and where logits are far
from 0, their differences keep the digits that a logarithm of the sum would lose.
"""

import numpy as np

from keras_recurrent.backends.reference._common import prepare


def token_crossentropy(logits, tokens, dtype=np.float64):
    """logits: [..., V]; tokens: [...], integers. Returns [...], NaN for a token that is none."""
    (logits,) = prepare(dtype, logits)
    largest, _, total = _sums(logits)
    own = np.take_along_axis(logits, _place(logits, tokens), axis=-1)
    losses = np.log(total) + (largest - own)
    return np.where(_known(logits, tokens), losses[..., 0], np.nan)


def token_crossentropy_gradient(d_output, logits, tokens, dtype=np.float64):
    """Returns the gradients of logits, NaN in the row of a token that is none, and of tokens."""
    logits, d_output = prepare(dtype, logits, d_output)
    _, exponentials, total = _sums(logits)
    d_output = np.where(_known(logits, tokens), d_output, np.nan)[..., None]
    own = np.arange(logits.shape[-1]) == _place(logits, tokens)
    return (exponentials / total - own) * d_output, None


def _sums(logits):
    """The largest of a row, exp(logits - largest), and the sum of that."""
    largest = np.max(logits, axis=-1, keepdims=True)
    exponentials = np.exp(logits - largest)
    return largest, exponentials, np.sum(exponentials, axis=-1, keepdims=True)


def _known(logits, tokens):
    return (tokens >= 0) & (tokens < logits.shape[-1])


def _place(logits, tokens):
    """Where the token's logit is; anywhere in the row of a token that is none."""
    return np.clip(np.asarray(tokens, np.int64), 0, logits.shape[-1] - 1)[..., None]
