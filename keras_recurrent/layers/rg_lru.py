"""Real-gated linear recurrent unit."""

import keras
from keras import ops

from keras_recurrent.backends.constants import STARTS
from keras_recurrent.checks.arguments import check_num_blocks
from keras_recurrent.layers.block_diagonal import apply_blocks
from keras_recurrent.layers.lru import GatedLRU, default_num_blocks, input_multiplier
from keras_recurrent.ops import rg_lru, token_kind


# `InheritedDocstring` adds the arguments of `GatedLRU` and `StreamingLayer`.
@keras.saving.register_keras_serializable(package="keras_recurrent")
class RGLRU(GatedLRU):
    """Real-gated linear recurrent unit (RG-LRU) of Griffin and Hawk.

    ```
    r_t = σ(W_a x_t + b_a)                           recurrence gate
    i_t = σ(W_x x_t + b_x)                           input gate
    log a_t = -8 softplus(-Λ) r_t                    a = σ(Λ), a_t = a^(8 r_t)
    h_t = a_t h_{t-1} + sqrt(1 - a_t^2) (i_t x_t)    h_t = i_t x_t at a document's start
    ```

    De et al. 2024 (arXiv:2402.19427, section 2.4). W_a and W_x are block-diagonal and depend only
    on the current token, so the recurrence is linear in h and runs in parallel over time.

    Args:
        num_blocks: integer, the number of blocks of W_a and W_x; must divide the width. None: 16
            as in the paper if that divides it, else the largest smaller divisor with blocks of at
            least 4 channels, or 1 if there is none. After `build`, the attribute of this name is
            the resolved number.

    Returns:
        h as `[B, T, D]` in the compute dtype; everything after the linear layers of the gates is
        computed in float32 (float64 under a float64 policy). With `return_state` also the state:
        `{"hidden": [B, D] float32, "segment": [B] int32}`.

    Weights: the gates' kernels `[num_blocks, D / num_blocks, D / num_blocks]` and biases, in
    `EinsumDense` sublayers `recurrence_gate` and `input_gate` (which support LoRA and
    quantization), and `a_logit`, Λ, `[D]`, float32 even under a 16-bit policy.

    Raises:
        ValueError: `num_blocks` does not divide D, or `a_initializer` is unknown.

    Example: a sequence in two chunks.

    ```python
    import keras
    import numpy as np
    from keras_recurrent.layers import RGLRU

    layer = RGLRU(num_blocks=4)
    x = np.random.normal(size=(2, 10, 8)).astype("float32")
    h = keras.ops.convert_to_numpy(layer(x))

    left, state = layer(x[:, :6], return_state=True)
    right = layer(x[:, 6:], initial_state=state)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(right), h[:, 6:], rtol=1e-4, atol=1e-5)
    ```
    """

    num_blocks: int | None

    def build(self, input_shape):
        super().build(input_shape)
        if self.num_blocks is None:
            self.num_blocks = default_num_blocks(self.width)
        check_num_blocks(self.num_blocks, self.width)
        self.add_gates_and_decays(self.width)

    def stream(self, inputs, tokens, state):
        gate_a, gate_x = apply_blocks([self.recurrence_gate, self.input_gate], inputs)
        if self.scale_first_input:
            inputs = self._scaled_at_starts(inputs, gate_a, tokens)
        output, hidden = rg_lru(
            inputs,
            gate_a,
            gate_x,
            self.a_logit,
            initial_state=state.get("hidden"),
            token_kind=tokens.kind,
        )
        return output, {"hidden": hidden}

    def _scaled_at_starts(self, inputs, gate_a, tokens):
        """Multiplies the inputs of document starts by the square root, which `rg_lru` omits."""
        kind = token_kind(inputs) if tokens.kind is None else tokens.kind
        starts = ops.equal(kind, STARTS)[..., None]
        # Zeros at other tokens: NaN at padding would propagate to gradients.
        x, gate_a = (ops.where(starts, x, ops.zeros_like(x)) for x in (inputs, gate_a))
        r = ops.sigmoid(ops.cast(gate_a, self.state_dtype))
        scaled = input_multiplier(self.log_decay(r)) * ops.cast(x, self.state_dtype)
        return ops.where(starts, ops.cast(scaled, inputs.dtype), inputs)
