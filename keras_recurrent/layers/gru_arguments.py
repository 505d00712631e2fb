"""Arguments of `keras.layers.GRU` and `LSTM` that layers do not support, and alternatives."""

import inspect

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
    "dropout": "Add `keras.layers.Dropout(rate)` before or after the layer.",
    "recurrent_dropout": "The recurrence has no dropout: add `keras.layers.Dropout(rate)` before "
    "or after the layer.",
    **{
        f"{weights}_{kind}": _WEIGHT_ALTERNATIVE.format(kind=kind)
        for weights in ("kernel", "recurrent", "bias")
        for kind in ("regularizer", "constraint")
    },
    "stateful": "The layer stores no state between calls. Pass it: `y, state = layer(x, "
    "initial_state=state, return_state=True)`, with None as the first `state`; the docstring of "
    "`RecurrentBlock` has a model that stores it between batches.",
    "unroll": "There is no loop over tokens to unroll: leave it out.",
    "use_cudnn": "The fastest kernel is chosen automatically; "
    "`keras_recurrent.implementation(...)` selects a specific one.",
    "time_major": "Inputs are [batch, time, width]: transpose them.",
    "seed": "Calls draw no random numbers, and initializers have their own seeds: leave it out.",
    "recurrent_initializer": "There is no recurrent kernel: leave it out.",
    **dict.fromkeys(
        (
            *("activation", "recurrent_activation", "use_bias", "bias_initializer"),
            *("reset_after", "unit_forget_bias", "implementation"),
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
        TypeError: there are too many positional arguments, such as the `units` of a GRU.
        ValueError: an argument of a GRU is not supported, as in `without_gru_arguments`.
    """
    signature = inspect.signature(cls.__init__)
    try:
        signature.bind(None, *args, **kwargs)
        return
    except TypeError as error:
        cause = error
    _, *parameters = signature.parameters.values()
    names = [parameter.name for parameter in parameters]
    without_gru_arguments(
        cls.__name__, {n: v for n, v in kwargs.items() if n not in names}, cls.gru_alternatives
    )
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    surplus = args[len(positional) :]
    if not surplus:
        return  # Python's error names the missing or repeated argument
    values = ", ".join(map(repr, surplus))
    if positional:
        accepted = ", ".join(f"`{name}`" for name in positional)
        message = f"`{cls.__name__}` takes only {accepted} by position; got also {values}."
    else:
        message = f"`{cls.__name__}` takes no positional arguments; got {values}. There are no "
        message += f"`units`. {cls.gru_alternatives['units']}"
    keyword_only = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    named = [f"{name}={value!r}" for name, value in zip(keyword_only, surplus, strict=False)]
    if named:
        message += f" To set `{', '.join(named)}`, pass arguments by name."
    raise TypeError(message) from cause
