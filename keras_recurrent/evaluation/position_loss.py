"""Loss of a language model as a function of the position in the text."""

import contextlib
from typing import NamedTuple

import keras
import numpy as np

from keras_recurrent.checks.arguments import check_positive_integer
from keras_recurrent.checks.shapes import check_per_token
from keras_recurrent.checks.token_ids import check_token_ids
from keras_recurrent.ops.token_crossentropy import token_crossentropy

TOKENS_PER_CALL = 1024  # tokens of a batch whose logits are in memory at a time


class LossByPosition(NamedTuple):
    """Result of `loss_by_position`.

    Attributes:
        loss: float64 `[T - 1]`, the mean loss at each position, in nats; NaN at positions without
            tokens. `loss[0]` is the loss of the second token, predicted from the first.
        num_texts: int64 `[T - 1]`, the number of texts in each mean.
    """

    loss: np.ndarray
    num_texts: np.ndarray

    @property
    def running_mean(self):
        """Mean loss of all tokens up to each position, float64 `[T - 1]`, in nats.

        This is the loss of texts of that length, the curve of Griffin's figures 5 and 10 (De et al.
        2024, arXiv:2402.19427). NaN before the first token.
        """
        total = np.cumsum(np.where(self.num_texts > 0, self.loss, 0.0) * self.num_texts)
        with np.errstate(invalid="ignore"):
            return total / np.cumsum(self.num_texts)


def loss_by_position(model, token_ids, padding_mask=None, batch_size=8):
    """Computes the loss of a language model at each position, averaged over texts.

    The loss is -log p(token t | tokens before t), from one forward pass over whole sequences. The
    curve falls for a model that uses distant tokens. It rises after the training length for a model
    that does not generalize to longer texts.

    Args:
        model: a language model of this package.
        token_ids: integers `[N, T]`, a NumPy array or convertible to one: N texts of up to T
            tokens, at least 2.
        padding_mask: boolean or integer `[N, T]`, False or 0 at padding. None: no padding. A token
            is counted if it and the one before it are real.
        batch_size: integer, sequences per forward pass. Memory in addition to the forward pass is
            that of the logits of 1,024 tokens, for any sequence length.

    Returns:
        A `LossByPosition`.

    Raises:
        TypeError: `model` is not a language model of this package.
        ValueError: `token_ids` are not integers `[N, T]` with T of at least 2, or are outside the
            vocabulary; the mask has another shape or leaves no token to count; `batch_size` is not
            an integer of at least 1.

    Example:

    >>> import numpy as np
    >>> from keras_recurrent.evaluation import loss_by_position
    >>> from keras_recurrent.models import GriffinCausalLM
    >>> model = GriffinCausalLM.from_preset("hawk_tiny", num_layers=1)
    >>> found = loss_by_position(model, np.full((3, 6), 100))
    >>> found.loss.shape, found.num_texts.tolist()
    ((5,), [3, 3, 3, 3, 3])
    >>> bool(np.isclose(found.running_mean[-1], found.loss.mean()))
    True
    """
    backbone = getattr(model, "backbone", None)
    if backbone is None or not hasattr(backbone, "hidden_states"):
        raise TypeError(
            "`model` must be a language model of keras_recurrent, such as "
            f"`keras_recurrent.models.GriffinCausalLM`; got {type(model).__name__}."
        )
    check_positive_integer("batch_size", batch_size)
    token_ids, mask = _check_inputs(token_ids, padding_mask, backbone.vocabulary_size)
    counts = mask[:, 1:] & mask[:, :-1]
    total = np.zeros(token_ids.shape[1] - 1)
    for first in range(0, len(token_ids), batch_size):
        rows = slice(first, first + batch_size)
        losses = _token_losses(
            backbone, token_ids[rows], mask[rows] if padding_mask is not None else None
        )
        total += np.where(counts[rows], losses, 0.0).sum(axis=0)
    count = counts.sum(axis=0)
    with np.errstate(invalid="ignore"):
        return LossByPosition(total / count, count)


def _check_inputs(token_ids, padding_mask, vocabulary_size):
    token_ids = np.asarray(keras.ops.convert_to_numpy(token_ids))
    if token_ids.ndim != 2 or token_ids.dtype.kind not in "iu" or token_ids.shape[1] < 2:
        raise ValueError(
            "`token_ids` must be integers [texts, tokens], with at least two tokens; got "
            f"{token_ids.dtype} of shape {token_ids.shape}."
        )
    mask = np.ones(token_ids.shape, bool)
    if padding_mask is not None:
        mask = np.asarray(keras.ops.convert_to_numpy(padding_mask))
        check_per_token("loss_by_position", "padding_mask", mask, token_ids.shape)
        mask = mask.astype(bool)
    check_token_ids("token_ids", token_ids, vocabulary_size, mask)
    if not (mask[:, 1:] & mask[:, :-1]).any():
        raise ValueError("`token_ids` and `padding_mask` leave no token that follows another.")
    return token_ids, mask


def _token_losses(backbone, token_ids, mask):
    """Returns losses, float64 [B, T - 1], with arbitrary values at padding."""
    chunks, size = [], max(1, TOKENS_PER_CALL // len(token_ids))
    with no_gradients():
        hidden, _ = backbone.hidden_states(
            keras.ops.convert_to_tensor(token_ids[:, :-1], "int32"),
            None if mask is None else keras.ops.convert_to_tensor(mask[:, :-1]),
        )
        for first in range(0, hidden.shape[1], size):
            logits = backbone.token_embedding(hidden[:, first : first + size], reverse=True)
            targets = token_ids[:, first + 1 : first + 1 + logits.shape[1]]
            if mask is not None:
                targets = np.where(mask[:, first + 1 : first + 1 + logits.shape[1]], targets, 0)
            losses = token_crossentropy(logits, keras.ops.convert_to_tensor(targets, "int32"))
            chunks.append(keras.ops.convert_to_numpy(losses).astype("float64"))
    return np.concatenate(chunks, axis=1)


def no_gradients():
    """Returns a context manager that disables gradients on torch."""
    if keras.config.backend() != "torch":
        return contextlib.nullcontext()
    import torch

    return torch.no_grad()
