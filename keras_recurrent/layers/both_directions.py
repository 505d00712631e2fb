"""Argument checks of `keras.layers.Bidirectional` with a layer of this package."""

import keras

from keras_recurrent import compat
from keras_recurrent.layers.streaming import StreamingLayer

FORWARDED_ARGUMENTS = ("sequences", "initial_state", "mask", "training")
COMMON_ARGUMENTS = ("segment_ids", "return_state", "tokens", "inputs_mask")


def install():
    """Installs a check of the arguments of `keras.layers.Bidirectional` calls."""
    compat.check_before_calls(keras.layers.Bidirectional, check_bidirectional_call)


def check_bidirectional_call(wrapper, args, kwargs):
    """Raises an error for arguments that the wrapped layer takes, but the wrapper does not.

    Keras's error names neither the layer nor an alternative. The check runs before Keras binds the
    arguments.
    """
    layer, inputs = wrapper.backward_layer, args[0] if args else kwargs.get("sequences")
    refused = {name: value for name, value in kwargs.items() if name not in FORWARDED_ARGUMENTS}
    if inputs is None or not refused or not isinstance(layer, StreamingLayer):
        return
    specific = {name: value for name, value in refused.items() if name not in COMMON_ARGUMENTS}
    # The error of `HGRN2` for `lower_bound` names its bidirectional layer.
    layer.check_arguments(inputs, **specific)
    owner, given = type(layer).__name__, ", ".join(f"{name}=..." for name in refused)
    advice = (
        f"Call two layers instead, `{owner}(...)(x, {given})` and `{owner}(..., "
        f"go_backwards=True)(x, {given})`, and reverse the outputs of the second over time with "
        "`keras.ops.flip(y, axis=1)`."
    )
    if "return_state" in refused:
        advice = f"Pass it to the wrapped layer: `{owner}(..., return_state=True)`."
    raise ValueError(
        f"`keras.layers.Bidirectional` passes only `mask` and `initial_state` to the wrapped "
        f"`{owner}`; got `{given}`. {advice}"
    )
