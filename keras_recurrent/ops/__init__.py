"""Operations on tensors, on every Keras backend. Each returns `(output, final_state)`."""

from keras_recurrent.ops.causal_conv1d import causal_conv1d
from keras_recurrent.ops.complex_linear_scan import complex_linear_scan
from keras_recurrent.ops.gated_linear_attention import gated_linear_attention
from keras_recurrent.ops.lightning_attention import lightning_attention
from keras_recurrent.ops.linear_scan import linear_scan
from keras_recurrent.ops.operation import which_implementation
from keras_recurrent.ops.rg_lru import rg_lru
from keras_recurrent.ops.sliding_window_attention import sliding_window_attention
from keras_recurrent.ops.token_kind import token_kind

__all__ = [
    "causal_conv1d",
    "complex_linear_scan",
    "gated_linear_attention",
    "lightning_attention",
    "linear_scan",
    "rg_lru",
    "sliding_window_attention",
    "token_kind",
    "which_implementation",
]
