"""Calls an inner streaming layer without Keras's `__call__` overhead, where that is safe."""

from keras_recurrent.checks.dtypes import cast
from keras_recurrent.layers.autocast import weights_scope
from keras_recurrent.layers.remat import is_called_directly
from keras_recurrent.layers.states import in_order
from keras_recurrent.layers.tokens import check_handed_down


def stream_inner(outer, layer, inputs, tokens, state=None, return_state=True, **kwargs):
    """Calls a streaming layer inside another layer or a model.

    On torch, `layer.stream` and `layer.finish` are called directly if `is_called_directly` and the
    layer has no custom `call`; otherwise the layer itself is called.

    Args:
        outer: the layer or model that calls it.
        layer: a `StreamingLayer`.
        inputs: `[B, T, D]`.
        tokens: the `Tokens` of the outer layer.
        state: the inner layer's part of the state, or None.
        return_state: boolean, whether to return the next state.
        **kwargs: further arguments of `layer.stream`.

    Returns:
        `(output, next state)`; without `return_state` the latter is None.
    """
    if not is_called_directly(outer, layer, inputs) or "call" in vars(layer):
        kwargs |= {"tokens": tokens, "initial_state": state, "return_state": return_state}
        found = layer(inputs, **kwargs)
        return found if return_state else (found, None)
    check_handed_down(layer, tokens, None, None, state)
    with weights_scope(layer):
        output, after = layer.stream(inputs, tokens, state or {}, **kwargs)
        output = cast(layer.finish(output, inputs), layer.compute_dtype)
    return output, in_order(after) if return_state else None
