"""Classification of ListOps by HGRN2 and other layers (HGRN2, section 4.3, table 10).

The paper uses the configuration of HGRN: six layers of width 128 in both directions, the mean over
all tokens, batches of 50, a learning rate of 0.001, 40 passes over 96,000 sequences of 500 to 2,000
tokens. The four models here have equal parameter counts: the channel mixers are sized accordingly.
A layer runs over a sequence and, with the same weights, over its reverse; the outputs are added.
The time of a GRU's step hardly depends on the batch size, so its batches are larger.
"""

import concurrent.futures
import functools
import multiprocessing
import os
import types

import keras
import numpy as np
from keras import ops
from runs import Panel, clear, yes
from synthetic.list_ops import list_ops
from tasks import learn
from training import apply

from keras_recurrent.layers import (
    BidirectionalHGRN2,
    LightningAttention,
    LowerBounds,
    RecurrentBlock,
    SwiGLU,
)

SEEDS = 2, 2
HEADS = 4
PARAMETERS = 10  # of a block, in units of the squared width
CHUNK = 500  # sequences that one process generates at a time
PAPER = {"HGRN2": "60.52", "RecurrentBlock": "32.34, Griffin"}
SIZES = {
    "width": (32, 128),
    "num_layers": (2, 6),
    "shortest": (20, 500),  # tokens of a sequence, without padding
    "longest": (60, 2000),
    "length": (64, 2048),  # with padding
    "examples": (4000, 96_000),
    "test_rows": (500, 2000),
    "rows": (50, 50),  # batch size
    "steps": (400, 5000),
    "gru_rows": (50, 200),
    "gru_steps": (400, 220),
    "tests": (8, 10),  # points of a learning curve
    "learning_rate": (3e-3, 1e-3),
    "dtype": ("float32", "mixed_bfloat16"),
}


# --- 1. Data, generated in parallel ---


def examples(seed, shortest, longest, length):
    """Returns `CHUNK` sequences [CHUNK, length] and their classes."""
    tokens, labels = list_ops(CHUNK, min_length=shortest, max_length=longest, seed=seed)
    return np.pad(tokens, ((0, 0), (0, length - longest))).astype("uint8"), labels


def prepare(size, text):
    """Returns training and test examples; the first chunks are test examples."""
    chunks = -(-(size.examples + size.test_rows) // CHUNK)
    lengths = {"shortest": size.shortest, "longest": size.longest, "length": size.length}
    if chunks == 1:  # a process takes longer to start
        found = zip(examples(0, **lengths), strict=True)
    else:
        make = functools.partial(examples, **lengths)  # other processes lack the class of `size`
        workers = min(16, len(os.sched_getaffinity(0)))
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(workers, context) as pool:
            found = zip(*pool.map(make, range(chunks)), strict=True)
    tokens, labels = (np.concatenate(part) for part in found)
    at = [size.test_rows, size.test_rows + size.examples]
    (test, training, _), (test_labels, training_labels, _) = (
        np.split(tokens, at),
        np.split(labels, at),
    )
    return (training, training_labels), (test, test_labels)


# --- 2. The models ---


class BothDirections(keras.layers.Layer):
    """Adds a layer's outputs for a sequence and, flipped back, for the reversed sequence."""

    def __init__(self, layer, **kwargs):
        super().__init__(**kwargs)
        self.layer = layer
        self.supports_masking = True

    def build(self, input_shape):
        self.layer.build(input_shape)

    def call(self, x, mask=None):
        x, mask = (ops.concatenate([v, ops.flip(v, axis=1)]) for v in (x, mask))
        forward, backward = ops.split(self.layer(x, mask=mask), 2)
        return forward + ops.flip(backward, axis=1)

    def compute_output_spec(self, x, mask=None):
        return keras.KerasTensor(x.shape, dtype=self.compute_dtype)


def token_mixers(name, size):
    """Returns the layers of a model that mix tokens."""
    if name == "HGRN2":
        return [
            BidirectionalHGRN2(expand_ratio=size.width // HEADS) for _ in range(size.num_layers)
        ]
    make = {
        "RecurrentBlock": lambda i: RecurrentBlock(size.width),
        "lightning attention": lambda i: LightningAttention(
            HEADS,
            head_dim=size.width // HEADS,
            layer_index=i,
            num_layers=size.num_layers,
            use_lrpe=i == 0,
        ),
        "GRU": lambda i: keras.layers.GRU(size.width, return_sequences=True),
    }[name]
    return [BothDirections(make(i)) for i in range(size.num_layers)]


def build(name, size, seed):
    """Builds a classifier of sequences: residual blocks, the mean over tokens, logits."""
    keras.utils.set_random_seed(seed)
    keras.config.set_dtype_policy(size.dtype)
    tokens = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(16, size.width, mask_zero=True)(tokens)
    bounds = LowerBounds(size.num_layers)(x) if name == "HGRN2" else None
    for i, mixer in enumerate(token_mixers(name, size)):
        bound = {"lower_bound": bounds[i - 1]} if bounds is not None and i else {}
        x = keras.layers.add([x, mixer(keras.layers.LayerNormalization()(x), **bound)])
        inner = (PARAMETERS * size.width**2 - mixer.count_params()) // (3 * size.width)
        x = keras.layers.add([x, SwiGLU(inner)(keras.layers.LayerNormalization()(x))])
    x = keras.layers.GlobalAveragePooling1D()(keras.layers.LayerNormalization()(x))
    outputs = keras.layers.Dense(10, dtype="float32")(x)
    keras.config.set_dtype_policy("float32")
    return keras.Model(tokens, outputs)


# --- 3. Training ---


def batch_of(name, size):
    """Returns the batch size and the number of steps of a model."""
    return (size.gru_rows, size.gru_steps) if name == "GRU" else (size.rows, size.steps)


def runs(size, results):
    for name in ("HGRN2", "RecurrentBlock", "lightning attention", "GRU"):
        rows, steps = batch_of(name, size)
        common = {"length": size.length, "rows_a_step": rows, "most_steps": steps}
        if name != "GRU" or keras.config.backend() == "jax":
            yield {"model": name, "width": size.width, **common}


def measure(key, seeds, size, data):
    (tokens, labels), (test, test_labels) = data
    rows, steps = batch_of(key["model"], size)

    def task(count, seed):
        if not seed:
            return test.astype("int32"), test_labels, np.ones(count)
        chosen = np.random.default_rng(seed).integers(0, len(tokens), count)
        return tokens[chosen].astype("int32"), labels[chosen], np.ones(count, "float32")

    models = [build(key["model"], size, seed) for seed in seeds]
    every = types.SimpleNamespace(test_rows=len(test), every=steps // size.tests)
    return learn(
        models, seeds, task, every, rows, steps, size.learning_rate, steps // 10, logits=apply
    )


# --- 4. Results ---


def panels(results, size):
    curves, verdicts = {}, {}
    for key in runs(size, results):
        lines = results.select(**key)
        for step in lines[0]["right_after"] if lines else ():
            shares = np.array([100 * line["right_after"][step] for line in lines])
            curves.setdefault(key["model"], {})[int(step) * key["rows_a_step"]] = shares
    last = {name: list(curve.values())[-1] for name, curve in curves.items()}
    for name, shares in last.items():
        verdicts[name] = f"{max(curves[name]):,} examples; the paper has {PAPER.get(name, 'none')}"
        if name != "HGRN2" and "HGRN2" in last:
            verdicts[name] += f"; {yes(clear(shares, last['HGRN2']))}: HGRN2 clearly above"
    title = f"ListOps, {size.length:,} tokens"
    return [Panel(title, "examples", "right, %", curves, verdicts, 1, logarithmic=False, last=True)]
