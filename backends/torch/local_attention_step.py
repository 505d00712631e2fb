"""A token of softmax attention to a window of those before (arXiv:2402.19427)."""

import torch

from ..constants import STARTS
from ._common import accumulation_dtype
from .sliding_window_attention import sliding_window_attention


def local_attention_step(
    q, k, v, key, value, position, frequencies=None, token_kind=None, sliding_window=None
):
    """q: [B, H, K]; k: [B, G, K]; v: [B, G, V]; key, value: [B, C, G, ...]; position: [B].

    Returns (o [B, H, V], the next key and value).
    """
    dtype, kinds = accumulation_dtype(q, k, v, key, value), None
    if token_kind is not None:
        kinds = token_kind[:, None]
        position = position.masked_fill(token_kind == STARTS, 0)
    rotated_q, rotated_k = q.to(dtype), k.to(dtype)
    if frequencies is not None:
        angle = position.to(dtype)[:, None, None] * frequencies.to(dtype)
        rotated_q, rotated_k = (_rotated(x, angle) for x in (rotated_q, rotated_k))
    q, k = (rotated_q * q.shape[2] ** -0.5).to(q.dtype), rotated_k.to(k.dtype)
    state = {"key": key, "value": value, "position": position}
    q, k, v = q[:, None], k[:, None], v[:, None]
    output, state = sliding_window_attention(q, k, v, sliding_window, state, kinds)
    return output[:, 0], state["key"], state["value"]


def _rotated(x, angle):
    half, cos, sin = angle.shape[2], angle.cos(), angle.sin()
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=2)
