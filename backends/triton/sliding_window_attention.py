"""o_t = sum_s softmax_s(q_t · k_s) v_s over a window of keys.  De et al. 2024, arXiv:2402.19427.

The state, padding and documents are turned into ranges of keys by the code of plain torch and plain
JAX, so each framework has its file in `_attention`. A decoding step reads the circular KV buffer in
place, by the implementation in `backends/torch` or `backends/jax`.
"""

from typing import Any

from .. import host
from ._linear_attention import linear_attention

kernels: Any
if host.framework == "jax":
    from ._attention import jax_attention as kernels
else:
    from ._attention import torch_attention as kernels


def unsupported(
    q, k, v, sliding_window=None, initial_state=None, token_kind=None, capacity=None
) -> str | None:
    """Reason why this implementation cannot take these arguments, or None."""
    state = (initial_state or {}).values()
    return linear_attention.unsupported_reason(q, k, v, token_kind, *state)


def sliding_window_attention(
    q, k, v, sliding_window=None, initial_state=None, token_kind=None, capacity=None
):
    """q: [B, T, H, K]; k: [B, T, G, K]; v: [B, T, G, V].

    Returns ([B, T, H, V] in q's dtype, {"key": [B, C, G, K], "value": [B, C, G, V], "position":
    int32 [B]}, keys and values in their dtypes). C is that of the initial state, else `capacity`,
    else `sliding_window` - 1; without any of them the state is an empty dict.
    """
    return kernels.attention(q, k, v, sliding_window, initial_state, token_kind, capacity)
