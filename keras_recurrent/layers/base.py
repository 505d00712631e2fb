"""Base classes of layers: checks of their arguments, and states."""

import inspect

import keras
from keras import ops

from keras_recurrent.checks.dtypes import accumulation_dtype
from keras_recurrent.checks.shapes import check_rank_known, check_sizes_of_state
from keras_recurrent.devices.jax_layouts import flatten_tokens
from keras_recurrent.devices.torch_processes import RejectsFullyShard
from keras_recurrent.dispatch import BACKEND
from keras_recurrent.inherited_docstrings import InheritedDocstring
from keras_recurrent.layers import gru_arguments
from keras_recurrent.layers.initializers import clone_initializer
from keras_recurrent.layers.loss_scale import warn_if_unscaled
from keras_recurrent.layers.remat import no_further_remat, recompute
from keras_recurrent.layers.saved_quantization import SavedQuantization
from keras_recurrent.layers.tokens import initial_token_state, token_state_spec

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


class RecomputableLayer(
    SavedQuantization, InnerCalls, RejectsFullyShard, InheritedDocstring, keras.layers.Layer
):
    """Base class of layers: checks of their arguments, and `keras.RematScope` by `recompute`."""

    # {name: alternative} of arguments of `keras.layers.GRU` that the layer does not support.
    gru_alternatives = {"units": gru_arguments.ALTERNATIVES["units"]}

    _arguments: dict = {}  # set by `store_arguments`

    def __new__(cls, *args, **kwargs):
        gru_arguments.check_constructor_arguments(cls, args, kwargs)
        return super().__new__(cls, *args, **kwargs)

    def __init__(self, **kwargs):
        owner = type(self).__name__
        kwargs = gru_arguments.without_gru_arguments(owner, kwargs, self.gru_alternatives)
        gru_arguments.check_known_arguments(type(self), kwargs)
        super().__init__(**kwargs)

    def __call__(self, *args, **kwargs):
        # A single override of `__call__`: torch's compiler adds a dozen frames for each frame of
        # this stack, and deep models approach Python's recursion limit.
        return super().__call__(*args, **self.prepare_call(args, kwargs))

    def prepare_call(self, args, kwargs):
        """Checks the arguments of a call before Keras reads them; returns `kwargs`."""
        shape = getattr(args[0], "shape", None) if args else ()
        if shape is None or getattr(shape, "rank", 0) is None:  # Keras reads it
            check_rank_known(type(self).__name__, "inputs", args[0])
        if self.compute_dtype == "float16":
            warn_if_unscaled(self)
        return kwargs

    def store_arguments(self, cls, values):
        """Stores the arguments of the constructor of `cls`, from its `locals()`, as attributes.

        Arguments `..._initializer` and `..._activation` become objects. `get_config` returns the
        arguments, even if `build` has replaced an attribute None with a default.
        """
        self._arguments = {}
        for name in inspect.signature(cls.__init__).parameters:
            if name in ("self", "kwargs"):
                continue
            value = values[name]
            if name.endswith("_initializer"):
                value = keras.initializers.get(value)
            elif name.endswith("_activation"):
                value = keras.activations.get(value)
            self._arguments[name] = value
            setattr(self, name, value)

    def get_config(self):
        """Returns the arguments of the constructor that are attributes of the same name."""
        config = super().get_config()
        for name in gru_arguments.constructor_arguments(type(self)):
            if hasattr(self, name) and name not in config:
                value = self._arguments.get(name, getattr(self, name))
                config[name] = _serialize_argument(name, value)
        return config

    @property
    def state_dtype(self):
        """The dtype of states, angles and the weights of decays: at least float32."""
        return accumulation_dtype(self.compute_dtype)

    def make_sublayer(self, cls, *args, **kwargs):
        """Creates a layer inside this one, `cls(*args, **kwargs)`, with the same dtype policy.

        The inner layer is not rematerialized separately, and gets copies of the initializers.
        """
        for argument, value in kwargs.items():
            if argument.endswith("_initializer"):
                kwargs[argument] = clone_initializer(value)
        with no_further_remat():
            return cls(*args, dtype=self.dtype_policy, **kwargs)

    def make_dense(self, units, name, use_bias=False, input_shape=None):
        """Creates a `Dense` inside this layer, with the layer's initializers.

        input_shape: tuple, the shape for which it is built. None: it is not built.
        """
        initializers = {"kernel_initializer": self.kernel_initializer}
        if use_bias:
            initializers["bias_initializer"] = self.bias_initializer
        dense = self.make_sublayer(
            keras.layers.Dense, units, use_bias=use_bias, name=name, **initializers
        )
        if input_shape is not None:
            dense.build(input_shape)
        return dense

    def project(self, dense, inputs):
        """Applies a `Dense` inside this layer to `[B, T, D]`, called with a matrix `[B * T, D]`.

        The gradient of the weight is a sum over all tokens. With two axes of tokens, XLA on CPUs
        would first copy the gradient of the output to transpose it. Inputs of variable sizes, as in
        an export, are not reshaped.
        """
        if BACKEND == "torch" and is_plain(self, dense, inputs):
            return call_plain(dense, inputs)  # torch's product reshapes its inputs
        if not all(isinstance(size, int) for size in inputs.shape):
            return dense(inputs)
        tokens, restore_time = flatten_tokens(inputs)
        return restore_time(dense(tokens))

    def add_state_weight(self, name, shape, initializer, weight_decay=True):
        """Adds a weight in `state_dtype`, which Keras does not cast to the compute dtype.

        `weight_decay=False`, for weights of decays: `exclude_from_weight_decay` excludes it.
        """
        initializer, dtype = clone_initializer(initializer), self.state_dtype
        weight = self.add_weight(shape, initializer, dtype, autocast=False, name=name)
        weight.weight_decay = weight_decay
        return weight

    def rematerialized_call(self, layer_call, *args, **kwargs):
        if super().rematerialized_call(layer_call, *args, **kwargs) is layer_call:
            return layer_call  # created outside a `keras.RematScope`, or in one for other layers
        return recompute(layer_call)


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
        return in_order({**spec, **token_state_spec(batch_size, self.uses_position)})

    def get_initial_state(self, batch_size, max_length=None):
        """Returns the state before the first token, for `batch_size` sequences.

        `max_length` is the maximum number of tokens of a sequence, for layers that cache all of
        them; it has no effect on a state of fixed size.

        Raises:
            ValueError: a number is not an integer of at least 1, or `max_length` is missing.
        """
        check_sizes_of_state(batch_size, max_length)
        state = self.own_initial_state(batch_size, max_length)
        return in_order({**state, **initial_token_state(batch_size, self.uses_position)})

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
    return {name: state[name] for name in sorted(state)}  # torch.compile sorts no tuples


def cast(tensor, dtype):
    """Casts a tensor unless it has this dtype: `keras.ops.cast` takes long on the host."""
    same = keras.backend.standardize_dtype(tensor.dtype) == dtype
    return tensor if same else ops.cast(tensor, dtype)


def _serialize_argument(name, value):
    """Returns an argument of a layer for its configuration: a number, string or dictionary."""
    if not callable(value):
        return value
    if name.endswith("activation"):
        return keras.activations.serialize(value)
    return keras.saving.serialize_keras_object(value)
