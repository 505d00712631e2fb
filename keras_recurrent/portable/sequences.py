"""What `keras_recurrent.layers.sequences` does, without sorting and without looking up places."""

from keras import ops

from keras_recurrent.portable._scan import scan


def last_real(x, mask):
    """x [B, T, ...] at the last real token of each row, [B, 1, ...]; mask: boolean [B, T]."""
    count = ops.cumsum(ops.cast(mask, "int32"), axis=1)
    last = mask & ops.equal(count, count[:, -1:])
    return ops.sum(ops.where(_with_axes_of(x, last), x, ops.zeros_like(x)), axis=1, keepdims=True)


def repeat_over_padding(output, mask, before):
    """[B, T, D], whose padding repeats the last real output; before: [B, D], or None for 0."""
    if before is None:
        before = ops.zeros_like(output[:, 0])
    real = mask[..., None]
    repeats = ops.cast(~real, output.dtype)
    return scan(repeats, ops.where(real, output, ops.zeros_like(output)), before)


def _with_axes_of(x, mask):
    for _ in x.shape[2:]:
        mask = mask[..., None]
    return mask
