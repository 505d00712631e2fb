"""Check that an optimizer of Keras can update weights that are stored in 16 bits."""

import warnings

import keras
import ml_dtypes

_DTYPES = ("bfloat16", "float16")
# Optimizers of Keras that underflow in float16, and their arguments β for which they compute
# 1 - β^t in the dtype of the weight. In bfloat16, 0.999 rounds to 1.
_BIAS_CORRECTIONS = {
    keras.optimizers.Adafactor: (),
    keras.optimizers.Adam: ("beta_1", "beta_2"),
    keras.optimizers.Adamax: ("beta_1",),
    keras.optimizers.Lamb: ("beta_1", "beta_2"),
    keras.optimizers.Muon: ("adam_beta_1", "adam_beta_2"),
    keras.optimizers.Nadam: ("beta_1", "beta_2"),
    keras.optimizers.ScheduleFreeAdamW: ("beta_2",),
}


def check_16_bit_updates(optimizer, variables):
    """Warns if an optimizer with Keras's `update_step` rounds away updates of 16-bit weights.

    Raises:
        ValueError: such weights would stay unchanged or become NaN.
    """
    pairs = [(_find_optimizer(optimizer, v), v) for v in variables if v.dtype in _DTYPES]
    updates = [(_failure_reason(o, v.dtype), o, v) for o, v in pairs if _has_keras_update(o)]
    if not updates:
        return
    reason, updating, variable = next((u for u in updates if u[0]), updates[0])
    name, weights = type(updating).__name__, f"in {variable.dtype}, such as {variable.path!r}"
    remedy = (
        "Use `keras_recurrent.optimizers.AdamW`, which computes in float32, or the dtype policy "
        '"mixed_bfloat16", which stores weights in float32.'
    )
    if reason:
        raise ValueError(f"Keras's `{name}` cannot train weights {weights}: {reason}. {remedy}")
    lost = f"Keras's `{name}` rounds away small updates of weights {weights}. {remedy}"
    warnings.warn(lost, stacklevel=1)  # Python shows one for both `compile` and `fit`


def _find_optimizer(optimizer, variable):
    """Returns the optimizer that updates a variable, which a wrapper may contain."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return _find_optimizer(optimizer.inner_optimizer, variable)
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        return optimizer._optimizer_map(variable)
    return optimizer


def _has_keras_update(optimizer):
    is_optimizer = isinstance(optimizer, keras.optimizers.Optimizer)
    return is_optimizer and type(optimizer).update_step.__module__.startswith("keras.")


def _failure_reason(optimizer, dtype) -> str | None:
    known = next((c for c in _BIAS_CORRECTIONS if isinstance(optimizer, c)), None)
    if known and dtype == "float16":
        return "squares of gradients, or products with the learning rate, underflow"
    for name in _BIAS_CORRECTIONS.get(known, ()):
        if ml_dtypes.bfloat16(getattr(optimizer, name)) == 1:
            return f"`{name}={getattr(optimizer, name)}` rounds to 1, so updates are 0 or NaN"
    return None
