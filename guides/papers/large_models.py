"""Calls of `generate` with billions of weights, on torch (TNL, figure 5; GQA, table 1).

- tnl: TransNormerLLM with 7 billion weights, Llama of transformers, and a Transformer of this
  package with Llama's sizes. The batch size doubles until memory runs out.
- gqa: the sizes of T5-XXL's decoder, without cross-attention, with 64, 8 and 1 groups of KV heads.

Weights are random. The seconds of a run that exceeds the memory are None. Llama requires the
package transformers; `--only TNL Transformer` leaves it out.
"""

import functools
import gc
import itertools
from typing import NamedTuple

import keras
import numpy as np
from runs import Panel, clear, mean_with_error, table, yes

from benchmarks.decoding import prepare_baseline_call, prepare_call
from benchmarks.models import make_model, transformers_llama
from benchmarks.timing import is_out_of_memory, peak_bytes, reset_peak, seconds
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
    presets = (tnl, {}), (transformer, sizes), (transformer, sizes)
    pairs = zip(("TNL", "Transformer", LLAMA), presets, rows, strict=True)
    return {name: (*preset, first_rows) for name, preset, first_rows in pairs}


# {paper: (its miniature, its full size)}
COMPARISONS = {
    "tnl": (
        Comparison(models_of_families("tnl_tiny", "mqa_tiny", SMALL, (4, 2, 2)), 16, 32, 4),
        Comparison(
            models_of_families("tnl_7b", "mqa_7b", LLAMA_7B, (256, 32, 128)), 512, 1024, 4096
        ),
    ),
    "gqa": (
        Comparison(models_with_groups("mqa_tiny", {}, (4, 2, 1), 8), 128, 32, 8),
        Comparison(models_with_groups("mqa_7b", T5_XXL, (64, 8, 1), 16), 2048, 512, 16),
    ),
}
FIELDS = "seconds", "seconds_to_first_token", "peak_bytes"
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
    """Builds a model; returns a function that prepares a call of its `generate`."""
    keras.utils.set_random_seed(0)
    preset, sizes, _ = COMPARISONS[paper][size.large].models[name]
    if name == LLAMA:
        model = transformers_llama({**PRESETS[preset].backbone_arguments, **sizes}).eval()
        return functools.partial(prepare_baseline_call, model)
    model = make_model(preset, size.dtype, **sizes)
    model.compile(sampler="greedy")
    return functools.partial(prepare_call, model)


def measure(key, seeds, size, data):
    """Times a call, and a call that generates one token, for each of the seeds."""
    rows, prompt, tokens = (key[name] for name in ("rows", "prompt", "tokens"))
    prepare = load(key["measure"], key["model"], size)
    gc.collect()  # frees the previous model
    # The warm-up calls compile for the capacities of the timed calls. Llama's cache grows with each
    # token, so that only a whole call allocates all memory.
    few = tokens if key["model"] == LLAMA else tokens // 2 + 1
    found: list = []
    try:
        reset_peak()
        for n in (1, few):
            seconds(prepare(rows, prompt, n))
        for _ in seeds:
            first, whole = (seconds(prepare(rows, prompt, n)) for n in (1, tokens))
            found.append((round(whole, 3), round(first, 3), peak_bytes()))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        found += [(None,) * len(FIELDS)] * (len(seeds) - len(found))
    return [dict(zip(FIELDS, values, strict=True)) for values in found]


def panel_of(paper, results, size):
    """Returns the panel of the tokens/s by batch size, with a table of the largest batches."""
    comparison = COMPARISONS[paper][size.large]
    tokens, curves, rows, largest = comparison.tokens, {}, [], {}
    for name in comparison.models:
        lines = [line for line in results.select(**key_of(paper, name, size)) if line["seconds"]]
        for line in lines:
            by_rows = curves.setdefault(name, {}).setdefault(line["rows"], [])
            by_rows.append(tokens * line["rows"] / line["seconds"])
        if not lines:
            continue
        batch = max(curves[name])
        largest[name] = np.array(curves[name][batch])
        whole, first, peak = (
            np.array([line[field] for line in lines if line["rows"] == batch]) for field in FIELDS
        )
        cells = (
            mean_with_error(largest[name], 0),
            mean_with_error(whole / batch),
            mean_with_error(1000 * (whole - first) / (tokens - 1), 2),
            f"{peak.max() / 2**30:.1f}",
        )
        rows.append((name, f"{batch:,}", *cells))
    header = f"{paper}, {tokens:,} tokens", "batch size", "tokens/s", "s per sample"
    said = [f"- {line}" for line in verdicts(paper, largest)]
    text = "\n".join((table((*header, "ms per step", "peak, GiB"), rows), "", *said))
    return Panel(paper, "batch size", "tokens/s", curves, text=text)


def verdicts(paper, speeds):
    if paper == "gqa":
        for slow, fast in itertools.pairwise(speeds):
            factor = np.mean(speeds[fast]) / np.mean(speeds[slow])
            yield f"{slow} take {factor:.2f} times as long as {fast}"
    for name in speeds if "TNL" in speeds else ():
        if name != "TNL":
            factor = np.mean(speeds["TNL"]) / np.mean(speeds[name])
            above = yes(clear(speeds[name], speeds["TNL"]))
            yield f"TNL: {factor:.2f} times the tokens/s of {name}, by 2 deviations: {above}"


def panels(results, size):
    return [panel_of(paper, results, size) for paper in COMPARISONS]
