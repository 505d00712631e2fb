"""Kinds of tokens: combines masks, packed documents and states into one number per token.

Python operators combine numbers and tensors in this file: on torch, functions of `keras.ops` would
copy each number to the GPU and synchronize.
"""

import keras
from keras import ops

from keras_recurrent import dispatch
from keras_recurrent.backends.constants import PADDING, STARTS
from keras_recurrent.checks.dtypes import check_dtype, dtype_of
from keras_recurrent.checks.shapes import check_rank_known, fits
from keras_recurrent.ops.operation import convert, symbolic


@keras.saving.register_keras_serializable(package="keras_recurrent")
class TokenKind(keras.Operation):
    """Node of a Keras graph that computes `token_kind`."""

    def call(self, like, **tokens):
        return token_kind(like, **tokens)

    def rematerialized_call(self, call, *args, **kwargs):
        return call  # it has no gradient

    def compute_output_spec(self, like, **tokens):
        return keras.KerasTensor(like.shape[:2], "int8")


def token_kind(like, mask=None, segment_ids=None, previous_segment_id=None, initial_state=None):
    """Returns the kind of each token: 0 continues a document, 1 starts one, 2 is padding.

    A token starts a document if the real token before it has another segment, or if there is no
    real token before it, in the sequence or in the state. Implementations get masks and segments
    only in this form. It can be computed once and passed to several operations on the same tokens.

    Args:
        like: a tensor `[B, T, ...]`, of which only the shape is used.
        mask: boolean `[B, T]`, or integers, False or 0 at padding; None: all tokens are real.
        segment_ids: integers `[B, T]`, at least 0, one number per document; None: one document,
            that of `previous_segment_id` if this is at least 0. Values are not checked. As -1 is
            the segment before all tokens, tokens of -1 at the start of a sequence continue a
            document. Values at padding are arbitrary.
        previous_segment_id: int32 `[B]`, the segment of the last real token before the sequence,
            -1 if there is none. None: -1 if `initial_state` is also None, else the segment of the
            first real token of the sequence, which then continues from the state.
        initial_state: the state before the sequence, or None; its values are not used.

    Returns:
        int8 `[B, T]`.

    Raises:
        ValueError: `like` has fewer than two axes, or an argument has another batch or time or an
            unsupported dtype.

    Example:

    >>> import keras
    >>> import numpy as np
    >>> from keras_recurrent.ops import token_kind
    >>> x = np.zeros((1, 5, 2))
    >>> mask = np.array([[False, True, True, True, True]])
    >>> kinds = token_kind(x, mask, segment_ids=np.array([[0, 0, 0, 1, 1]]))
    >>> keras.ops.convert_to_numpy(kinds)
    array([[2, 1, 0, 1, 0]], dtype=int8)
    """
    tokens = convert(
        "token_kind",
        {"mask": mask, "segment_ids": segment_ids, "previous_segment_id": previous_segment_id},
    )
    _check(tokens, like)
    if symbolic({"like": like, "initial_state": initial_state}, tokens):
        return TokenKind().symbolic_call(like, **tokens, initial_state=initial_state)
    mask, segment_ids, previous = tokens.values()
    return kinds_of_tokens(like, mask, segment_ids, previous, initial_state)


def kinds_of_tokens(like, mask=None, segment_ids=None, previous=None, initial_state=None):
    """Computes `token_kind` for tensors that are checked and not symbolic."""
    shards = dispatch.active_shards()
    if shards is not None:
        return shards.run_whole(
            lambda like, mask, segments: kinds_of_whole_sequences(
                like, mask, segments, previous, initial_state
            ),
            *(like, mask, segment_ids),
        )
    return kinds_of_whole_sequences(like, mask, segment_ids, previous, initial_state)


def kinds_of_whole_sequences(like, mask, segment_ids, previous, initial_state):
    if previous is not None:
        previous = ops.cast(previous, "int32")
    elif initial_state is None:
        if mask is None and segment_ids is None and _assigns_in_place():
            kind = ops.zeros(like.shape[:2], "int8")
            kind[:, :1] = STARTS
            return kind
        previous = -ops.ones(ops.shape(like)[:1], "int32")
    if segment_ids is not None:
        return _kinds_by_segments(like, mask, ops.cast(segment_ids, "int32"), previous)
    return _kinds_in_one_document(like, mask, previous)


def _kinds_in_one_document(like, mask, previous):
    """Computes kinds without segments: only the first real token of a sequence may be a start."""
    batch, length = ops.shape(like)[:2]
    starts = None if previous is None else previous < 0
    if mask is None and starts is not None and like.shape[1] == 1:
        return ops.cast(starts, "int8")[:, None]  # a decoding step: one comparison
    if mask is None:
        real = ops.ones((batch, length), "bool")
    else:
        real = ops.cast(mask, "bool")
    if mask is None and not dispatch.exports():
        first = ops.arange(length, dtype="int32")[None] == 0
    else:  # exporters support sums, but not all support a range of unknown length
        first = ops.cumsum(ops.cast(real, "int32"), axis=1) == 1
    starts = ops.zeros_like(real) if starts is None else real & first & starts[:, None]
    return _kinds(starts, real)


def _assigns_in_place():
    return dispatch.BACKEND == "torch" and not dispatch.exports()


def _kinds_by_segments(like, mask, segment_ids, previous):
    """Computes kinds with segments: a start if the real token before has another segment."""
    batch, length = ops.shape(like)[:2]
    segments = segment_ids
    if mask is not None:
        # Real tokens first, in their order.
        real = ops.cast(mask, "bool")
        index, ones = ops.arange(0, length, dtype="int32")[None], ops.cast(real, "int32")
        order = ops.argsort(index - length * ones, axis=1)
        segments = ops.take_along_axis(segments, order, axis=1)
    else:
        real = ops.ones((batch, length), "bool")
    previous = segments[:, :1] if previous is None else previous[:, None]
    # The segment of the real token before each token.
    before = ops.concatenate([previous, segments[:, :-1]], axis=1)
    if mask is not None:
        # Its index is the number of real tokens before each token.
        before = ops.take_along_axis(before, ops.cumsum(ones, axis=1) - ones, axis=1)
    return _kinds(real & ops.not_equal(segment_ids, before), real)


def _kinds(starts, real):
    return ops.cast(starts, "int8") * STARTS + ops.cast(~real, "int8") * PADDING


def _check(tokens, like):
    for name, tensor in {"like": like, **tokens}.items():
        check_rank_known("token_kind", name, tensor)
    if len(like.shape) < 2:
        raise ValueError(
            f"`token_kind`: `like` must have the shape [batch, time, ...]; got {tuple(like.shape)}."
        )
    for name, tensor in tokens.items():
        if tensor is None:
            continue
        check_dtype("token_kind", name, dtype_of(tensor))
        wanted = tuple(like.shape[: 1 if name == "previous_segment_id" else 2])
        if not fits(tensor.shape, wanted):
            raise ValueError(
                f"`token_kind`: `{name}` must have the shape {wanted}, the first axes of `like`; "
                f"got {tuple(tensor.shape)}."
            )
