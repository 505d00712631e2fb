"""Operations on tensors, on every Keras backend.

Operations over time return `(output, final_state)`. `gated_linear_unit`, `log_forget_gate`,
`rms_norm` and `token_crossentropy` compute each token independently and return only the output.
`linear_crossentropy` also computes each token independently, and returns the loss of hidden states
and the predicted tokens.

All operations have first-order gradients in reverse mode on every backend. Further derivatives are
available with these implementations:

- Second derivatives: `jax` and `tensorflow`.
- Forward mode (tangents): `tensorflow`.
- `rms_norm`, `gated_linear_unit` and `log_forget_gate` have both with `jax`, `torch` and
  `tensorflow`, except forward mode of `log_forget_gate` with `jax`.

All others raise an error: on torch NotImplementedError, which names the operation.
"""

from keras_recurrent.ops.causal_conv1d import causal_conv1d
from keras_recurrent.ops.complex_linear_scan import complex_linear_scan
from keras_recurrent.ops.gated_linear_attention import gated_linear_attention
from keras_recurrent.ops.gated_linear_unit import gated_linear_unit
from keras_recurrent.ops.lightning_attention import lightning_attention
from keras_recurrent.ops.linear_crossentropy import linear_crossentropy
from keras_recurrent.ops.linear_scan import linear_scan
from keras_recurrent.ops.log_forget_gate import log_forget_gate
from keras_recurrent.ops.operation import which_implementation
from keras_recurrent.ops.rg_lru import rg_lru
from keras_recurrent.ops.rms_norm import rms_norm
from keras_recurrent.ops.scalar_decay_attention import scalar_decay_attention
from keras_recurrent.ops.sliding_window_attention import sliding_window_attention
from keras_recurrent.ops.token_crossentropy import token_crossentropy
from keras_recurrent.ops.token_kind import token_kind

__all__ = [
    "causal_conv1d",
    "complex_linear_scan",
    "gated_linear_attention",
    "gated_linear_unit",
    "lightning_attention",
    "linear_crossentropy",
    "linear_scan",
    "log_forget_gate",
    "rg_lru",
    "rms_norm",
    "scalar_decay_attention",
    "sliding_window_attention",
    "token_crossentropy",
    "token_kind",
    "which_implementation",
]
