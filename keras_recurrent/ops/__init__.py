"""Operations on tensors, on every Keras backend. Each returns `(output, final_state)`."""

from keras_recurrent.ops.causal_conv1d import causal_conv1d
from keras_recurrent.ops.complex_linear_scan import complex_linear_scan
from keras_recurrent.ops.linear_scan import linear_scan
from keras_recurrent.ops.operation import which_implementation
from keras_recurrent.ops.rg_lru import rg_lru
from keras_recurrent.ops.token_kind import token_kind

__all__ = [
    "causal_conv1d",
    "complex_linear_scan",
    "linear_scan",
    "rg_lru",
    "token_kind",
    "which_implementation",
]
