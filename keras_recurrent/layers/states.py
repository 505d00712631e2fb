"""Structure and initial values of the states of layers."""

import keras
from keras import ops

from keras_recurrent.checks.states import check_sizes_of_state
from keras_recurrent.layers.remat import RecomputableLayer
from keras_recurrent.layers.tokens import initial_places, place_specs


class StatefulLayer(RecomputableLayer):
    """Base class of layers with a state, which contains the states of their sublayers."""

    def streaming_sublayers(self):
        """Returns `{name: layer}` of the sublayers whose states are parts of this layer's state."""
        return {}

    def own_state_spec(self, batch_size=None):
        """Returns the layer's part of a state, as `KerasTensor`s.

        It has neither `segment` nor `position`.
        """
        self._check_built()
        inside = self.streaming_sublayers()
        return {name: layer.own_state_spec(batch_size) for name, layer in inside.items()}

    def own_initial_state(self, batch_size, max_length=None):
        """Returns the layer's part of `get_initial_state`."""
        return self._zeros(self.own_state_spec(), batch_size, max_length)

    def _zeros(self, spec, batch_size, max_length):
        """Makes `own_initial_state` from `own_state_spec`, computed once for all sublayers."""
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

    def add_recent_tokens(self, state):
        """Returns the layer's part of a state with recent tokens, for steps of many sequences.

        A layer with a large state adds arrays for the latest tokens, and its fused step writes the
        state only every few tokens. Other calls do not take such states.
        """
        inside = self.streaming_sublayers()
        return {
            name: inside[name].add_recent_tokens(part) if name in inside else part
            for name, part in state.items()
        }

    @property
    def uses_position(self):
        """True if the layer or a sublayer reads `tokens.position`. A subclass may set it."""
        return any(layer.uses_position for layer in self.streaming_sublayers().values())

    @property
    def keeps_state(self):
        """True if the layer can return a state without an `initial_state`.

        Attention to all tokens cannot, because the capacity of its KV cache is unknown.
        """
        return all(layer.keeps_state for layer in self.streaming_sublayers().values())

    def state_spec(self, batch_size=None):
        """Returns the structure of the state, as `KerasTensor`s.

        Sizes of None may differ between states: the batch if `batch_size` is None, and the capacity
        of a KV cache, which `max_length` of `get_initial_state` limits.
        """
        spec = self.own_state_spec(batch_size)
        return in_order({**spec, **place_specs(batch_size, self.uses_position)})

    def get_initial_state(self, batch_size, max_length=None):
        """Returns the state before the first token, for `batch_size` sequences.

        `max_length` is the maximum number of tokens of a sequence, for layers that cache all of
        them; it has no effect on a state of fixed size.

        Raises:
            ValueError: a number is not an integer of at least 1, or `max_length` is missing.
        """
        check_sizes_of_state(batch_size, max_length)
        state = self.own_initial_state(batch_size, max_length)
        return in_order({**state, **initial_places(batch_size, self.uses_position)})

    def array_spec(self, batch_size, *shape):
        """Returns the spec of an array of the state, a `KerasTensor` `[batch_size, *shape]`."""
        return keras.KerasTensor((batch_size, *shape), dtype=self.state_dtype)

    def no_bound(self):
        """Returns the `ValueError` for a state of unknown size."""
        return ValueError(
            f"The state of `{type(self).__name__}` caches all tokens of a document, and its "
            "capacity is unknown. Give the layer a `max_length`, in tokens, or start from "
            "`get_initial_state(batch_size, max_length=...)`."
        )

    def _check_built(self):
        if not self.built:
            raise ValueError(
                f"The state of `{type(self).__name__}` is as wide as its inputs, whose width is "
                "unknown. Call the layer first, or `layer.build((None, None, width))`."
            )


def in_order(state):
    """Sorts a dict by name, the order in which Keras flattens it."""
    return dict(sorted(state.items()))
