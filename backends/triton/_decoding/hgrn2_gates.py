"""Gates of a decoding step of HGRN2: query, decay and key of a head from its projections."""

import triton
import triton.language as tl

from .._device.common import load_float32
from .._device.math import exp, sigmoid
from .._device.tokens import select_by_kind


@triton.jit
def load_query(q, offsets, valid, root):
    """silu(q) K^(-1/2), 0 where `valid` is False; root: K^(-1/2)."""
    query = load_float32(q, offsets, valid)
    return query * (sigmoid(query, True)[0] * root)


@triton.jit
def load_decay_and_key(f, lower_bound, kind, head, H, d, valid, K: tl.constexpr):
    """The decay and the key of a token, for channels d of a head; valid: no padding, and d < K.

    The decay is 0 at the start of a document. At padding it is 1, and the key is 0.
    """
    forget_gate, input_gate = sigmoid(load_float32(f, head * K + d, valid), True)
    if lower_bound is not None:
        channel = head % H * K + d
        rest = exp(load_float32(lower_bound, H * K + channel, d < K), True)
        forget_gate = exp(load_float32(lower_bound, channel, d < K), True) + rest * forget_gate
        input_gate *= rest
        # After rounding, β and 1 - β do not add up to 1, and β may be NaN.
        near_1 = (input_gate <= 0.5) & (forget_gate == forget_gate)
        forget_gate = tl.where(near_1, 1.0 - input_gate, forget_gate)
    decay = select_by_kind(kind, forget_gate, 0.0, 1.0)
    return decay, tl.where(valid, input_gate, 0.0)
