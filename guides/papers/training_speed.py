"""Step time by sequence length, equal tokens per step (Griffin, figure 3; TNL, figures 1 and 4).

The twin of TransNormerLLM replaces Lightning Attention with softmax attention and is otherwise
identical. On a CPU, times are process times, because other programs may run.
"""

import contextlib
import functools
import gc
import time

import keras
import numpy as np
from constant_speed import times_and_memory
from lightning_ablations import LanguageModel
from runs import Panel, machine, yes

from keras_recurrent.layers import LocalAttention, SimpleRMSNorm
from keras_recurrent.layers.reversible_embedding import reversible_embedding
from keras_recurrent.models import GriffinCausalLM, TransNormerCausalLM, TransNormerResidualBlock
from keras_recurrent.models.recurrent_backbone import RecurrentBackbone
from keras_recurrent.presets.transnormer import SIZES as PRESETS

GRIFFINS = {"Hawk": "hawk", "Griffin": "griffin", "MQA": "mqa"}
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


# --- 1. The models ---


@functools.lru_cache(maxsize=1)
def build(name, size):
    keras.utils.set_random_seed(0)
    scope = keras.RematScope(mode="full") if size.remat else contextlib.nullcontext()
    options = {"load_weights": False, "preprocessor": None, "dtype": size.dtype}
    with scope:
        if name in GRIFFINS:
            window = {"sliding_window": size.window} if name == "Griffin" else {}
            model = GriffinCausalLM.from_preset(
                f"{GRIFFINS[name]}_{size.griffins}", **options, **window
            )
        elif name == TNL:
            model = TransNormerCausalLM.from_preset(f"tnl_{size.tnl}", **options)
        else:
            model = twin(PRESETS[f"tnl_{size.tnl}"].backbone_arguments, size.dtype)
    model.compile("sgd", model.loss)
    return model


def twin(sizes, dtype):
    """Builds TransNormerLLM with causal softmax attention, with the same number of heads."""
    heads, head_dim = sizes["num_heads"], sizes["head_dim"]
    blocks = [
        TransNormerResidualBlock(
            LocalAttention(
                heads,
                num_key_value_heads=heads,
                head_dim=head_dim,
                dtype=dtype,
                name="temporal_block",
            ),
            sizes["intermediate_dim"],
            dtype=dtype,
            name=f"block_{i}",
        )
        for i in range(sizes["num_layers"])
    ]
    backbone = RecurrentBackbone(
        reversible_embedding(sizes["vocabulary_size"], sizes["hidden_dim"], False, dtype=dtype),
        blocks,
        SimpleRMSNorm(dtype=dtype, name="final_norm"),
        embedding_scale=sizes["hidden_dim"] ** 0.5,
        dtype=dtype,
    )
    backbone.vocabulary_size = sizes["vocabulary_size"]
    return LanguageModel(backbone)


# --- 2. Steps ---


def key_of(name, size, length):
    preset = size.griffins if name in GRIFFINS else size.tnl
    return {"model": name, "preset": preset, "tokens": size.tokens, "length": length}


def runs(size, results):
    for name in MODELS:
        for length in size.lengths:
            yield key_of(name, size, length)
            times = times_of(results, name, size, length)
            if len(times) and 2 * np.median(times) > size.longest_step:
                break


def measure(key, seeds, size, data):
    """Times a step once for each of the seeds."""
    model, length = build(key["model"], size), key["length"]
    gc.collect()  # frees the previous model
    shape = size.tokens // length, length + 1
    rows = np.random.default_rng(0).integers(0, model.backbone.vocabulary_size, shape)
    tokens, y = rows[:, :-1].astype("int32"), rows[:, 1:].astype("int32")
    x = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
    on_cpu = "CPU" in machine()
    clock = time.process_time if on_cpu else time.perf_counter
    times, memory = times_and_memory(lambda: model.train_on_batch(x, y), len(seeds), clock)
    common = {"memory": memory, "parameters": model.count_params()}
    common["time"] = "of the CPUs" if on_cpu else "that passed"
    return [{"seconds": round(seconds, 4), **common} for seconds in times]


# --- 3. Results ---


def times_of(results, name, size, length):
    return np.array([line["seconds"] for line in results.select(**key_of(name, size, length))])


def ratios(results, name, size):
    """Returns step times by length, relative to the median at the shortest length."""
    shortest = np.median(times_of(results, name, size, size.lengths[0]))
    found = {length: times_of(results, name, size, length) for length in size.lengths}
    return {length: times / shortest for length, times in found.items() if len(times)}


def judge(name, found, lengths):
    """Formats the verdict on the medians of a model's ratios."""
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
    found: list[Panel] = []
    for title, names in (("Griffin", tuple(GRIFFINS)), (TNL, (TNL, TWIN))):
        curves = {name: ratios(results, name, size) for name in names}
        verdicts = {name: judge(name, curve, size.lengths) for name, curve in curves.items()}
        xlabel = f"sequence length ({size.tokens:,} tokens per step)"
        found.append(Panel(title, xlabel, "relative step time", curves, verdicts, digits=2))
    return found
