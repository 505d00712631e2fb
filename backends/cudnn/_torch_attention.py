"""Softmax attention of cuDNN on torch, which does not pass a window to cuDNN."""

import torch

from ..kernel import Kernel
from ..torch import _circular_buffer, _common
from ..torch._attention_inputs import attend
from ..torch._sharding import is_sharded

_LENGTH_UNIT = 128  # without gradients: prompts have arbitrary lengths


def unsupported_reason(q, k, v, window, token_kind, capability):
    """Reason torch or a GPU below `capability` does not support these arguments, or None."""
    length = q.shape[1]
    if token_kind is not None:
        return "needs `token_kind` None: documents and padding are unsupported"
    if window is not None and length > window:
        return f"needs a window of all tokens: {length} tokens are more than {window}"
    if length % _LENGTH_UNIT and not torch.is_grad_enabled():
        return f"needs a multiple of {_LENGTH_UNIT} tokens without gradients, got {length}"
    if not q.is_cuda:
        return f"needs CUDA tensors, got one on {q.device}"
    if torch.are_deterministic_algorithms_enabled():
        return "sums gradients in no fixed order, and torch is set to use deterministic algorithms"
    if is_sharded(q):
        return "has no sharding rule for DTensors; plain torch has one"
    if _common.forward_mode_active():
        return "has no forward-mode derivative; plain torch has one"
    return _common.capability_reason(q.device, capability)


def has_capability(q, lowest):
    """Returns True if q's GPU has compute capability `lowest`, such as (9, 0), or a later one."""
    return _common.has_capability(q.device, lowest)


@Kernel
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
    # The operator is called directly: `sdpa_kernel` would select it for all threads of the process.
    output, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        attn_bias=None,
        compute_log_sumexp=torch.is_grad_enabled(),
        is_causal=True,
        scale=1.0,
    )
    batch, length = q.shape[:2]
    position = torch.full((batch,), length, dtype=torch.int32, device=q.device)
    buffers = (_circular_buffer.from_whole_document(x, capacity) for x in (k, v))
    return output.transpose(1, 2), *buffers, position
