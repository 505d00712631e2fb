"""Linear warmup and decay with the inverse square root of the step."""

import keras
from keras import ops

from keras_recurrent.checks.arguments import check_number, check_positive_integer


@keras.saving.register_keras_serializable("keras_recurrent")
class InverseSquareRoot(keras.optimizers.schedules.LearningRateSchedule):
    """Linear warmup, followed by a decay with the inverse square root of the step.

    rate(t) = learning_rate · t / warmup_steps            for t < warmup_steps,
    rate(t) = learning_rate · sqrt(warmup_steps / t)      after that,

    where t is the number of updates made so far, so the first update has a rate of 0. The factor is
    that of Vaswani et al. 2017 (arXiv:1706.03762, section 5.3), relative to the highest rate as in
    fairseq's `inverse_sqrt`, with which HGRN2 was trained on WikiText-103 (Qin et al. 2024,
    arXiv:2404.07904). It does not depend on the total number of steps, so a run can be extended.

    Args:
        learning_rate: number above 0, the highest rate, reached at step `warmup_steps`.
        warmup_steps: integer of at least 1, the number of warmup steps.
        name: string.

    Call arguments:
        step: integer or float tensor, the number of updates made so far.

    Returns:
        The rate, a float tensor of `keras.config.floatx()` and the shape of `step`.

    Raises:
        ValueError: `learning_rate` is not finite and above 0, or `warmup_steps` is not an integer
            of at least 1.

    Example:

    >>> import keras
    >>> from keras_recurrent.schedules import InverseSquareRoot
    >>> schedule = InverseSquareRoot(5e-4, warmup_steps=4000)
    >>> [f"{float(schedule(step)):.2e}" for step in (0, 2000, 4000, 16_000)]
    ['0.00e+00', '2.50e-04', '5.00e-04', '2.50e-04']
    >>> optimizer = keras.optimizers.AdamW(schedule)
    """

    def __init__(self, learning_rate, warmup_steps, name="InverseSquareRoot"):
        super().__init__()
        check_number("learning_rate", learning_rate, above=0)
        check_positive_integer("warmup_steps", warmup_steps)
        self.learning_rate = float(learning_rate)
        self.warmup_steps = int(warmup_steps)
        self.name = name

    def __call__(self, step):
        with keras.name_scope(self.name):
            # Divided in float32, in which steps are exact, for any `keras.config.floatx()`.
            share = ops.cast(step, "float32") / self.warmup_steps
            share = ops.minimum(share, ops.rsqrt(ops.maximum(share, 1.0)))
            return ops.cast(self.learning_rate * share, keras.config.floatx())

    def get_config(self):
        return {
            "learning_rate": self.learning_rate,
            "warmup_steps": self.warmup_steps,
            "name": self.name,
        }
