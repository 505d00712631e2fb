"""`hgrn2_step` from an older memory and the tokens since: writes the memory every N + 1 tokens.

    S_i = diag(f_i) S_{i-1} + k_i v_i^T    for i = 1, ..., n: the tokens after the stored memory S_0

`hgrn2_step` continues from S_n. If n < N, decay, key and value of its token are stored as number
n + 1, and n increases by one. If n = N, its memory is stored, and n becomes 0. Padding leaves all
of these unchanged.
"""

import numpy as np

from ..constants import CONTINUES, PADDING, STARTS
from ._common import cast
from ._matrix_state import forward
from .hgrn2_step import hgrn2_step, operands


def hgrn2_delayed_step(
    q,
    f,
    v,
    memory,
    recent,
    count,
    lower_bound=None,
    norm_scale=None,
    token_kind=None,
    dtype=np.float64,
):
    """q, f: [B, H K]; v: [B, H V]; memory: [B, H, K, V]; lower_bound: [2, H K] or None.

    recent: [B, N, H (2 K + V)], f_i, k_i and v_i, arbitrary after the first n; count: int32 [B], n;
    norm_scale: [H V] or None; token_kind: [B] or None. Returns (y [B, H V], the sums of squares of
    o in groups [B, H, ceil(V / 32)], count, memory, recent).
    """
    stored, recent = cast(dtype, memory, recent)
    (batch, heads, keys, _), limit = stored.shape, recent.shape[1]
    index = np.arange(limit)
    parts = np.split(recent, [heads * keys, 2 * heads * keys], axis=2)
    f_i, k_i, v_i = (x.reshape(batch, limit, heads, -1) for x in parts)
    kinds = np.where(index < count[:, None], CONTINUES, PADDING)
    _, memory = forward(k_i, k_i, v_i, f_i, stored, kinds)
    _, key, value, decay = operands(dtype, q, f, v, memory, lower_bound)
    if token_kind is not None:
        decay = np.where(np.asarray(token_kind)[:, None, None] == STARTS, 0, decay)
    y, squares, memory = hgrn2_step(
        q, f, v, memory, lower_bound, norm_scale, token_kind, dtype=dtype
    )
    real = np.ones(batch, bool) if token_kind is None else np.asarray(token_kind) != PADDING
    parts = [x.reshape(batch, 1, -1) for x in (decay, key, value)]
    token = np.concatenate(parts, axis=2)
    is_next = real[:, None] & (index == count[:, None])
    recent = np.where(is_next[..., None], token, recent)
    memory = np.where((real & (count == limit))[:, None, None, None], memory, stored)
    return y, squares, np.where(real, (count + 1) % (limit + 1), count), memory, recent
