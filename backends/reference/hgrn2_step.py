"""A decoding step of HGRN2, from its three projections.  Qin et al. 2024, arXiv:2404.07904.

    S' = diag(f) S + (1 - f) v^T,  f = β + (1 - β) σ(f logits)
    o = S'^T silu(q) K^(-1/2),  y = norm_scale * o

At the start of a document S is 0; padding leaves S unchanged.
"""

import numpy as np

from ..constants import SQUARES_GROUP
from ._common import cast, group_squares, sigmoid
from ._matrix_state import forward


def hgrn2_step(
    q, f, v, memory, lower_bound=None, norm_scale=None, token_kind=None, dtype=np.float64
):
    """q, f: [B, H K]; v: [B, H V]; memory: [B, H, K, V]; lower_bound: [2, H K] or None.

    norm_scale: [H V] or None; token_kind: [B] or None. Returns (y [B, H V], the sums of squares of
    o in groups [B, H, ceil(V / 32)], memory).
    """
    token = operands(dtype, q, f, v, memory, lower_bound)
    query, key, value, decay = (x[:, None] for x in token)
    kinds = None if token_kind is None else np.asarray(token_kind)[:, None]
    o, memory = forward(query, key, value, decay, memory, kinds)
    o = o[:, 0]
    y = o.reshape(len(o), -1)
    if norm_scale is not None:
        y = y * cast(dtype, norm_scale)[0]
    return y, group_squares(o, SQUARES_GROUP), memory


def operands(dtype, q, f, v, memory, lower_bound):
    """The query, the key, the value and the decay of the memory, by heads."""
    q, f, v = cast(dtype, q, f, v)
    batch, heads, keys, _ = memory.shape
    rest = 1.0 if lower_bound is None else np.exp(cast(dtype, lower_bound)[0][1])
    bound = 0.0 if lower_bound is None else np.exp(cast(dtype, lower_bound)[0][0])
    forgets, decay = rest * sigmoid(-f), bound + rest * sigmoid(f)
    # Rounded β and 1 - β do not add up to 1; β may be NaN.
    decay = np.where((forgets <= 0.5) & ~np.isnan(decay), 1 - forgets, decay)
    q = q * sigmoid(q) * keys**-0.5
    return [x.reshape(batch, heads, -1) for x in (q, forgets, v, decay)]
