"""States of layers: their structure and initial values."""

import keras
from keras import ops

from keras_recurrent.checks.dtypes import accumulation_dtype
from keras_recurrent.checks.states import check_sizes_of_state
from keras_recurrent.layers.remat import RecomputableLayer
from keras_recurrent.layers.tokens import initial_places, place_specs


class StatefulLayer(RecomputableLayer):
    """Base class of layers that carry a state, of their own and of the layers inside."""

    def streaming_sublayers(self):
        """`{name: layer}` of the streaming layers inside, whose states are parts of its own."""
        return {}

    def own_state_spec(self, batch_size=None):
        """The layer's own part of a state, as `KerasTensor`s: `segment` and `position` aside."""
        self._check_built()
        inside = self.streaming_sublayers()
        return {name: layer.own_state_spec(batch_size) for name, layer in inside.items()}

    def own_initial_state(self, batch_size, max_length=None):
        """The layer's own part of `get_initial_state`."""
        return self._zeros(self.own_state_spec(), batch_size, max_length)

    def _zeros(self, spec, batch_size, max_length):
        """`own_initial_state` from `own_state_spec`, which is computed once for all layers."""
        inside, state = self.streaming_sublayers(), {}
        for name, part in spec.items():
            layer = inside.get(name)
            if layer is None:
                state[name] = ops.zeros((batch_size, *part.shape[1:]), part.dtype)
            elif type(layer).own_initial_state is StatefulLayer.own_initial_state:
                state[name] = layer._zeros(part, batch_size, max_length)
            else:
                state[name] = layer.own_initial_state(batch_size, max_length)
        return state

    @property
    def uses_position(self):
        """True if the layer, or one inside, reads `tokens.position`. A subclass may set it."""
        return any(layer.uses_position for layer in self.streaming_sublayers().values())

    @property
    def keeps_state(self):
        """True if the layer can return a state without an `initial_state`.

        Attention to all tokens cannot: the number of tokens that its state has room for is unknown.
        """
        return all(layer.keeps_state for layer in self.streaming_sublayers().values())

    def state_spec(self, batch_size=None):
        """The state's structure, as `KerasTensor`s.

        A size of None differs between states: the batch where `batch_size` is None, and the tokens
        that a state of attention has room for, which `max_length` of `get_initial_state` limits.
        """
        spec = self.own_state_spec(batch_size)
        return in_order({**spec, **place_specs(batch_size, self.uses_position)})

    def get_initial_state(self, batch_size, max_length=None):
        """The state before the first token, for `batch_size` sequences.

        `max_length` is the largest number of tokens in a sequence, for layers that keep all of
        them; it has no effect on a state of fixed size.

        Raises:
            ValueError: a number that is no integer from 1 on, or no `max_length` where it is
                needed.
        """
        check_sizes_of_state(batch_size, max_length)
        state = self.own_initial_state(batch_size, max_length)
        return in_order({**state, **initial_places(batch_size, self.uses_position)})

    @property
    def state_dtype(self):
        """The dtype of states and of the weights that make decays: never below float32."""
        return accumulation_dtype(self.compute_dtype)

    def array_spec(self, batch_size, *shape):
        """An array of the state."""
        return keras.KerasTensor((batch_size, *shape), dtype=self.state_dtype)

    def no_bound(self):
        """The `ValueError` for a state of unknown size."""
        return ValueError(
            f"The state of `{type(self).__name__}` keeps all of a document, and needs to know how "
            "much room to make. Give the layer a `max_length`, in tokens, or start from "
            "`get_initial_state(batch_size, max_length=...)`."
        )

    def _check_built(self):
        if not self.built:
            raise ValueError(
                f"The state of `{type(self).__name__}` is as wide as its inputs, which are not "
                "known yet. Call the layer first, or `layer.build((None, None, width))`."
            )


def in_order(state):
    """The dict sorted by name, the order in which Keras flattens it."""
    return {name: state[name] for name in sorted(state)}
