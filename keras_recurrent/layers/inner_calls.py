"""Calls of inner layers without Keras's `__call__` overhead, where that is safe."""

from keras_recurrent.dispatch import BACKEND

if BACKEND == "torch":
    from keras_recurrent.layers.torch_calls import call_plain, is_plain


class InnerCalls:
    """Mixin of layers and networks that call layers inside them."""

    def inner(self, layer, inputs, **kwargs):
        """Calls a layer inside this one, `layer(inputs, **kwargs)`, with little overhead.

        On torch, Keras's `__call__` takes 50 microseconds of host time, a launch of a matrix
        product 10. A block has twelve calls, which would dominate steps of few tokens. If
        `torch_calls.is_plain` allows it, the layer is called without this overhead.
        """
        if BACKEND == "torch" and is_plain(self, layer, inputs):
            return call_plain(layer, inputs, **kwargs)
        return layer(inputs, **kwargs)
