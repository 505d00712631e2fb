"""A decoding step of sliding-window attention.  De et al. 2024, arXiv:2402.19427.

    q = rotate(norm(q), p) query_scale,  k = rotate(norm(k), p)
    o = Σ_s softmax_s(q · k_s) v_s                               p - window < s <= p
    y = σ(output_gate) * o

p is the token's position in its document. `rotate` rotates channels j and j + R by frequencies_j p
radians (arXiv:2104.09864). With scales, `norm` is RMSNorm over the K channels of a head; otherwise
it is the identity. `query_scale` is 1 / sqrt(K) by default. With `logit_scaling`, a, q is also
multiplied by ln(p + a) / ln(floor(a)).
"""

import numpy as np

from ..constants import STARTS
from ._common import cast, sigmoid
from ._heads import prepare_heads
from .sliding_window_attention import sliding_window_attention


def local_attention_step(
    q,
    k,
    v,
    key,
    value,
    position,
    frequencies=None,
    q_scale=None,
    k_scale=None,
    output_gate=None,
    token_kind=None,
    sliding_window=None,
    epsilon=None,
    query_scale=None,
    logit_scaling=None,
    dtype=np.float64,
):
    """q: [B, H, K]; k: [B, G, K]; v: [B, G, V]; key, value: [B, C, G, ...]; position: [B].

    frequencies: [R] or None; q_scale, k_scale: [K] or None. output_gate: [B, H, V] or None. Returns
    (y [B, H, V], the next key and value).
    """
    q, k, v, key, value = cast(dtype, q, k, v, key, value)
    kinds = None
    if token_kind is not None:
        kinds = np.asarray(token_kind)[:, None]
        position = np.where(kinds[:, 0] == STARTS, 0, position)
    q = prepare_heads(q, position, frequencies, q_scale, epsilon)
    k = prepare_heads(k, position, frequencies, k_scale, epsilon)
    q = q * q.dtype.type(q.shape[2] ** -0.5 if query_scale is None else query_scale)
    if logit_scaling is not None:
        factor = np.log(position + logit_scaling) / np.log(np.floor(logit_scaling))
        q = q * factor[:, None, None].astype(dtype)
    state = {"key": key, "value": value, "position": position}
    output, state = sliding_window_attention(
        q[:, None], k[:, None], v[:, None], sliding_window, state, kinds, dtype=dtype
    )
    output = output[:, 0]
    if output_gate is not None:
        output = output * sigmoid(cast(dtype, output_gate)[0])
    return output, state["key"], state["value"]
