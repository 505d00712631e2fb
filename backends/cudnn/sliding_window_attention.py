"""o_t = sum_s softmax_s(q_t · k_s) v_s over a window of keys.  De et al. 2024, arXiv:2402.19427.

torch passes no window on to cuDNN, so this is for rows that a window holds whole.
"""

import torch

from ..torch import _ring
from ..torch._common import in_forward_mode, is_capable, too_old
from ..torch._row import attend
from ..torch._sharding import is_sharded

_DTYPES = torch.bfloat16, torch.float16
_HOPPER, _LATER = (9, 0), (10, 0)
_LARGEST_HEAD = {False: 256, True: 128}  # on Hopper; on later GPUs
_VECTOR = 8  # channels
# cuDNN plans anew for each shape, which only long rows are worth.
_SHORTEST_ROW = 512


def unsupported(
    q, k, v, sliding_window=None, initial_state=None, token_kind=None, capacity=None
) -> str | None:
    """Why this implementation refuses these arguments; None if it accepts them."""
    if initial_state is not None or token_kind is not None:
        return "knows neither a state before a row, nor documents and padding inside it"
    length, channels = q.shape[1], q.shape[3]
    if sliding_window is not None and length > sliding_window:
        return f"knows no window: {length} tokens are more than {sliding_window}"
    if length < _SHORTEST_ROW:
        return f"is for rows of {_SHORTEST_ROW} tokens or more, got {length}"
    if q.dtype not in _DTYPES or not q.dtype == k.dtype == v.dtype:
        return f"takes bfloat16 or float16 alone, got {q.dtype}, {k.dtype}, {v.dtype}"
    if not q.is_cuda:
        return f"needs CUDA tensors, got one on {q.device}"
    reason = too_old(q.device, _HOPPER)  # older ones are served no faster by cuDNN
    if reason is not None:
        return reason
    largest = _LARGEST_HEAD[is_capable(q.device, _LATER)]
    if channels != v.shape[3] or channels % _VECTOR or channels > largest:
        sizes = f"a multiple of {_VECTOR} channels up to {largest}"
        return f"takes heads of {sizes}, values like keys; got {channels} and {v.shape[3]}"
    if torch.are_deterministic_algorithms_enabled():
        return "adds gradients up in no fixed order, and torch is told to be deterministic"
    if is_sharded(q):
        return "has no rule for DTensors (plain torch has)"
    if in_forward_mode():
        return "has no derivative in forward mode (plain torch has it)"
    return None


def sliding_window_attention(
    q, k, v, sliding_window=None, initial_state=None, token_kind=None, capacity=None
):
    """q: [B, T, H, K]; k and v: [B, T, G, K].

    Returns ([B, T, H, K] in q's dtype, {"key": [B, C, G, K], "value": [B, C, G, K], "position":
    int32 [B]}, keys and values in their dtypes). C is `capacity`, else `sliding_window` - 1;
    without either of them the state is an empty dict.
    """
    return attend(_forward, q, k, v, sliding_window, initial_state, token_kind, capacity)


def _forward(q, k, v, key, value, position, token_kind, window, capacity):
    # Called by its own name: `sdpa_kernel` would choose it for all threads of the process.
    output, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        attn_bias=None,
        compute_log_sumexp=torch.is_grad_enabled(),
        is_causal=True,
        scale=1.0,
    )
    batch, length = q.shape[:2]
    position = torch.full((batch,), length, dtype=torch.int32, device=q.device)
    rings = (_ring.of_whole_document(x, capacity) for x in (k, v))
    return output.transpose(1, 2), *rings, position
