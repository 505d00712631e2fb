"""What gated multilayer perceptrons share: three linear maps and a product."""

import keras
from keras import ops

from keras_recurrent.checks.arguments import check_positive_integer, check_width_known
from keras_recurrent.layers.initializers import clone_initializer
from keras_recurrent.layers.remat import RecomputableLayer, no_further_remat


class GatedLinearUnit(RecomputableLayer):
    """Base class of the gated multilayer perceptrons: `W_down gated(W_gate x, W_up x)`.

    Shazeer 2020 (arXiv:2002.05202). A subclass says `gated`, and whether there are biases; the
    sublayers are `gate_proj`, `up_proj` and `down_proj`, all `Dense`.
    """

    use_bias: bool

    def __init__(
        self,
        intermediate_dim,
        kernel_initializer="lecun_normal",
        bias_initializer="zeros",
        **kwargs,
    ):
        super().__init__(**kwargs)
        check_positive_integer("intermediate_dim", intermediate_dim)
        self.intermediate_dim = intermediate_dim
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.supports_masking = True
        self.gate_proj = self._dense(intermediate_dim, "gate_proj")
        self.up_proj = self._dense(intermediate_dim, "up_proj")

    def gated(self, gate, x):
        """What the gate lets through."""
        raise NotImplementedError

    def _dense(self, units, name):
        with no_further_remat():
            return keras.layers.Dense(
                units,
                use_bias=self.use_bias,
                kernel_initializer=clone_initializer(self.kernel_initializer),
                bias_initializer=clone_initializer(self.bias_initializer),
                dtype=self.dtype_policy,
                name=name,
            )

    def build(self, input_shape):
        if len(input_shape) < 2:
            raise ValueError(
                f"`{type(self).__name__}` needs inputs of shape [batch, ..., width], of two axes "
                f"or more; got the shape {tuple(input_shape)}."
            )
        check_width_known(self, input_shape)
        self.gate_proj.build(input_shape)
        self.up_proj.build(input_shape)
        self.down_proj = self._dense(input_shape[-1], "down_proj")
        self.down_proj.build((*input_shape[:-1], self.intermediate_dim))

    def call(self, inputs):
        gate, x = self.inner(self.gate_proj, inputs), self.inner(self.up_proj, inputs)
        y = self.inner(self.down_proj, self.gated(gate, x))
        return ops.cast(y, self.compute_dtype)  # Keras on torch multiplies float64 as float32

    def compute_output_shape(self, input_shape):
        return tuple(input_shape)

    def get_config(self):
        return {
            **super().get_config(),
            "intermediate_dim": self.intermediate_dim,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
        }
