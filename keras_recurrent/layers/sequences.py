"""Selection of the outputs over time that a layer returns."""

from keras import ops

from keras_recurrent import dispatch
from keras_recurrent.portable import sequences as portable


def reverse(*tensors):
    """Reverses tensors `[B, T, ...]` over time; None stays None."""
    dispatch.check_not_split("`go_backwards=True`")
    return tuple(None if x is None else ops.flip(x, axis=1) for x in tensors)


def last_real(tensors, mask):
    """Returns tensors `[B, T, ...]` at the last real token of each sequence, `[B, 1, ...]`.

    mask: boolean `[B, T]`; None: all tokens are real. For a sequence without a real token, the
    result is arbitrary.
    """
    if mask is None:
        return tuple(x[:, -1:] for x in tensors)
    if dispatch.exports():
        return tuple(portable.last_real(x, mask) for x in tensors)
    index = ops.arange(0, ops.shape(mask)[1], dtype="int32")[None]
    last = ops.argmax(index * ops.cast(mask, "int32"), axis=1)[:, None]
    return tuple(_take_tokens(x, last) for x in tensors)


def where_any_real(output, mask, otherwise):
    """Returns `output` `[B, D]` for sequences with a real token, else `otherwise` (None: 0)."""
    if mask is None:
        return output
    return _where(ops.any(mask, axis=1)[:, None], output, otherwise)


def zero_padding(output, mask):
    """Returns outputs `[B, T, D]` with 0 at padding."""
    return _where(mask[..., None], output, None)


def repeat_over_padding(output, mask, before):
    """Repeats the last real output `[B, T, D]` at padding.

    before: `[B, D]`, the output at padding before the first real token of a sequence; None: 0.
    """
    dispatch.check_not_split("`zero_output_for_mask=False`")
    if dispatch.exports():
        return portable.repeat_over_padding(output, mask, before)
    length, real = ops.shape(mask)[1], ops.cast(mask, "int32")
    count = ops.cumsum(real, axis=1)  # real tokens up to and including each token
    # Indices of real tokens in their order, then those of padding.
    order = ops.argsort(ops.arange(0, length, dtype="int32")[None] - length * real, axis=1)
    last = ops.take_along_axis(order, ops.relu(count - 1), axis=1)
    before = None if before is None else before[:, None]
    return _where((count > 0)[..., None], _take_tokens(output, last), before)


def _take_tokens(x, indices):
    """Gathers tokens of x `[B, T, ...]` by indices `[B, N]`; returns `[B, N, ...]`."""
    for _ in x.shape[2:]:
        indices = indices[..., None]
    return ops.take_along_axis(x, indices, axis=1)


def _where(condition, x, otherwise):
    return ops.where(condition, x, ops.zeros_like(x) if otherwise is None else otherwise)
