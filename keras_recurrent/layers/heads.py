"""Base class of attention layers: projections to heads, norms of heads, and rotary positions."""

from keras import ops

from keras_recurrent.checks.shapes import reshape
from keras_recurrent.layers import decoding
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

    def unfused_reason(self):
        norms = [norm for norm in (self.q_norm, self.k_norm) if norm is not None]
        return decoding.first_reason(
            decoding.denses_reason(self.projections(), [self.o_proj]),
            decoding.split_heads_reason(self),
            *map(decoding.norm_reason, norms),
        )


def frequencies(rotary_dim, max_wavelength, dtype):
    """Returns the rotation of each pair of channels in radians per token, or None without pairs.

    See `rotate`.
    """
    half = rotary_dim // 2
    return max_wavelength ** (-ops.arange(0, half, dtype=dtype) / half) if half else None


def rotate(x, positions, max_wavelength, rotary_dim):
    """Rotates pairs of channels by angles proportional to the position (RoPE, arXiv:2104.09864).

    Channel j below r / 2 and channel j + r / 2 are rotated by position * max_wavelength^(-2j / r),
    where r is `rotary_dim`; channels from r on do not change.

    Args:
        x: `[B, T, heads, head_dim]`, float32 or float64, which is also the dtype of the angles.
        positions: integers `[B, T]`.
        max_wavelength: number.
        rotary_dim: integer, even, at most head_dim.
    """
    if not rotary_dim:
        return x
    half = rotary_dim // 2
    angle = ops.cast(positions, x.dtype)[:, :, None, None]
    angle = angle * frequencies(rotary_dim, max_wavelength, x.dtype)
    cos, sin = ops.cos(angle), ops.sin(angle)
    a, b, rest = x[..., :half], x[..., half:rotary_dim], x[..., rotary_dim:]
    return ops.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)
