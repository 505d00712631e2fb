"""Complex-gated linear recurrent unit."""

import keras
from keras import ops

from keras_recurrent.backends.constants import DECAY_EXPONENT, STARTS
from keras_recurrent.checks.arguments import check_num_blocks
from keras_recurrent.layers.block_diagonal import apply_blocks
from keras_recurrent.layers.initializers import decay_angle
from keras_recurrent.layers.lru import GatedLRU, default_num_blocks, input_multiplier
from keras_recurrent.ops import complex_linear_scan, token_kind


# `InheritedDocstring` adds the arguments of `GatedLRU` and `StreamingLayer`.
@keras.saving.register_keras_serializable(package="keras_recurrent")
class CGLRU(GatedLRU):
    """Complex-gated linear recurrent unit (CG-LRU), Griffin's complex variant of the RG-LRU.

    ```
    u_t = the first half of x_t + i (its second half)
    r_t = σ(W_a x_t + b_a)                            recurrence gate
    i_t = σ(W_x x_t + b_x)                            input gate
    ã_t = exp(8 r_t (log σ(Λ) + i θ))                 ã = σ(Λ) e^(iθ), ã_t = ã^(8 r_t)
    h_t = ã_t h_{t-1} + sqrt(1 - |ã_t|^2) (i_t u_t)   h_t = i_t u_t where a document starts
    y_t = the real parts of h_t, then the imaginary ones
    ```

    De et al. 2024 (arXiv:2402.19427, appendix B). u, r, i, Λ, θ and h have half the width of x;
    W_a and W_x are block-diagonal, from the whole width to half of it. The paper does not give the
    initialization of θ: here 8θ, the angle of a step with an open gate, is uniform in [0, 2π), like
    the phases of the LRU (Orvieto et al. 2023, arXiv:2303.06349). 1 - |ã_t|^2 is computed as
    -expm1(2 log |ã_t|) in float32, and the derivative of the square root is limited to 1000 as in
    DeepMind's released code of the RG-LRU.

    Args:
        num_blocks: integer, blocks on the diagonal of W_a and W_x; must divide the width into
            blocks of even width. None: as in `keras_recurrent.layers.RGLRU`, in even blocks.

    Call arguments:
        inputs: `[B, T, D]`, D even.

    Returns:
        y as `[B, T, D]` in the compute dtype. With `return_state` also the state:
        `{"hidden": [B, D] float32 (real parts, then imaginary ones), "segment": [B] int32}`.

    Weights: the gates' kernels `[num_blocks, D / num_blocks, D / num_blocks / 2]` and biases, in
    `EinsumDense` sublayers `recurrence_gate` and `input_gate`; `a_logit`, Λ, and `theta`, θ in
    radians, `[D / 2]`, float32 even under a 16-bit policy.

    Raises:
        ValueError: D is odd, `num_blocks` does not divide D into blocks of even width, or
            `a_initializer` is unknown.

    Example:

    ```python
    import keras
    import numpy as np
    from keras_recurrent.layers import CGLRU

    layer = CGLRU(num_blocks=2, return_state=True)
    y, state = layer(np.random.normal(size=(2, 10, 8)))
    assert y.shape == (2, 10, 8)
    last, hidden = map(keras.ops.convert_to_numpy, (y[:, -1], state["hidden"]))
    np.testing.assert_allclose(last, hidden, rtol=1e-5)
    ```
    """

    num_blocks: int | None

    def build(self, input_shape):
        super().build(input_shape)
        check_complex_channels("the width of its inputs", self.width, self.num_blocks)
        if self.num_blocks is None:
            self.num_blocks = default_num_blocks(self.width, multiple_of=2)
        self.add_gates_and_decays(self.width // 2)
        shape = (self.width // 2,)
        self.theta = self.add_state_weight("theta", shape, decay_angle, weight_decay=False)

    def stream(self, inputs, tokens, state):
        kind = token_kind(inputs) if tokens.kind is None else tokens.kind

        gates = apply_blocks([self.recurrence_gate, self.input_gate], inputs)
        r, i = (ops.sigmoid(ops.cast(gate, self.state_dtype)) for gate in gates)
        log_a = self.log_decay(r)
        multiplier = input_multiplier(log_a)
        if not self.scale_first_input:
            multiplier = ops.where(ops.equal(kind, STARTS)[..., None], 1.0, multiplier)
        scale = multiplier * i
        u = ops.concatenate([scale, scale], axis=-1) * ops.cast(inputs, self.state_dtype)

        output, hidden = complex_linear_scan(
            u,
            log_a,
            DECAY_EXPONENT * self.theta * r,
            initial_state=state.get("hidden"),
            token_kind=kind,
        )
        return ops.cast(output, self.compute_dtype), {"hidden": hidden}


def check_complex_channels(name, width, num_blocks):
    """Raises an error for an odd width, or for blocks of odd width. `name` names the width."""
    if width % 2:
        raise ValueError(
            f"`CGLRU` splits channels into real and imaginary parts, so {name} must be even; got "
            f"{width}."
        )
    if num_blocks is None:
        return
    check_num_blocks(num_blocks, width)
    if width // num_blocks % 2:
        raise ValueError(
            f"`num_blocks` must divide {name}, {width}, into blocks of even width; got "
            f"{num_blocks}, blocks of width {width // num_blocks}."
        )
