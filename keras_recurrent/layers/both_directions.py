"""Calls of `keras.layers.Bidirectional` around layers of this package."""

import keras

from keras_recurrent import compat
from keras_recurrent.layers.streaming import StreamingLayer

HANDED_ON = ("sequences", "initial_state", "mask", "training")
OF_EVERY_LAYER = ("segment_ids", "return_state", "tokens", "inputs_mask")


def install():
    """Has calls of `keras.layers.Bidirectional` checked before Keras binds their arguments."""
    compat.check_before_calls(keras.layers.Bidirectional, check_bidirectional_call)


def check_bidirectional_call(wrapper, args, kwargs):
    """Raise for arguments that the layer inside would take, and the wrapper does not.

    Keras's own error names neither the layer nor what to do.
    """
    layer, inputs = wrapper.backward_layer, args[0] if args else kwargs.get("sequences")
    refused = {name: value for name, value in kwargs.items() if name not in HANDED_ON}
    if inputs is None or not refused or not isinstance(layer, StreamingLayer):
        return
    own = {name: value for name, value in refused.items() if name not in OF_EVERY_LAYER}
    layer.check_arguments(inputs, **own)  # an `HGRN2` knows what takes a bound in both directions
    owner, given = type(layer).__name__, ", ".join(f"{name}=..." for name in refused)
    mend = (
        f"Call two layers in its place, `{owner}(...)(x, {given})` and `{owner}(..., "
        f"go_backwards=True)(x, {given})`, and turn the outputs over time of the second around by "
        "`keras.ops.flip(y, axis=1)`."
    )
    if "return_state" in refused:
        mend = f"It is an argument of the layer inside: `{owner}(..., return_state=True)`."
    raise ValueError(
        f"`keras.layers.Bidirectional` hands on `mask` and `initial_state` alone; got `{given}` "
        f"for the `{owner}` inside. {mend}"
    )
