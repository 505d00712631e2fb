"""Step time by sequence length, equal tokens per step (Griffin, figure 3; TNL, figures 1 and 4).

The twin of TransNormerLLM replaces Lightning Attention with softmax attention and is otherwise
identical. On a CPU, times are process times, because other programs may run.
"""

import contextlib
import functools
import gc

import keras
import numpy as np
from constant_speed import times_and_memory
from runs import Panel, clock, yes
from tasks import GRIFFINS

from benchmarks.models import make_model
from keras_recurrent.layers import LocalAttention
from keras_recurrent.models import TransNormerBackbone, TransNormerCausalLM
from keras_recurrent.presets.transnormer import SIZES as PRESETS

TNL, TWIN = "TNL", "TNL with softmax"
MODELS = (*GRIFFINS, TNL, TWIN)
# Allowed increase of the step time over the shortest length: to four times that length, and to the
# longest.
BOUNDS = {"Hawk": (0.05, 0.08), "Griffin": (0.05, 0.08), TNL: (0.1, 0.1)}
SIZES = {  # lengths are tokens
    "griffins": ("tiny", "400m"),  # suffix of the preset, after the model's name
    "tnl": ("tiny", "385m"),
    "dtype": ("float32", "mixed_bfloat16"),
    "window": (128, 1024),  # of Griffin
    "lengths": ((256, 512, 1024, 4096), tuple(2**i for i in range(11, 18))),
    "tokens": (4096, 2**17),  # per step; a multiple of each length
    "remat": (0, 1),  # 1: rematerialize blocks in the backward pass
    "longest_step": (60.0, 20.0),  # seconds; longer lengths are skipped if a step may take longer
}


class Twin(TransNormerBackbone):
    """The network of TransNormerLLM with causal softmax attention."""

    def make_mixer(self, i, **kwargs):
        heads = {"num_key_value_heads": self.num_heads, "head_dim": self.head_dim}
        return LocalAttention(self.num_heads, **heads, **kwargs)


@functools.lru_cache(maxsize=1)
def build(name, suffix, size):
    keras.utils.set_random_seed(0)
    window = {"sliding_window": size.window} if name == "Griffin" else {}
    with keras.RematScope(mode="full") if size.remat else contextlib.nullcontext():
        if name == TWIN:
            sizes = PRESETS[f"tnl_{suffix}"].backbone_arguments
            model = TransNormerCausalLM(Twin(**sizes, dtype=size.dtype))
        else:
            model = make_model(f"{name.lower()}_{suffix}", size.dtype, **window)
    model.compile("sgd", model.loss)
    return model


def runs(size, results):
    for name in MODELS:
        preset = size.griffins if name in GRIFFINS else size.tnl
        for length in size.lengths:
            key = {"model": name, "preset": preset, "tokens": size.tokens, "length": length}
            yield key
            times = [line["seconds"] for line in results.select(**key)]
            if times and 2 * np.median(times) > size.longest_step:
                break


def measure(key, seeds, size, data):
    """Times a step once for each of the seeds."""
    model, length = build(key["model"], key["preset"], size), key["length"]
    gc.collect()  # frees the previous model
    shape = size.tokens // length, length + 1
    rows = np.random.default_rng(0).integers(0, model.backbone.vocabulary_size, shape)
    tokens, y = rows[:, :-1].astype("int32"), rows[:, 1:].astype("int32")
    x = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
    now, description = clock()
    times, memory = times_and_memory(lambda: model.train_on_batch(x, y), len(seeds), now)
    common = {"memory": memory, "parameters": model.count_params(), "time": description}
    return [{"seconds": round(seconds, 4), **common} for seconds in times]


def judge(name, found, lengths):
    """Formats the verdict on the medians of a model's relative times."""
    middle = {length: np.median(times) for length, times in found.items()}
    if name not in BOUNDS:
        values = list(middle.values())
        return f"rises: {yes(values == sorted(values) and values[-1] > 1.05)}"
    near, far = BOUNDS[name]
    up_to = [n for n in lengths if n <= 4 * lengths[0]]
    said = []
    for bound, places in ((near, up_to), (far, lengths)):
        holds = yes(max(middle[n] for n in places if n in middle) <= 1 + bound)
        said.append(f"{holds}: within {100 * bound:.0f} % to {places[-1]:,}")
    return "; ".join(said)


def panels(results, size):
    """Step times by length, relative to the median at the shortest length."""
    times = results.curves(runs(size, results), "model", "length", lambda line: line["seconds"])
    curves = {
        name: {
            length: of_seeds / np.median(found[size.lengths[0]])
            for length, of_seeds in found.items()
        }
        for name, found in times.items()
    }
    verdicts = {name: judge(name, curve, size.lengths) for name, curve in curves.items()}
    labels = f"sequence length ({size.tokens:,} tokens per step)", "relative step time"
    groups = {"Griffin": GRIFFINS, TNL: (TNL, TWIN)}
    return [
        Panel(title, *labels, {name: curves.get(name, {}) for name in names}, verdicts, digits=2)
        for title, names in groups.items()
    ]
