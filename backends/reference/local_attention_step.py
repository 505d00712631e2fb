"""A decoding step of sliding-window attention.  De et al. 2024, arXiv:2402.19427.

    q = rotate(q, p) / sqrt(K),  k = rotate(k, p)      p: the token's position in its document
    o = Σ_s softmax_s(q · k_s) v_s                     p - window < s <= p

`rotate` rotates channels j and j + R by frequencies_j p radians (arXiv:2104.09864).
"""

import numpy as np

from ..constants import STARTS
from ._common import cast
from .sliding_window_attention import sliding_window_attention


def local_attention_step(
    q,
    k,
    v,
    key,
    value,
    position,
    frequencies=None,
    token_kind=None,
    sliding_window=None,
    dtype=np.float64,
):
    """q: [B, H, K]; k: [B, G, K]; v: [B, G, V]; key, value: [B, C, G, ...]; position: [B].

    frequencies: [R] or None. Returns (o [B, H, V], the next key and value).
    """
    q, k, v, key, value = cast(dtype, q, k, v, key, value)
    kinds = None
    if token_kind is not None:
        kinds = np.asarray(token_kind)[:, None]
        position = np.where(kinds[:, 0] == STARTS, 0, position)
    if frequencies is not None:
        q, k = (_rotated(x, position, np.asarray(frequencies, dtype)) for x in (q, k))
    q = q / np.sqrt(q.dtype.type(q.shape[2]))
    state = {"key": key, "value": value, "position": position}
    output, state = sliding_window_attention(
        q[:, None], k[:, None], v[:, None], sliding_window, state, kinds, dtype=dtype
    )
    return output[:, 0], state["key"], state["value"]


def _rotated(x, position, frequencies):
    half = len(frequencies)
    angle = np.asarray(position, x.dtype)[:, None, None] * frequencies
    a, b = x[..., :half], x[..., half : 2 * half]
    turned = a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)
    return np.concatenate((*turned, x[..., 2 * half :]), axis=2)
