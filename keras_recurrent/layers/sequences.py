"""What a layer returns of its outputs over time."""

from keras import ops

from keras_recurrent import dispatch
from keras_recurrent.devices import split_time
from keras_recurrent.portable import sequences as portable


def reverse(*tensors):
    """Each tensor `[B, T, ...]` from its last token to its first; None stays None."""
    split_time.check_not_split("`go_backwards=True`")
    return tuple(None if x is None else ops.flip(x, axis=1) for x in tensors)


def last_real(tensors, mask):
    """Each tensor `[B, T, ...]` at the last real token of each row, `[B, 1, ...]`.

    mask: boolean `[B, T]`; None: all tokens are real. In a row without a real token, what comes
    is not one.
    """
    if mask is None:
        return tuple(x[:, -1:] for x in tensors)
    if dispatch.exports():
        return tuple(portable.last_real(x, mask) for x in tensors)
    place = ops.arange(0, ops.shape(mask)[1], dtype="int32")[None]
    last = ops.argmax(place * ops.cast(mask, "int32"), axis=1)[:, None]
    return tuple(_at(x, last) for x in tensors)


def where_any_real(output, mask, otherwise):
    """`[B, D]`: output where a row has a real token, else `otherwise`; None: 0."""
    if mask is None:
        return output
    return _where(ops.any(mask, axis=1)[:, None], output, otherwise)


def zero_padding(output, mask):
    """Outputs `[B, T, D]` with 0 at padding."""
    return _where(mask[..., None], output, None)


def repeat_over_padding(output, mask, before):
    """Outputs `[B, T, D]` whose padding repeats the last real output.

    before: `[B, D]`, what stands at padding in front of a row's first real token; None: 0.
    """
    split_time.check_not_split("`zero_output_for_mask=False`")
    if dispatch.exports():
        return portable.repeat_over_padding(output, mask, before)
    length, real = ops.shape(mask)[1], ops.cast(mask, "int32")
    count = ops.cumsum(real, axis=1)  # the real tokens up to each
    # The places of real tokens in their order, then those of padding.
    order = ops.argsort(ops.arange(0, length, dtype="int32")[None] - length * real, axis=1)
    place = ops.take_along_axis(order, ops.relu(count - 1), axis=1)
    before = None if before is None else before[:, None]
    return _where((count > 0)[..., None], _at(output, place), before)


def _at(x, places):
    """x `[B, T, ...]` at places `[B, N]` of its second axis, `[B, N, ...]`."""
    for _ in x.shape[2:]:
        places = places[..., None]
    return ops.take_along_axis(x, places, axis=1)


def _where(condition, x, otherwise):
    return ops.where(condition, x, ops.zeros_like(x) if otherwise is None else otherwise)
