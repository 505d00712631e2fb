"""Token-mixing layer of HGRN: an element-wise gated linear recurrence."""

import keras
from keras import ops

from keras_recurrent.layers.lower_bounds import ForgetGateLayer
from keras_recurrent.ops import linear_scan


@keras.saving.register_keras_serializable(package="keras_recurrent")
class HGRN(ForgetGateLayer):
    """Hierarchically gated linear recurrence (HGRN), the predecessor of HGRN2.

    ```
    f_t = β + (1 - β) σ(W_f x_t + b_f)                     forget gate, β the layer's lower bound
    h_t = f_t * h_{t-1} + (1 - f_t) * silu(W_i x_t)
    y_t = h_t * σ(W_o x_t)                                 output gate
    ```

    Qin et al. 2023 (arXiv:2311.04823), in the real-valued form that HGRN2 is compared with (Qin et
    al. 2024, arXiv:2404.07904, section 2). Its state has one number per channel; that of `HGRN2`
    has `expand_ratio`.

    Args:
        kernel_initializer: initializer of the three kernels.

    Returns:
        y as `[B, T, D]` in the compute dtype. With `return_state` also the state:
        `{"hidden": [B, D] float32, "segment": [B] int32}`.

    Sublayers: `f_proj`, `i_proj`, `o_proj`, all `Dense` without bias. Forget gates and the
    recurrence are computed in float32 even under a 16-bit policy.

    Example:

    ```python
    import numpy as np
    from keras_recurrent.layers import HGRN

    y, state = HGRN(return_state=True)(np.ones((2, 5, 8), "float32"))
    assert y.shape == (2, 5, 8) and state["hidden"].shape == (2, 8)
    ```
    """

    def __init__(self, *, kernel_initializer="lecun_normal", return_state=False, **kwargs):
        super().__init__(return_state=return_state, **kwargs)
        self.kernel_initializer = keras.initializers.get(kernel_initializer)

    def build(self, input_shape):
        super().build(input_shape)
        self.f_proj = self.make_dense(self.width, "f_proj", input_shape=input_shape)
        self.i_proj = self.make_dense(self.width, "i_proj", input_shape=input_shape)
        self.o_proj = self.make_dense(self.width, "o_proj", input_shape=input_shape)

    def stream(self, inputs, tokens, state, lower_bound=None):
        log_f = self.log_forget_gate(self.inner(self.f_proj, inputs), lower_bound)
        x = ops.cast(ops.silu(self.inner(self.i_proj, inputs)), self.state_dtype)
        h, hidden = linear_scan(
            *(-ops.expm1(log_f) * x, log_f),
            initial_state=state.get("hidden"),
            token_kind=tokens.kind,
        )
        return h, {"hidden": hidden}

    def finish(self, output, inputs):
        gate = ops.sigmoid(self.inner(self.o_proj, inputs))
        return ops.multiply(ops.cast(output, self.compute_dtype), gate)

    def own_state_spec(self, batch_size=None):
        self._check_built()
        return {"hidden": self.array_spec(batch_size, self.width)}
