"""Calls of `generate` with billions of weights, on torch (TNL, figure 5; GQA, table 1).

- tnl: TransNormerLLM with 7 billion weights, Llama of transformers, and a Transformer of this
  package with Llama's sizes. The batch size doubles until memory runs out.
- gqa: the decoder of T5-XXL with 64, 8 and 1 groups of key and value heads.

Weights are random. The seconds of a run that exceeds the memory are None. Llama requires the
package transformers; `--only TNL Transformer` leaves it out.
"""

import functools
import gc
import itertools
from typing import NamedTuple

import keras
import numpy as np
from constant_speed import room
from runs import clear, mean_with_error, table, yes

from benchmarks.decoding import prepare_baseline_call, prepare_call
from benchmarks.models import make_model, transformers_llama
from benchmarks.timing import is_out_of_memory, peak_bytes, reset_peak, seconds
from keras_recurrent.generation.prompts import bucket
from keras_recurrent.models import memory_sizes
from keras_recurrent.presets.griffin import SIZES as PRESETS


class Comparison(NamedTuple):
    """The models of a paper; lengths are tokens."""

    models: dict  # {name: (preset, sizes that differ from it, first batch size)}
    prompt: int
    tokens: int  # to generate
    last_rows: int  # largest batch size


LLAMA = "Llama of transformers"
LLAMA_7B = {
    "vocabulary_size": 32_000,
    "intermediate_dim": 11_008,
    "num_key_value_heads": 32,
}
T5_XXL = {
    "vocabulary_size": 32_128,
    "num_layers": 24,
    "intermediate_dim": 10_240,
    "num_query_heads": 64,
    "head_dim": 64,
}
SMALL = {"num_key_value_heads": 4}


def models_with_groups(preset, sizes, groups, rows):
    return {f"{n} groups": (preset, {**sizes, "num_key_value_heads": n}, rows) for n in groups}


def models_of_families(tnl, transformer, sizes, rows):
    others = zip(("Transformer", LLAMA), rows[1:], strict=True)
    return {"TNL": (tnl, {}, rows[0]), **{name: (transformer, sizes, n) for name, n in others}}


# {paper: (its miniature, its full size)}
COMPARISONS = {
    "tnl": (
        Comparison(models_of_families("tnl_tiny", "mqa_tiny", SMALL, (4, 2, 2)), 16, 32, 4),
        Comparison(
            models_of_families("tnl_7b", "mqa_7b", LLAMA_7B, (256, 32, 64)), 512, 1024, 4096
        ),
    ),
    "gqa": (
        Comparison(models_with_groups("mqa_tiny", {}, (4, 2, 1), 8), 128, 32, 8),
        Comparison(models_with_groups("mqa_7b", T5_XXL, (64, 8, 1), 32), 2048, 512, 32),
    ),
}
SIZES = {"large": (0, 1), "dtype": ("float32", "bfloat16")}
SEEDS = 2, 2


def key_of(paper, name, size):
    comparison = COMPARISONS[paper][size.large]
    lengths = {"prompt": comparison.prompt, "tokens": comparison.tokens}
    return {"measure": paper, "model": name, "preset": comparison.models[name][0], **lengths}


def runs(size, results):
    for paper, sizes in COMPARISONS.items():
        for name, (_, _, rows) in sizes[size.large].models.items():
            if name == LLAMA and keras.config.backend() != "torch":
                continue
            while rows <= sizes[size.large].last_rows:
                key = {**key_of(paper, name, size), "rows": rows}
                yield key
                lines = results.select(**key)
                if not lines or any(line["seconds"] is None for line in lines):
                    break
                rows *= 2


@functools.lru_cache(maxsize=1)
def load(paper, name, size):
    """Returns a model, and a function that prepares a call of its `generate`."""
    keras.utils.set_random_seed(0)
    preset, sizes, _ = COMPARISONS[paper][size.large].models[name]
    if name == LLAMA:
        model = transformers_llama({**PRESETS[preset].backbone_arguments, **sizes}).eval()
        return model, functools.partial(prepare_baseline_call, model)
    model = make_model(preset, size.dtype, **sizes)
    model.compile(sampler="greedy")
    return model, functools.partial(prepare_call, model)


def needed_bytes(model, rows, length):
    """Returns the bytes of the weights and of the cache of `rows` sequences."""
    if hasattr(model, "backbone"):
        return memory_sizes(model, rows, bucket(length)).total
    sizes = model.config
    numbers = 2 * sizes.num_hidden_layers * sizes.num_key_value_heads * sizes.head_dim * length
    return 2 * (model.num_parameters() + rows * numbers)  # bfloat16


def measure(key, seeds, size, data):
    """Yields, for each seed, the seconds of a call and of a call that generates one token."""
    rows, prompt, tokens = (key[name] for name in ("rows", "prompt", "tokens"))
    model, prepare = load(key["measure"], key["model"], size)
    gc.collect()  # frees the previous model
    fits = needed_bytes(model, rows, prompt + tokens) <= room()
    # The warm-up call compiles for the cache capacity of the timed call. Llama compiles nothing.
    few = 8 if key["model"] == LLAMA else tokens // 2 + 1
    warm_up = functools.cache(lambda: seconds(prepare(rows, prompt, few)))
    for _ in seeds:
        found = dict.fromkeys(("seconds", "seconds_to_first_token", "peak_bytes"))
        try:
            if fits:
                reset_peak()
                warm_up()
                first, whole = (seconds(prepare(rows, prompt, n)) for n in (1, tokens))
                times = round(whole, 3), round(first, 3), peak_bytes()
                found = dict(zip(found, times, strict=True))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            fits = False
        yield found


class Comparisons:
    """A plot and a table of the models of a paper, each at its largest batch size."""

    def __init__(self, paper, results, size):
        self.tokens = COMPARISONS[paper][size.large].tokens
        self.paper, self.lines = paper, {}
        for name in COMPARISONS[paper][size.large].models:
            lines = results.select(**key_of(paper, name, size))
            lines = [line for line in lines if line["seconds"] is not None]
            most = max((line["rows"] for line in lines), default=None)
            self.lines[name] = [line for line in lines if line["rows"] == most]
        self.lines = {name: lines for name, lines in self.lines.items() if lines}

    def values(self, name, field):
        return np.array([line[field] for line in self.lines[name]])

    def speeds(self, name):
        """Returns the tokens/s of each repeat."""
        return self.tokens * self.values(name, "rows") / self.values(name, "seconds")

    def draw(self, axes):
        axes.bar(list(self.lines), [np.mean(self.speeds(name)) for name in self.lines])
        axes.set(title=self.paper, ylabel="tokens/s")

    def table(self):
        rows = []
        for name in self.lines:
            whole, first = (self.values(name, f"seconds{s}") for s in ("", "_to_first_token"))
            batch = self.lines[name][0]["rows"]
            cells = (
                mean_with_error(self.speeds(name), 0),
                mean_with_error(whole / batch),
                mean_with_error(1000 * (whole - first) / (self.tokens - 1), 2),
                f"{self.values(name, 'peak_bytes').max() / 2**30:.1f}",
            )
            rows.append((name, f"{batch:,}", *cells))
        header = f"{self.paper}, {self.tokens:,} tokens", "batch size", "tokens/s", "s per sample"
        said = [f"- {line}" for line in self.verdicts()]
        return "\n".join((table((*header, "ms per step", "peak, GiB"), rows), "", *said))

    def verdicts(self):
        if self.paper == "tnl":
            for name in list(self.lines)[1:]:
                factor = np.mean(self.speeds("TNL")) / np.mean(self.speeds(name))
                above = yes(clear(self.speeds(name), self.speeds("TNL")))
                yield f"TNL: {factor:.2f} times the tokens/s of {name}, by 2 deviations: {above}"
        else:
            for slow, fast in itertools.pairwise(self.lines):
                factor = np.mean(self.speeds(fast)) / np.mean(self.speeds(slow))
                yield f"{slow} take {factor:.2f} times as long as {fast}"


def panels(results, size):
    found = [Comparisons(paper, results, size) for paper in COMPARISONS]
    return [comparison for comparison in found if comparison.lines]
