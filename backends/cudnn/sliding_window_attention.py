"""o_t = sum_s softmax_s(q_t · k_s) v_s over all keys.  De et al. 2024, arXiv:2402.19427."""

import torch

from ..kernel import as_kernel
from ..torch import _circular_buffer, _common
from ..torch._attention_inputs import attend
from ..torch._sharding import is_sharded

_DTYPES = torch.bfloat16, torch.float16
_HOPPER, _LATER = (9, 0), (10, 0)
_MAX_HEAD_SIZE = {False: 256, True: 128}  # on Hopper; on later GPUs
_VECTOR = 8  # channels
# cuDNN builds a plan for each shape, a cost that only long sequences amortize.
_MIN_LENGTH = 512
_LENGTH_UNIT = 128  # without gradients: prompts have arbitrary lengths


def unsupported(
    q, k, v, sliding_window=None, initial_state=None, token_kind=None, capacity=None
) -> str | None:
    """Reason these arguments are unsupported, or None."""
    if initial_state is not None:
        return "needs `initial_state` None: cuDNN has no cache"
    if token_kind is not None:
        return "needs `token_kind` None: documents and padding are unsupported"
    length, channels = q.shape[1], q.shape[3]
    if length < _MIN_LENGTH:
        return f"needs sequences of {_MIN_LENGTH} tokens or more, got {length}"
    if sliding_window is not None and length > sliding_window:
        return f"needs a window of all tokens: {length} tokens are more than {sliding_window}"
    if length % _LENGTH_UNIT and not torch.is_grad_enabled():
        return f"needs a multiple of {_LENGTH_UNIT} tokens without gradients, got {length}"
    if q.dtype not in _DTYPES or not q.dtype == k.dtype == v.dtype:
        return f"needs bfloat16 or float16, got {q.dtype}, {k.dtype}, {v.dtype}"
    if not q.is_cuda:
        return f"needs CUDA tensors, got one on {q.device}"
    if torch.are_deterministic_algorithms_enabled():
        return "sums gradients in no fixed order, and torch is set to use deterministic algorithms"
    if is_sharded(q):
        return "has no sharding rule for DTensors; plain torch has one"
    if _common.forward_mode_active():
        return "has no forward-mode derivative; plain torch has one"
    # On GPUs older than Hopper, cuDNN is no faster.
    reason = _common.capability_reason(q.device, _HOPPER)
    if reason is not None:
        return reason
    largest = _MAX_HEAD_SIZE[_common.has_capability(q.device, _LATER)]
    if channels != v.shape[3] or channels % _VECTOR or channels > largest:
        sizes = f"a multiple of {_VECTOR} channels up to {largest}"
        return f"needs heads of {sizes}, values like keys; got {channels} and {v.shape[3]}"
    return None


@as_kernel(unsupported)
def sliding_window_attention(
    q, k, v, sliding_window=None, initial_state=None, token_kind=None, capacity=None
):
    """q: [B, T, H, K]; k and v: [B, T, G, K]."""
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
