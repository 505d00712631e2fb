"""Selection of the outputs over time that a layer returns."""

import math

from keras import ops

from keras_recurrent import dispatch
from keras_recurrent.ops.linear_scan import linear_scan


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
    count = ops.cumsum(ops.cast(mask, "int32"), axis=1)
    last = mask & ops.equal(count, count[:, -1:])
    return tuple(ops.sum(_where(_expand(last, x), x, None), axis=1, keepdims=True) for x in tensors)


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
    real = mask[..., None]
    zeros = ops.zeros_like(output)
    log_a = ops.where(real, ops.full_like(output, -math.inf), zeros)
    repeated, _ = linear_scan(ops.where(real, output, zeros), log_a, initial_state=before)
    return repeated


def _expand(mask, x):
    """Reshapes a mask `[B, T]` to as many dimensions as x."""
    return mask[(..., *[None] * (len(x.shape) - 2))]


def _where(condition, x, otherwise):
    return ops.where(condition, x, ops.zeros_like(x) if otherwise is None else otherwise)
