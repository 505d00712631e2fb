"""Small models to export, and inputs for them."""

import keras
import numpy as np

from keras_recurrent import layers, models
from tests.models.tiny import tiny_causal_lm

WIDTH = 6


def whole(layer):
    """A functional model around one layer, for sequences of any length."""
    x = keras.Input((None, WIDTH), name="x")
    return keras.Model(x, layer(x))


def step(layer):
    """One token, with the state as inputs and outputs."""
    layer.build((None, None, WIDTH))
    x = keras.Input((1, WIDTH), name="x")
    state = [
        keras.Input(part.shape[1:], dtype=part.dtype, name=f"state_{i}")
        for i, part in enumerate(keras.tree.flatten(layer.state_spec()))
    ]
    before = keras.tree.pack_sequence_as(layer.state_spec(), state)
    y, after = layer(x, initial_state=before, return_state=True)
    return keras.Model([x, *state], [y, *keras.tree.flatten(after)])


def packed(layer):
    """The same, with the document of each token as a second input."""
    x = keras.Input((None, WIDTH), name="x")
    segment_ids = keras.Input((None,), name="s", dtype="int32")
    return keras.Model([x, segment_ids], layer(x, segment_ids=segment_ids))


def gru_step():
    x, state = keras.Input((1, WIDTH), name="x"), keras.Input((4,), name="state_0")
    gru = keras.layers.GRU(4, return_sequences=True, return_state=True)
    return keras.Model([x, state], gru(x, initial_state=state))


def image_classifier():
    sizes = {"image_shape": (16, 16, 3), "patch_size": 4, "num_layers": 1}
    backbone = models.HGRN2VisionBackbone.from_preset(
        "hgrn2_vision_tiny", load_weights=False, **sizes
    )
    return models.HGRN2ImageClassifier(backbone, num_classes=5)


def text_classifier():
    """README's, which takes the output of the last real token."""
    ids = keras.Input((None,), dtype="int32", name="x")
    x = keras.layers.Embedding(50, WIDTH, mask_zero=True)(ids)
    x = layers.RecurrentBlock(8, return_sequences=False)(x)
    return keras.Model(ids, keras.layers.Dense(2)(x))


MODELS = {
    "gru": lambda: whole(keras.layers.GRU(4, return_sequences=True)),
    "gru, step": gru_step,
    "block": lambda: whole(layers.RecurrentBlock(8)),
    "block, step": lambda: step(layers.RecurrentBlock(8)),
    "hgrn2": lambda: whole(layers.HGRN2(expand_ratio=2)),
    "hgrn2, step": lambda: step(layers.HGRN2(expand_ratio=2)),
    "hgrn2, convolutions": lambda: whole(layers.HGRN2(expand_ratio=2, conv_size=3)),
    "convolution, step": lambda: step(layers.CausalConv1D(4, activation="silu")),
    "lightning": lambda: whole(layers.LightningAttention(2, head_dim=3)),
    "lightning, packed": lambda: packed(layers.LightningAttention(2, head_dim=3)),
    "griffin lm": lambda: tiny_causal_lm(family="griffin"),
    "hgrn2 lm": lambda: tiny_causal_lm(family="hgrn2"),
    "transnormer lm": lambda: tiny_causal_lm(family="transnormer"),
    "lightning_hybrid lm": lambda: tiny_causal_lm(family="lightning_hybrid"),
    "text classifier": text_classifier,
    "image classifier": image_classifier,
}


def draw(model, batch, length, seed=0):
    """{name: array} for the inputs of a model; padding stands anywhere in a row."""
    rng = np.random.default_rng(seed)

    def one(spec):
        shape = [batch, *(length if n is None else n for n in spec.shape[1:])]
        if spec.name == "padding_mask":
            return (rng.random(shape) < 0.8).astype("int32")
        if spec.name == "s":
            return np.sort(rng.integers(0, 4, shape)).astype(spec.dtype)
        if "int" in spec.dtype:
            return rng.integers(0, 50, shape).astype(spec.dtype)
        return rng.normal(size=shape).astype(spec.dtype)

    return {spec.name: one(spec) for spec in keras.tree.flatten(model.inputs)}


def structured(model, given):
    """The inputs as the model takes them."""
    if isinstance(model.input, dict):
        return given
    given = [given[spec.name] for spec in model.inputs]
    return given if len(given) > 1 else given[0]


def computed(model, given):
    """The outputs in their order."""
    outputs = model(structured(model, given), training=False)
    return [keras.ops.convert_to_numpy(t) for t in keras.tree.flatten(outputs)]
