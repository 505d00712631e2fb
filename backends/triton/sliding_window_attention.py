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
    state = (initial_state or {}).values()
    return linear_attention.unsupported_reason(q, k, v, token_kind, *state)


sliding_window_attention = kernels.sliding_window_attention._replace(unsupported=unsupported)
