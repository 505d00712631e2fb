"""Base class of attention layers, with projections to heads and norms of heads."""

from keras import ops

from keras_recurrent.checks.shapes import reshape
from keras_recurrent.layers.rms_norm import RMSNorm, SimpleRMSNorm
from keras_recurrent.layers.streaming import StreamingLayer


class HeadsLayer(StreamingLayer):
    """Base class of layers whose queries, keys and values are split into heads.

    A subclass sets `head_dim`, `layer_norm_epsilon`, the linear layers of `projections`, of which
    the first is `q_proj`, and `q_norm` and `k_norm`, which may be None.
    """

    use_output_bias = False

    def projections(self):
        """Returns the linear layers that are applied to the inputs."""
        raise NotImplementedError

    def make_norm(self, name, has_weight=True):
        """Returns a norm inside the layer."""
        cls, further = (RMSNorm, {"zero_centered": False}) if has_weight else (SimpleRMSNorm, {})
        return self.make_sublayer(cls, epsilon=self.layer_norm_epsilon, name=name, **further)

    def build(self, input_shape):
        super().build(input_shape)
        for projection in self.projections():
            projection.build(input_shape)
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                norm.build((*input_shape[:2], None, self.head_dim))
        inner_shape = (*input_shape[:2], self.q_proj.units)
        self.o_proj = self.make_dense(self.width, "o_proj", self.use_output_bias, inner_shape)

    def split_heads(self, x, inputs):
        """Returns x `[B, T, H K]` by heads, `[B, T, H, K]`; `inputs` are `[B, T, ...]`."""
        # With -1, TensorFlow would lose the static size if the time is unknown. The shape of x
        # would not do: tf2onnx takes it from inside `Dense`, without the time axis.
        heads = x.shape[-1] // self.head_dim
        return reshape(x, (*ops.shape(inputs)[:2], heads, self.head_dim))
