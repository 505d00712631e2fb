"""o_t = sum_s softmax_s(q_t · k_s) v_s over a window of keys.  De et al. 2024, arXiv:2402.19427."""

from typing import Any

from .. import host

attention: Any
if host.framework == "jax":
    from . import _jax_attention as attention
else:
    from . import _torch_attention as attention

_DTYPES = "bfloat16", "float16"
_HOPPER, _LATER = (9, 0), (10, 0)
_MAX_HEAD_SIZE = {False: 256, True: 128}  # on Hopper; on later GPUs
_VECTOR = 8  # channels
# cuDNN builds a plan for each shape, a cost that only long sequences amortize.
_MIN_LENGTH = 512


def unsupported(
    q, k, v, sliding_window=None, initial_state=None, token_kind=None, capacity=None
) -> str | None:
    """Reason these arguments are unsupported, or None."""
    if initial_state is not None:
        return "needs `initial_state` None: cuDNN has no cache"
    length, channels = q.shape[1], q.shape[3]
    if length < _MIN_LENGTH:
        return f"needs sequences of {_MIN_LENGTH} tokens or more, got {length}"
    if str(q.dtype).removeprefix("torch.") not in _DTYPES or not q.dtype == k.dtype == v.dtype:
        return f"needs bfloat16 or float16, got {q.dtype}, {k.dtype}, {v.dtype}"
    # On GPUs older than Hopper, cuDNN is no faster.
    reason = attention.unsupported_reason(q, k, v, sliding_window, token_kind, _HOPPER)
    if reason is not None:
        return reason
    largest = _MAX_HEAD_SIZE[attention.has_capability(q, _LATER)]
    if channels != v.shape[3] or channels % _VECTOR or channels > largest:
        sizes = f"a multiple of {_VECTOR} channels up to {largest}"
        return f"needs heads of {sizes}, values like keys; got {channels} and {v.shape[3]}"
    return None


sliding_window_attention = attention.sliding_window_attention._replace(unsupported=unsupported)
