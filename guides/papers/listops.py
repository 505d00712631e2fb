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

import keras
import numpy as np
from keras import ops
from runs import Panel, clear, yes
from synthetic.list_ops import list_ops
from tasks import learn

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
    "every": (50, 150),  # steps between tests
    "learning_rate": (3e-3, 1e-3),
    "dtype": ("float32", "mixed_bfloat16"),
}


def examples(shortest, longest, length, seed):
    """Returns `CHUNK` sequences [CHUNK, length] and their classes."""
    tokens, labels = list_ops(CHUNK, min_length=shortest, max_length=longest, seed=seed)
    return np.pad(tokens, ((0, 0), (0, length - longest))).astype("uint8"), labels


def prepare(size, text):
    """Returns sequences and their classes; the first `test_rows` are for testing."""
    count = size.test_rows + size.examples
    seeds = range(-(-count // CHUNK))
    # Other processes lack the class of `size`.
    make = functools.partial(examples, size.shortest, size.longest, size.length)
    workers = min(16, len(os.sched_getaffinity(0)))
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, context) as pool:
        # A process takes longer to start than a single chunk.
        chunks = (map if len(seeds) == 1 else pool.map)(make, seeds)
        return [np.concatenate(part)[:count] for part in zip(*chunks, strict=True)]


def add_reverse(layer, x, mask):
    """Adds a layer's outputs for a sequence and, flipped back, for the reversed sequence."""
    both, masks = (ops.concatenate([v, ops.flip(v, axis=1)]) for v in (x, mask))
    forward, backward = ops.split(layer(both, mask=masks), 2)
    return forward + ops.flip(backward, axis=1)


def token_mixer(name, size, i):
    """Returns the layer of block i that mixes tokens."""
    if name == "HGRN2":
        return BidirectionalHGRN2(expand_ratio=size.width // HEADS)
    if name == "RecurrentBlock":
        return RecurrentBlock(size.width)
    if name == "GRU":
        return keras.layers.GRU(size.width, return_sequences=True)
    sizes = {"head_dim": size.width // HEADS, "layer_index": i, "num_layers": size.num_layers}
    return LightningAttention(HEADS, use_lrpe=i == 0, **sizes)


def build(name, size, seed):
    """Builds a classifier of sequences: residual blocks, the mean over tokens, logits."""
    keras.utils.set_random_seed(seed)
    keras.config.set_dtype_policy(size.dtype)
    tokens = keras.Input((None,), dtype="int32")
    x, mask = keras.layers.Embedding(16, size.width)(tokens), ops.not_equal(tokens, 0)
    bounds = LowerBounds(size.num_layers)(x) if name == "HGRN2" else None
    for i in range(size.num_layers):
        mixer, y = token_mixer(name, size, i), keras.layers.LayerNormalization()(x)
        if bounds is None:
            y = add_reverse(mixer, y, mask)
        else:
            y = mixer(y, lower_bound=bounds[i - 1] if i else None, mask=mask)
        x = keras.layers.add([x, y])
        inner = (PARAMETERS * size.width**2 - mixer.count_params()) // (3 * size.width)
        x = keras.layers.add([x, SwiGLU(inner)(keras.layers.LayerNormalization()(x))])
    x = keras.layers.GlobalAveragePooling1D()(keras.layers.LayerNormalization()(x), mask=mask)
    outputs = keras.layers.Dense(10, dtype="float32")(x)
    keras.config.set_dtype_policy("float32")
    return keras.Model(tokens, outputs)


def runs(size, results):
    for name in ("HGRN2", "RecurrentBlock", "lightning attention", "GRU"):
        is_gru = name == "GRU"
        rows, steps = (size.gru_rows, size.gru_steps) if is_gru else (size.rows, size.steps)
        common = {"length": size.length, "rows_a_step": rows, "most_steps": steps}
        if not is_gru or keras.config.backend() == "jax":
            yield {"model": name, "width": size.width, **common}


def measure(key, seeds, size, data):
    def task(count, seed):
        rows = np.arange(count)
        if seed:
            training = len(data[0]) - size.test_rows
            rows = size.test_rows + np.random.default_rng(seed).integers(0, training, count)
        tokens, labels = (part[rows] for part in data)
        return tokens.astype("int32"), labels, np.ones(count, "float32")

    models = [build(key["model"], size, seed) for seed in seeds]
    rows, steps = key["rows_a_step"], key["most_steps"]
    return learn(models, seeds, task, size, rows, steps, size.learning_rate, steps // 10)


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
    labels = f"ListOps, {size.length:,} tokens", "examples", "right, %"
    return [Panel(*labels, curves, verdicts, 1, scale="linear", last=True)]
