"""Portable `keras_recurrent.layers.sequences`, without sorting and gathering."""

from keras import ops

from keras_recurrent.portable._scan import scan


def last_real(x, mask):
    """Returns x [B, T, ...] at the last real token of each sequence, [B, 1, ...]. mask: [B, T]."""
    count = ops.cumsum(ops.cast(mask, "int32"), axis=1)
    last = mask & ops.equal(count, count[:, -1:])
    return ops.sum(ops.where(_expand_to(x, last), x, ops.zeros_like(x)), axis=1, keepdims=True)


def repeat_over_padding(output, mask, before):
    """Repeats the last real output [B, T, D] at padding. before: [B, D], or None for zeros."""
    if before is None:
        before = ops.zeros_like(output[:, 0])
    real = mask[..., None]
    repeats = ops.cast(~real, output.dtype)
    return scan(repeats, ops.where(real, output, ops.zeros_like(output)), before)


def _expand_to(x, mask):
    for _ in x.shape[2:]:
        mask = mask[..., None]
    return mask
