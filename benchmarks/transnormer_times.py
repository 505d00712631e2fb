"""Times training steps of TransNormerLLM and of attention layers, on one backend.

Prints JSON; `python benchmarks/transnormer.py` runs it for every backend and makes tables. Every
step has the same number of tokens: few long sequences or many short ones.
"""

import functools
import json

import keras
import numpy as np

from benchmarks.training_step import medians
from keras_recurrent.layers import LightningAttention
from keras_recurrent.models import TransNormerBackbone, TransNormerCausalLM

TOKENS, WIDTH, HEADS, LAYERS, VOCABULARY = 16_384, 256, 2, 2, 256
LENGTHS = [512 * 2**i for i in range(6)]
SHORTER = [128, 256]  # softmax attention may be faster


def language_model():
    backbone = TransNormerBackbone(
        vocabulary_size=VOCABULARY,
        num_layers=LAYERS,
        hidden_dim=WIDTH,
        intermediate_dim=11 * WIDTH // 4,
        num_heads=HEADS,
        head_dim=WIDTH // HEADS,
    )
    model = TransNormerCausalLM(backbone)
    model.compile("sgd", model.loss, weighted_metrics=[])
    return model


def model_step(model, length):
    """Returns a function without arguments: forward, backward and update of a model."""
    rng = np.random.default_rng(0)
    rows = rng.integers(0, VOCABULARY, (TOKENS // length, length + 1)).astype("int32")
    x = {"token_ids": rows[:, :-1], "padding_mask": np.ones_like(rows[:, 1:])}
    return functools.partial(model.train_on_batch, x, rows[:, 1:])


def lightning_attention(x):
    return LightningAttention(HEADS, head_dim=WIDTH // HEADS, layer_index=1, num_layers=3)(x)


def softmax_attention(x):
    layer = keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS, use_bias=False)
    return layer(x, x, use_causal_mask=True)


def layer_step(make, length):
    """Returns a function without arguments: a training step of a model of one layer."""
    inputs = keras.Input((None, WIDTH))
    model = keras.Model(inputs, make(inputs))
    model.compile("sgd", "mse")
    shape = (2, TOKENS // length, length, WIDTH)
    x, y = np.random.default_rng(0).normal(size=shape).astype("float32")
    return functools.partial(model.train_on_batch, x, y)


def main():
    model = language_model()
    steps = medians({length: model_step(model, length) for length in LENGTHS})
    layers = {
        (make.__name__, length): layer_step(make, length)
        for length in (*SHORTER, *LENGTHS)
        for make in (lightning_attention, softmax_attention)
    }
    times = medians(layers)
    print(
        json.dumps(
            {
                "steps": list(steps.items()),
                "layers": [
                    {
                        "length": length,
                        "lightning": times["lightning_attention", length],
                        "softmax": times["softmax_attention", length],
                    }
                    for length in (*SHORTER, *LENGTHS)
                ],
            }
        )
    )


if __name__ == "__main__":
    main()
