"""Arguments of `keras.layers.GRU` and `LSTM` that layers do not support, and alternatives."""

import difflib
import inspect

import keras

# Arguments of every layer of Keras. `input_shape` and `input_dim` are older ones.
KERAS_ARGUMENTS = (*inspect.signature(keras.Layer.__init__).parameters, "input_shape", "input_dim")

_FIXED_EQUATION = "The equation in the layer's docstring is fixed: leave the argument out."
_WEIGHT_ALTERNATIVE = (
    "Give the optimizer a `weight_decay`, as in `keras.optimizers.AdamW(weight_decay=0.1)`, or, "
    "after the layer is built, set `weight.{kind} = ...` on the chosen "
    "`layer.trainable_weights`."
)
_BIDIRECTIONAL = "Every output has seen all tokens, in both directions."

ALTERNATIVES = {
    "units": "The output is as wide as the input: add a `keras.layers.Dense` before or after the "
    "layer.",
    "dropout": "Add `keras.layers.SpatialDropout1D(rate)` before the layer.",
    "recurrent_dropout": "The recurrence has no dropout: add `keras.layers.Dropout(rate)` before "
    "or after the layer.",
    **{
        f"{weights}_{kind}": _WEIGHT_ALTERNATIVE.format(kind=kind)
        for weights in ("kernel", "recurrent", "bias")
        for kind in ("regularizer", "constraint")
    },
    "stateful": "The layer stores no state between calls. Pass it: `y, state = layer(x, "
    "initial_state=state, return_state=True)`, with None as the first `state`; the docstring of "
    "`RecurrentBlock` names a recipe that stores it between batches.",
    "unroll": "There is no loop over tokens to unroll: leave it out.",
    **dict.fromkeys(
        ("use_cudnn", "implementation"),
        "The fastest kernel is chosen automatically; `keras_recurrent.implementation(...)` selects "
        "a specific one.",
    ),
    "time_major": "Inputs are [batch, time, width]: transpose them.",
    "seed": "Calls draw no random numbers, and initializers have their own seeds: leave it out.",
    "recurrent_initializer": "There is no recurrent kernel: leave it out.",
    **dict.fromkeys(
        (
            *("activation", "recurrent_activation", "use_bias", "bias_initializer"),
            *("reset_after", "unit_forget_bias"),
        ),
        _FIXED_EQUATION,
    ),
}
# Further arguments that a bidirectional layer does not support.
BIDIRECTIONAL_ALTERNATIVES = {
    "return_sequences": _BIDIRECTIONAL
    + " To reduce them to one, add `keras.layers.GlobalAveragePooling1D` after the layer.",
    "return_state": _BIDIRECTIONAL + " There is no state to continue from.",
    "go_backwards": _BIDIRECTIONAL + " `keras.layers.Bidirectional` is not needed either.",
    "zero_output_for_mask": "Multiply the output by the mask.",
}
# Values without an effect, which are accepted.
NEUTRAL = {
    **{name: (None,) for name in ALTERNATIVES if name.endswith(("regularizer", "constraint"))},
    **dict.fromkeys(("dropout", "recurrent_dropout"), (0, None)),
    **dict.fromkeys(("stateful", "unroll", "time_major"), (False,)),
    **{"use_cudnn": ("auto", False), "seed": (None,), "zero_output_for_mask": (None,)},
    **{"return_sequences": (True,), "return_state": (False,), "go_backwards": (False,)},
}


def without_gru_arguments(owner, kwargs, alternatives):
    """Removes arguments of a GRU whose values have no effect from keyword arguments.

    Raises:
        ValueError: other values, which `owner` does not support.
    """
    given = {name: value for name, value in kwargs.items() if name in alternatives}
    unsupported = [name for name, value in given.items() if value not in NEUTRAL.get(name, ())]
    if unsupported:
        advice = " ".join(f"`{name}={given[name]!r}`: {alternatives[name]}" for name in unsupported)
        raise ValueError(f"`{owner}` does not support these arguments. {advice}")
    return {name: value for name, value in kwargs.items() if name not in alternatives}


def check_constructor_arguments(cls, args, kwargs):
    """Raises a helpful error if a layer's arguments do not fit the signature of its `__init__`.

    Raises:
        TypeError: there are too many positional arguments, such as the `units` of a GRU, or a
            required argument is missing.
        ValueError: an argument of a GRU is not supported, as in `without_gru_arguments`.
    """
    signature = inspect.signature(cls.__init__)
    try:
        signature.bind(None, *args, **kwargs)
    except TypeError as error:
        unknown = {n: v for n, v in kwargs.items() if n not in signature.parameters}
        unknown = without_gru_arguments(cls.__name__, unknown, cls.gru_alternatives)
        message = f"`{cls.__name__}` got {', '.join(map(repr, args)) or 'nothing'} by position: "
        message += f"{error}."
        if any(isinstance(value, int) for value in args):
            message += f" The layer has no argument `units`. {cls.gru_alternatives['units']}"
        raise TypeError(f"{message} {_arguments(cls, unknown)}") from error


def check_known_arguments(cls, kwargs):
    """Raises an error with similar names if Keras would not accept keyword arguments.

    Raises:
        ValueError: some are not arguments of every layer of Keras.
    """
    if any(name not in KERAS_ARGUMENTS for name in kwargs):
        raise ValueError(f"`{cls.__name__}`: {_arguments(cls, kwargs)}")


def constructor_arguments(cls):
    """Returns the names of the arguments of a layer's constructor, except those of every layer."""
    bases = [base for base in cls.__mro__ if "__init__" in vars(base)]
    bases = bases[: bases.index(keras.Layer)]
    parameters = [p for b in bases for p in inspect.signature(b.__init__).parameters.values()]
    names = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return [name for name in dict.fromkeys(names) if name != "self"]


def _arguments(cls, given):
    """Returns sentences on the unknown ones of the given arguments, and the layer's arguments."""
    unknown, names = [n for n in given if n not in KERAS_ARGUMENTS], constructor_arguments(cls)
    similar = [close for name in unknown for close in difflib.get_close_matches(name, names, 1)]
    remedy = f"Did you mean {_quoted(similar)}? " if similar else ""
    sentence = f"The layer has no argument {_quoted(unknown)}. {remedy}" if unknown else ""
    return (
        f"{sentence}Its arguments are {_quoted(names) or 'none'}, and those of every Keras layer. "
        "Pass all but the first by keyword."
    )


def _quoted(names):
    return ", ".join(f"`{name}`" for name in names)
