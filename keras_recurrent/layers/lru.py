"""Base class of the real-gated and complex-gated linear recurrent units."""

from keras import ops

from keras_recurrent.backends.constants import DECAY_EXPONENT, MAX_SQRT_GRADIENT
from keras_recurrent.checks.arguments import check_boolean, check_positive_integer
from keras_recurrent.layers.block_diagonal import block_diagonal_dense
from keras_recurrent.layers.initializers import get_decay_initializer
from keras_recurrent.layers.streaming import StreamingLayer

NUM_BLOCKS = 16  # De et al. 2024, arXiv:2402.19427


class GatedLRU(StreamingLayer):
    """Base class of `RGLRU` and `CGLRU`, with their arguments, gates, decays and state.

    Args:
        a_initializer: initializer of Λ: `"griffin"` (the paper: a^8 uniform in [0.9, 0.999]),
            `"recurrentgemma"` (the released code: a^2 uniform in [0.9^2, 0.999^2]), or a Keras
            initializer.
        kernel_initializer: initializer of W_a and W_x, whose fan-in is the width of a block.
        bias_initializer: initializer of b_a and b_x.
        scale_first_input: boolean, whether the square root also multiplies the input of a
            document's first token, as in equation 4 of the paper. False: h = i x for that token, as
            in DeepMind's released code, with which RecurrentGemma was trained.
    """

    def __init__(
        self,
        *,
        num_blocks=None,
        a_initializer="griffin",
        kernel_initializer="lecun_normal",
        bias_initializer="zeros",
        return_state=False,
        scale_first_input=False,
        **kwargs,
    ):
        super().__init__(return_state=return_state, **kwargs)
        check_positive_integer("num_blocks", num_blocks, or_none=True)
        check_boolean("scale_first_input", scale_first_input)
        a_initializer = get_decay_initializer(a_initializer)
        self.store_arguments(GatedLRU, locals())

    def add_gates_and_decays(self, channels):
        """Adds the two gates, from the layer's width to `channels`, and Λ of each channel."""
        block_width = channels // self.num_blocks
        self.recurrence_gate = block_diagonal_dense(self, "recurrence_gate", block_width)
        self.input_gate = block_diagonal_dense(self, "input_gate", block_width)
        self.a_logit = self.add_state_weight(
            "a_logit", (channels,), self.a_initializer, weight_decay=False
        )

    def log_decay(self, recurrence_gate):
        """Returns log |a_t| = -8 softplus(-Λ) r_t."""
        return -DECAY_EXPONENT * ops.softplus(-self.a_logit) * recurrence_gate

    def last_output(self, state):
        return ops.cast(state["hidden"], self.compute_dtype) if state else None

    def own_state_spec(self, batch_size=None):
        self._check_built()
        return {"hidden": self.array_spec(batch_size, self.width)}


def input_multiplier(log_a):
    """Returns sqrt(1 - a^2), exactly, with a derivative limited by MAX_SQRT_GRADIENT."""
    z = -ops.expm1(2 * log_a)
    derivative = ops.rsqrt(ops.maximum(4 * z, 1 / MAX_SQRT_GRADIENT**2))
    # z - stop_gradient(z) is 0: the value is unchanged, and its gradient is the limited derivative.
    return ops.stop_gradient(ops.sqrt(z)) + ops.stop_gradient(derivative) * (
        z - ops.stop_gradient(z)
    )


def default_num_blocks(width, multiple_of=1):
    """Returns the default number of blocks of gates on `width` channels; saved models depend on it.

    It is the paper's 16 if possible, else the largest smaller number with blocks of at least 4
    channels, else 1. The width of a block is a multiple of `multiple_of`.
    """
    if width % (NUM_BLOCKS * multiple_of) == 0:
        return NUM_BLOCKS
    for number in range(NUM_BLOCKS - 1, 1, -1):
        if width % (number * multiple_of) == 0 and width // number >= 4:
            return number
    return 1
