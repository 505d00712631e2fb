"""Arguments of `keras.layers.GRU` and `LSTM` that layers do not have, and what to do instead."""

_IN_THE_EQUATION = "The layer's equation, in its docstring, says what there is: leave it out."
_OF_WEIGHTS = (
    "Give the optimizer a `weight_decay`, as in `keras.optimizers.AdamW(weight_decay=0.1)`, or, "
    "once the layer is built, set `weight.{kind} = ...` on those of `layer.trainable_weights` that "
    "should have one."
)
_BOTH_DIRECTIONS = "Every output has seen all tokens, in both directions."

INSTEAD = {
    "units": "The output is as wide as the input: put a `keras.layers.Dense` before or behind it.",
    "dropout": "Put `keras.layers.Dropout(rate)` before or behind the layer.",
    "recurrent_dropout": "What goes from token to token is kept: put `keras.layers.Dropout(rate)` "
    "before or behind the layer.",
    **{
        f"{weights}_{kind}": _OF_WEIGHTS.format(kind=kind)
        for weights in ("kernel", "recurrent", "bias")
        for kind in ("regularizer", "constraint")
    },
    "stateful": "No state is kept from call to call. Carry it: `y, state = layer(x, "
    "initial_state=state, return_state=True)`, with None as the first `state`; the docstring of "
    "`RecurrentBlock` has a model that keeps it from batch to batch.",
    "unroll": "There is no loop over tokens to unroll: leave it out.",
    "use_cudnn": "The fastest kernel is chosen by itself; `keras_recurrent.implementation(...)` "
    "insists on one.",
    "time_major": "Inputs are [batch, time, width]: transpose them.",
    "seed": "Calls draw no random numbers, and initializers have their own seeds: leave it out.",
    "recurrent_initializer": "There is no recurrent kernel: leave it out.",
    **dict.fromkeys(
        (
            *("activation", "recurrent_activation", "use_bias", "bias_initializer"),
            *("reset_after", "unit_forget_bias", "implementation"),
        ),
        _IN_THE_EQUATION,
    ),
}
# The further arguments that a layer in both directions does not have.
IN_BOTH_DIRECTIONS = {
    "return_sequences": _BOTH_DIRECTIONS
    + " `keras.layers.GlobalAveragePooling1D` behind it makes one of them all.",
    "return_state": _BOTH_DIRECTIONS + " There is no state to go on from.",
    "go_backwards": _BOTH_DIRECTIONS + " Neither does it need `keras.layers.Bidirectional`.",
    "zero_output_for_mask": "Multiply the output by the mask.",
}
# The values that ask for nothing: they are accepted.
NEUTRAL = {
    **{name: (None,) for name in INSTEAD if name.endswith(("regularizer", "constraint"))},
    **dict.fromkeys(("dropout", "recurrent_dropout"), (0, None)),
    **dict.fromkeys(("stateful", "unroll", "time_major"), (False,)),
    **{"use_cudnn": ("auto", False), "seed": (None,), "zero_output_for_mask": (None,)},
    **{"return_sequences": (True,), "return_state": (False,), "go_backwards": (False,)},
}


def without_gru_arguments(owner, kwargs, instead=INSTEAD):
    """The keyword arguments without those of a GRU that ask for nothing.

    Raises:
        ValueError: some ask for what `owner` does not have.
    """
    given = {name: value for name, value in kwargs.items() if name in instead}
    refused = [name for name, value in given.items() if value not in NEUTRAL.get(name, ())]
    if refused:
        reasons = " ".join(f"`{name}={given[name]!r}`: {instead[name]}" for name in refused)
        raise ValueError(f"`{owner}` has not all arguments of a GRU. {reasons}")
    return {name: value for name, value in kwargs.items() if name not in instead}
