"""Rotary positions, and the positions that they need: of real tokens, in their document."""

from keras import ops

from keras_recurrent.ops.token_kind import PADDING, STARTS


def rotate(x, positions, max_wavelength, rotary_dim):
    """Turns pairs of channels by angles that grow with the position (RoPE, arXiv:2104.09864).

    Channel j below r / 2 and channel j + r / 2 are turned by position * max_wavelength^(-2j / r),
    where r is `rotary_dim`; channels from r on stay as they are.

    Args:
        x: `[B, T, heads, head_dim]`, float32 or float64, as the angles then are.
        positions: integers `[B, T]`.
        max_wavelength: number.
        rotary_dim: integer, even, at most head_dim.
    """
    half = rotary_dim // 2
    frequency = max_wavelength ** (-ops.arange(half, dtype=x.dtype) / max(half, 1))
    angle = ops.cast(positions, x.dtype)[:, :, None, None] * frequency
    cos, sin = ops.cos(angle), ops.sin(angle)
    a, b, rest = x[..., :half], x[..., half:rotary_dim], x[..., rotary_dim:]
    return ops.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def positions(inputs, kind, first):
    """The place of each real token in its document, int32 `[B, T]`; of no meaning at padding.

    Args:
        inputs: `[B, T, ...]`.
        kind: int8 `[B, T]`, as `keras_recurrent.ops.token_kind` gives it; None: all tokens are
            real, and of one document.
        first: int32 `[B]`, the place of a first token that goes on; None: 0.
    """
    batch, length = ops.shape(inputs)[:2]
    first = ops.zeros((batch,), "int32") if first is None else first
    if kind is None:
        return first[:, None] + ops.arange(length, dtype="int32")
    # Operators, not `ops`, where numbers meet tensors: see `token_kind`.
    starts = kind == STARTS
    nth = ops.cumsum(ops.cast(kind != PADDING, "int32"), axis=1) - 1
    document = ops.cumsum(ops.cast(starts, "int32"), axis=1)
    place = ops.arange(length, dtype="int32")[None]
    # The starts to the front, in their order; so the d-th is at place d - 1.
    order = ops.cast(ops.argsort(ops.where(starts, place, place + length), axis=1), "int32")
    start = ops.take_along_axis(
        ops.take_along_axis(nth, order, axis=1), ops.relu(document - 1), axis=1
    )
    return ops.where(document == 0, first[:, None] + nth, nth - start)
