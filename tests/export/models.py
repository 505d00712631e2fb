"""Small models to export, and inputs for them."""

import functools

import keras
import numpy as np

from keras_recurrent import layers
from tests.models.tiny import FAMILIES, tiny_causal_lm

WIDTH = 6


def sequence_model(layer):
    """A functional model around one layer, for sequences of any length."""
    x = keras.Input((None, WIDTH), name="x")
    return keras.Model(x, layer(x))


def step_model(layer):
    """A functional model of one token, with the state as inputs and outputs."""
    layer.build((None, None, WIDTH))
    x = keras.Input((1, WIDTH), name="x")
    state = [
        keras.Input(part.shape[1:], dtype=part.dtype, name=f"state_{i}")
        for i, part in enumerate(keras.tree.flatten(layer.state_spec()))
    ]
    before = keras.tree.pack_sequence_as(layer.state_spec(), state)
    y, after = layer(x, initial_state=before, return_state=True)
    return keras.Model([x, *state], [y, *keras.tree.flatten(after)])


def packed_model(layer):
    """A functional model with the document of each token as a second input."""
    x = keras.Input((None, WIDTH), name="x")
    segment_ids = keras.Input((None,), name="s", dtype="int32")
    return keras.Model([x, segment_ids], layer(x, segment_ids=segment_ids))


def gru_step():
    x, state = keras.Input((1, WIDTH), name="x"), keras.Input((4,), name="state_0")
    gru = keras.layers.GRU(4, return_sequences=True, return_state=True)
    return keras.Model([x, state], gru(x, initial_state=state))


def text_classifier():
    """The classifier of README, which uses the output of the last real token."""
    ids = keras.Input((None,), dtype="int32", name="x")
    x = keras.layers.Embedding(50, WIDTH, mask_zero=True)(ids)
    x = layers.RecurrentBlock(8, return_sequences=False)(x)
    return keras.Model(ids, keras.layers.Dense(2)(x))


MODELS = {
    "gru, step": gru_step,
    "block": lambda: sequence_model(layers.RecurrentBlock(8)),
    "block, step": lambda: step_model(layers.RecurrentBlock(8)),
    "hgrn2": lambda: sequence_model(layers.HGRN2(expand_ratio=2)),
    "hgrn2, step": lambda: step_model(layers.HGRN2(expand_ratio=2)),
    "hgrn2, convolutions": lambda: sequence_model(layers.HGRN2(expand_ratio=2, conv_size=3)),
    "convolution, step": lambda: step_model(layers.CausalConv1D(4, activation="silu")),
    "lightning": lambda: sequence_model(layers.LightningAttention(2, head_dim=3)),
    "lightning, packed": lambda: packed_model(layers.LightningAttention(2, head_dim=3)),
    "text classifier": text_classifier,
    **{f"{family} lm": functools.partial(tiny_causal_lm, family=family) for family in FAMILIES},
}


def draw(model, batch, length, seed=0):
    """Returns {name: array} for the inputs of a model; padding may be between real tokens."""
    rng = np.random.default_rng(seed)

    def draw_one(spec):
        shape = [batch, *(length if n is None else n for n in spec.shape[1:])]
        if spec.name == "padding_mask":
            return (rng.random(shape) < 0.8).astype("int32")
        if spec.name == "s":
            return np.sort(rng.integers(0, 4, shape)).astype(spec.dtype)
        if "int" in spec.dtype:
            return rng.integers(0, 50, shape).astype(spec.dtype)
        return rng.normal(size=shape).astype(spec.dtype)

    return {spec.name: draw_one(spec) for spec in keras.tree.flatten(model.inputs)}


def pack_inputs(model, inputs):
    """Returns `{name: array}` in the structure of the model's inputs."""
    if isinstance(model.input, dict):
        return inputs
    inputs = [inputs[spec.name] for spec in model.inputs]
    return inputs if len(inputs) > 1 else inputs[0]


def compute(model, inputs):
    """Returns the outputs as a list of arrays."""
    outputs = model(pack_inputs(model, inputs), training=False)
    return [keras.ops.convert_to_numpy(t) for t in keras.tree.flatten(outputs)]
