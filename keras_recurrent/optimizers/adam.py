"""Adam and AdamW, whose arithmetic and slots are in float32 for weights stored in 16 bits."""

from typing import Any

import keras

from keras_recurrent.dispatch import BACKEND

Updates: Any
if BACKEND == "torch":
    from keras_recurrent.optimizers.fused_updates import FusedUpdates as Updates
else:
    from keras_recurrent.optimizers.updates import Updates


@keras.saving.register_keras_serializable(package="keras_recurrent")
class Adam(Updates):
    r"""Keras's `Adam` that also trains weights stored in bfloat16 or float16, and is fast on torch.

    With the gradient g of the weight w in step t, the learning rate η and m = v = 0 at first
    (Kingma and Ba 2015, https://arxiv.org/abs/1412.6980):

        m ← β₁ m + (1 - β₁) g
        v ← β₂ v + (1 - β₂) g²
        w ← w - η √(1 - β₂ᵗ) / (1 - β₁ᵗ) · m / (√v + ε)

    - **Weights stored in 16 bits** (policies `"bfloat16"` and `"float16"`): Keras's optimizers
      compute in the dtype of the weight, in which β₂ = 0.999 rounds to 1 and small updates are
      lost. This class computes in float32, with m, v, averages and accumulated gradients in
      float32, and rounds the new weight stochastically, so that its expected value is exact up to
      float32's rounding. Weight, m and v take 10 bytes, instead of 12 under a `mixed_*` policy
      (12 instead of 16 with the gradient). The random numbers depend on the step and the weight
      only: a resumed run reproduces an uninterrupted run.
    - **With float32 weights**, results equal those of Keras's `Adam` up to rounding, and a run or
      file of one continues with the other. On torch, torch's fused kernel updates these weights.

    Args: as in `keras.optimizers.Adam`.

    Example:

    >>> import keras, keras_recurrent
    >>> model = keras_recurrent.models.GriffinCausalLM.from_preset(
    ...     "hawk_tiny", num_layers=1, dtype="bfloat16", sequence_length=64
    ... )
    >>> model.compile(keras_recurrent.optimizers.Adam(1e-3), model.loss)
    >>> history = model.fit(["All happy families are alike."] * 4, batch_size=4, verbose=0)
    """


@keras.saving.register_keras_serializable(package="keras_recurrent")
class AdamW(Updates, keras.optimizers.AdamW):
    """Keras's `AdamW` that also trains weights stored in 16 bits, and is fast on torch.

    First w ← w - η λ w with the `weight_decay` λ (decoupled weight decay, Loshchilov and Hutter
    2019, https://arxiv.org/abs/1711.05101), then the update of `keras_recurrent.optimizers.Adam`.
    Decay of weights in 16 bits is part of the update in float32.
    `keras_recurrent.exclude_from_weight_decay` applies.

    Args: as in `keras.optimizers.AdamW`.
    """
