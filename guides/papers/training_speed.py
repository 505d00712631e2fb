"""Time of a training step by sequence length, at a constant number of tokens.

    make paper-training_speed                 # minutes; or, with the package installed:
    KERAS_BACKEND=jax python guides/papers/training_speed.py
    KERAS_BACKEND=torch python guides/papers/training_speed.py --full               # on a GPU

De et al. 2024 (arXiv:2402.19427), figure 3, models with a billion weights at 2,048, 4,096 and 8,192
tokens: relative to a Transformer with multi-query attention (MQA) at 2,048 tokens, a step of
Griffin takes .97, .99 and 1.01, and one of MQA 1, 1.12 and 1.33. Qin et al. 2024
(arXiv:2405.17381), figures 1 and 4: TransNormerLLM (TNL) takes the same time at every length. The
twin here replaces Lightning Attention with softmax attention and is otherwise equal.

On a CPU times are process times, because other programs may run.
"""

import contextlib
import dataclasses
import gc
import os
import pathlib
import sys
import time

# Keras reads this once, at import. "torch" and "tensorflow" also work.
os.environ.setdefault("KERAS_BACKEND", "jax")
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))  # where the other guides are

import keras
import matplotlib.figure
import numpy as np
from constant_speed import times_and_memory
from lightning_ablations import LanguageModel
from runs import (
    Results,
    command_line,
    draw_band,
    machine,
    picture,
    read_command_line,
    table,
    with_error,
)

from keras_recurrent.layers import LocalAttention, SimpleRMSNorm
from keras_recurrent.layers.reversible_embedding import reversible_embedding
from keras_recurrent.models import GriffinCausalLM, TransNormerCausalLM, TransNormerResidualBlock
from keras_recurrent.models.recurrent_backbone import RecurrentBackbone
from keras_recurrent.presets.transnormer import SIZES

GRIFFINS = {"Hawk": "hawk", "Griffin": "griffin", "MQA": "mqa"}
TNL, TWIN = "TNL", "TNL with softmax"
MODELS = (*GRIFFINS, TNL, TWIN)
# Allowed increase of the step time over the shortest length: to four times that length, and to the
# longest.
BOUNDS = {"Hawk": (0.05, 0.08), "Griffin": (0.05, 0.08), TNL: (0.1, 0.1)}


@dataclasses.dataclass
class Size:
    """Sizes of the measurement; lengths are tokens."""

    griffins: str  # suffix of the preset, after the model's name
    tnl: str
    dtype: str
    window: int  # of Griffin
    lengths: tuple
    tokens: int  # per step
    remat: int  # 1: rematerialize blocks in the backward pass
    longest_step: float  # seconds; longer lengths are skipped if a step may take longer


MINIATURE = Size("tiny", "tiny", "float32", 128, (256, 512, 1024, 4096), 4096, 0, 60.0)
FULL = Size(
    *("400m", "385m", "mixed_bfloat16", 1024),
    tuple(2**i for i in range(11, 18)),
    *(2**17, 1, 20.0),
)


# --- 1. The models ---


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
            model = twin(SIZES[f"tnl_{size.tnl}"].backbone_arguments, size.dtype)
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


def run(name, size, seeds, results):
    """Runs the missing timings of a model and appends a line for each repeat."""
    on_cpu = "CPU" in machine()
    clock = time.process_time if on_cpu else time.perf_counter
    model = None
    for length in size.lengths:
        key = key_of(name, size, length)
        missing = results.missing(seeds, **key)
        if missing:
            model = model or build(name, size)
            vocabulary = model.backbone.vocabulary_size
            shape = (size.tokens // length, length + 1)
            rows = np.random.default_rng(0).integers(0, vocabulary, shape).astype("int32")
            x = {"token_ids": rows[:, :-1], "padding_mask": np.ones_like(rows[:, 1:])}
            y = rows[:, 1:]

            def step(model=model, x=x, y=y):
                model.train_on_batch(x, y)

            times, memory = times_and_memory(step, len(missing), clock)
            for seed, seconds in zip(missing, times, strict=True):
                results.append(
                    **key,
                    seed=seed,
                    seconds=round(seconds, 4),
                    memory=memory,
                    parameters=model.count_params(),
                    time="of the CPUs" if on_cpu else "that passed",
                    machine=machine(),
                )
            print(
                f"{name}, sequences of {length:,} bytes: {' '.join(f'{s:.3f}' for s in times)} s",
                flush=True,
            )
        if 2 * np.median(times_of(results, name, size, length)) > size.longest_step:
            break
    del model
    gc.collect()


# --- 3. Results ---


def key_of(name, size, length):
    preset = size.griffins if name in GRIFFINS else size.tnl
    return {"model": name, "preset": preset, "tokens": size.tokens, "length": length}


def times_of(results, name, size, length):
    return np.array([line["seconds"] for line in results.select(**key_of(name, size, length))])


def ratios(results, name, size):
    """Returns step times by length, relative to the median at the shortest length."""
    base = np.median(times_of(results, name, size, size.lengths[0]))
    found = {length: times_of(results, name, size, length) for length in size.lengths}
    return {length: times / base for length, times in found.items() if len(times)}


def judge(name, found, lengths):
    """Formats the verdict on the medians of a model's ratios."""
    middle = {length: np.median(times) for length, times in found.items()}
    if name not in BOUNDS:
        values = list(middle.values())
        return "rises: " + ("yes" if values == sorted(values) and values[-1] > 1.05 else "NO")
    near, far = BOUNDS[name]
    up_to = [n for n in lengths if n <= 4 * lengths[0]]
    said = []
    for bound, places in ((near, up_to), (far, lengths)):
        worst = max(middle[n] for n in places if n in middle)
        holds = "yes" if worst <= 1 + bound else "NO"
        said.append(f"{holds}: within {100 * bound:.0f} % to {places[-1]:,}")
    return "; ".join(said)


def tell(results, size):
    rows, beside = [], []
    base = np.median(times_of(results, "MQA", size, size.lengths[0]))
    for name in MODELS:
        found = ratios(results, name, size)
        cells = [with_error(found[n], 2) if n in found else "" for n in size.lengths]
        rows.append((name, *cells, judge(name, found, size.lengths)))
        if name in GRIFFINS:
            times = {n: times_of(results, name, size, n) for n in found}
            cells = [with_error(times[n] / base, 2) if n in found else "" for n in size.lengths]
            beside.append((name, *cells))
    lengths = [f"{n:,}" for n in size.lengths]
    first = table(("times a step of its own on the shortest rows", *lengths, ""), rows)
    return first + "\n\n" + table(("times MQA's on the shortest rows", *lengths), beside)


def draw(results, size, path):
    figure = matplotlib.figure.Figure(figsize=(9, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, names in zip(panels, (tuple(GRIFFINS), (TNL, TWIN)), strict=True):
        for name in names:
            found = ratios(results, name, size)
            draw_band(axes, list(found), found.values(), marker="o", label=name)
        axes.set_xscale("log", base=2)
        axes.set(xlabel=f"sequence length ({size.tokens:,} tokens per step)")
        axes.legend()
    panels[0].set_ylim(bottom=0)
    panels[0].set_ylabel("step time / step time of the shortest sequences")
    figure.savefig(path, dpi=120)


# --- 4. Main program ---


def main():
    parser = command_line(__doc__, MINIATURE, FULL)
    arguments, size = read_command_line(parser, MINIATURE, FULL)
    if any(size.tokens % length for length in size.lengths):
        parser.error("--tokens must be a multiple of each of the --lengths")
    results = Results(arguments.output / "training_speed.jsonl")
    for name in MODELS:
        run(name, size, arguments.seeds, results)
    draw(results, size, picture(arguments, "training_speed"))
    print(tell(results, size))


if __name__ == "__main__":
    main()
