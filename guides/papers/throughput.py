"""Throughput and latency of generation (Griffin, section 5, figures 1b and 4, appendix F).

    make paper-throughput                     # minutes; or, with the package installed:
    KERAS_BACKEND=jax python guides/papers/throughput.py
    KERAS_BACKEND=torch python guides/papers/throughput.py --full                   # on a GPU

A decoding step reads all weights and the cache of every sequence. The cache of multi-query
attention (MQA) grows with the text, so that longer texts leave memory for smaller batches; the
caches of Hawk and Griffin stop growing. De et al. 2024 (arXiv:2402.19427) measure models with 1.3
billion weights on a TPU-v3.

The first part computes a roofline for their sizes and device, from the bytes of the arrays. The
second part measures `generate`. The miniature uses tiny models and assumes a memory of a few
megabytes, which limits the batch size. On a CPU times are process times, because other programs may
run.

`--compare` measures whole calls of `generate` instead, on torch:

- tnl: TransNormerLLM with 7 billion weights, Llama of transformers, and a Transformer of this
  package with Llama's sizes. The batch size doubles until the memory ends. Qin et al. 2024
  (arXiv:2405.17381), figure 5: up to 11 times the tokens/s of Transformers.
- gqa: the decoder of T5-XXL with 64, 8 and 1 groups of key and value heads, 32 sequences, 2,048
  input and 512 output tokens. Ainslie et al. 2023 (arXiv:2305.13245), table 1.
"""

import dataclasses
import functools
import gc
import itertools
import os
import pathlib
import sys
import time
from typing import NamedTuple

# Keras reads this once, at import. "torch" and "tensorflow" also work.
os.environ.setdefault("KERAS_BACKEND", "jax")
# The folders of the other guides and of benchmarks.
sys.path.extend(str(pathlib.Path(__file__).resolve().parents[i]) for i in (1, 2))

import keras
import matplotlib.figure
import numpy as np
from constant_speed import GPU, room
from runs import (
    Results,
    command_line,
    deviations,
    draw_band,
    machine,
    picture,
    read_command_line,
    table,
    with_error,
    yes,
)

from benchmarks.decoding import (
    PLACES,
    decoding_time,
    least_seconds_a_token,
    prepare_baseline_call,
    prepare_call,
    seconds_a_token,
)
from benchmarks.models import make_model, transformers_llama
from benchmarks.timing import device_rates, is_out_of_memory, peak_bytes, reset_peak
from benchmarks.timing import seconds as seconds_of
from keras_recurrent.generation.prompts import bucket
from keras_recurrent.models import memory_sizes
from keras_recurrent.presets.griffin import SIZES

KINDS = {"hawk": "Hawk", "griffin": "Griffin", "mqa": "MQA"}

TPU_V3 = {"bytes_per_second": 900e9, "flops_per_second": 123e12}  # the paper's table 3
BYTES_ALONE = {**TPU_V3, "flops_per_second": 1e30}
TPU_V3_MEMORY = 32e9
# Figure 1b: tokens/s relative to MQA, by the number of generated tokens.
PAPER = {
    "hawk": {512: 2.5, 1024: 4.1, 2048: 7.3, 4096: 14.8},
    "griffin": {512: 1.1, 1024: 1.8, 2048: 3.3, 4096: 6.6},
}
LENGTHS = [2**i for i in range(8, 18)]  # lengths whose caches are computed


@dataclasses.dataclass
class Size:
    """Sizes of the measurement; lengths are tokens."""

    preset: str  # suffix of the preset, after the model's name
    dtype: str
    window: int  # of Griffin's local attention
    tokens: tuple  # to generate from an empty prompt, at the largest batch size
    memory: int  # bytes for weights and caches; 0: the device's memory
    latency_rows: int
    latency_tokens: tuple  # to generate after each of the prompts
    prompts: tuple
    first_rows: int  # smallest batch size, which is doubled if the memory is the device's
    longest_call: float  # seconds; doubling ends when a call would take longer


MINIATURE = Size(
    *("tiny", "float32", 128, (64, 256, 1024), 6 * 2**20),
    *(16, (256, 1024), (0, 1024), 64, 60.0),
)
FULL = Size(
    *("1.3b", "bfloat16", 1024, (512, 1024, 2048, 4096), 0),
    *(16, (512, 4096), (0, 4096), 512, 10.0),
)


class Comparison(NamedTuple):
    """The measurement of another paper; lengths are tokens."""

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


# {paper: its miniature, its full size}
COMPARISONS = {
    "tnl": (
        Comparison(
            {
                "TNL": ("tnl_tiny", {}, 4),
                "Transformer": ("mqa_tiny", SMALL, 2),
                LLAMA: ("mqa_tiny", SMALL, 2),
            },
            *(16, 32, 4),
        ),
        Comparison(
            {
                "TNL": ("tnl_7b", {}, 512),
                "Transformer": ("mqa_7b", LLAMA_7B, 64),
                LLAMA: ("mqa_7b", LLAMA_7B, 64),
            },
            *(512, 1024, 4096),
        ),
    ),
    "gqa": (
        Comparison(models_with_groups("mqa_tiny", {}, (4, 2, 1), 8), 128, 32, 8),
        Comparison(models_with_groups("mqa_7b", T5_XXL, (64, 8, 1), 32), 2048, 512, 32),
    ),
}


# --- 1. Roofline for the paper's sizes and device ---


def compute():
    """Returns, for each model, the cache's bytes by length and the maximum tokens/s."""
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("bfloat16")
    try:
        return {kind: _compute(f"{kind}_1.3b") for kind in KINDS}
    finally:
        keras.config.set_dtype_policy(policy)


def _compute(preset):
    parameters = memory_sizes(preset, 1, 1).parameters
    found: dict = {"cache": {}, "rows": {}, "tokens_a_second": {}, "by_bytes_alone": {}}
    for length in LENGTHS:
        found["cache"][length] = memory_sizes(preset, 1, length).cache
    for tokens in PAPER["hawk"]:
        fit = int((TPU_V3_MEMORY - parameters) // found["cache"][tokens])
        rows = 1 << fit.bit_length() - 1
        places = tokens * (np.arange(PLACES) + 0.5) / PLACES
        found["rows"][tokens] = rows
        for name, rates in (("tokens_a_second", TPU_V3), ("by_bytes_alone", BYTES_ALONE)):
            times = [sum(decoding_time(preset, rows, int(place), **rates)) for place in places]
            found[name][tokens] = rows / np.mean(times)
    return found


def tell_computed(found):
    rows = []
    for kind, name in KINDS.items():
        one, base = found[kind], found["mqa"]
        for tokens in PAPER["hawk"]:
            speeds = [one[by][tokens] for by in ("tokens_a_second", "by_bytes_alone")]
            bases = [base[by][tokens] for by in ("tokens_a_second", "by_bytes_alone")]
            rows.append(
                (
                    f"{name}, {tokens:,} tokens",
                    f"{one['rows'][tokens]:,}",
                    f"{speeds[0]:,.0f}",
                    *(f"{speed / other:.2f}" for speed, other in zip(speeds, bases, strict=True)),
                    PAPER[kind][tokens] if kind in PAPER else "1.0",
                )
            )
    header = ("1.3B, TPU-v3, computed", "rows", "tokens/s", "factor over MQA", "by bytes alone")
    return table((*header, "paper"), rows)


# --- 2. Measurement ---


def build(kind, size):
    """Builds a model with random weights."""
    window = {"sliding_window": size.window} if kind == "griffin" else {}
    model = make_model(f"{kind}_{size.preset}", size.dtype, **window)
    model.compile(sampler="greedy")
    return model


def largest_batch(model, tokens, memory):
    """Returns the largest power of two whose weights and caches fit into `memory` bytes."""
    sizes = memory_sizes(model, 1, bucket(tokens))
    fit = int((memory - sizes.parameters) // sizes.cache)
    if fit < 1:
        raise SystemExit(
            f"Weights of {sizes.parameters:,} bytes and a cache of {sizes.cache:,} for a single "
            f"row of {tokens:,} tokens are more than a memory of {memory:,.0f} bytes: take more "
            "--memory, or shorter rows."
        )
    return 1 << fit.bit_length() - 1


def doubled(model, tokens, first, longest):
    """Returns `([(batch, seconds per token), ...], reason to stop)`: "memory" or "time".

    "time": a call with twice the batch may take longer than `longest` seconds. "memory": weights
    and caches of twice the batch exceed the GPU's memory, or the framework raised an error.
    """

    def fits(batch):
        return GPU is None or memory_sizes(model, batch, bucket(tokens)).total < room()

    found, batch = [], first
    while fits(batch):
        try:
            _, seconds = (seconds_a_token(model, batch, tokens) for _ in range(2))  # compiles first
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            break
        found.append((batch, seconds))
        batch *= 2
        if fits(batch) and 2 * seconds * tokens > longest:
            return found, "time"
    if not found:
        raise SystemExit(f"{first} rows of {tokens:,} tokens do not fit: begin with fewer rows.")
    return found, "memory"


def cases(size):
    """Yields the keys of a model's measurements."""
    for tokens in size.tokens:
        yield {"measure": "throughput", "prompt": 0, "tokens": tokens}
    for prompt in size.prompts:
        for tokens in size.latency_tokens:
            yield {"measure": "latency", "prompt": prompt, "tokens": tokens}


def rows_of_batch(model, case, size):
    """Returns the batch size and the reason why it is not larger."""
    if case["measure"] == "latency":
        return size.latency_rows, "given"
    if size.memory:
        return largest_batch(model, case["tokens"], size.memory), "memory as given"
    found, ended = doubled(model, case["tokens"], size.first_rows, size.longest_call)
    return max(found, key=lambda pair: pair[0] / pair[1])[0], ended


def run(kind, size, seeds, results):
    """Runs the missing measurements of one model and appends a line for each repeat."""
    on_cpu = "CPU" in machine()
    clock = time.process_time if on_cpu else time.perf_counter
    model, rates = None, None
    for case in cases(size):
        key = {**case, "model": kind, "preset": size.preset}
        missing = results.missing(seeds, **key)
        if not missing:
            continue
        if model is None:
            keras.utils.set_random_seed(0)
            model = build(kind, size)
            rates = None if on_cpu else device_rates(size.dtype)
        before = results.select(**key)
        if before:
            rows, ended = before[0]["rows"], before[0]["ended_by"]
        else:
            rows, ended = rows_of_batch(model, case, size)
        walk = (model, rows, case["tokens"], case["prompt"])
        seconds_a_token(*walk)  # compiles
        least = rates and 1000 * least_seconds_a_token(*walk, **rates)
        for seed in missing:
            line = {
                **key,
                "seed": seed,
                "rows": rows,
                "ended_by": ended,
                "ms_a_step": round(1000 * seconds_a_token(*walk, clock=clock), 4),
                "roofline_ms": least and round(least, 4),
                "time": "of the CPUs" if on_cpu else "that passed",
                "machine": machine(),
            }
            results.append(**line)
            print(
                f"{KINDS[kind]}, {case['measure']}, {case['tokens']:,} tokens after "
                f"{case['prompt']:,}, batch size {rows:,}: {line['ms_a_step']} ms per step",
                flush=True,
            )
    del model
    gc.collect()


# --- 3. Comparisons of other papers ---


def key_of(paper, name, comparison):
    return {
        "measure": paper,
        "model": name,
        "preset": comparison.models[name][0],
        "prompt": comparison.prompt,
        "tokens": comparison.tokens,
    }


def load(name, comparison, dtype):
    """Returns a model, and a function that prepares a call of its `generate`."""
    preset, sizes, _ = comparison.models[name]
    if name == LLAMA:
        model = transformers_llama({**SIZES[preset].backbone_arguments, **sizes}).eval()
        return model, functools.partial(prepare_baseline_call, model)
    model = make_model(preset, dtype, **sizes)
    model.compile(sampler="greedy")
    return model, functools.partial(prepare_call, model)


def needed_bytes(model, rows, length):
    """Returns the bytes of the weights and of the cache of `rows` sequences."""
    if hasattr(model, "backbone"):
        return memory_sizes(model, rows, bucket(length)).total
    sizes = model.config
    numbers = 2 * sizes.num_hidden_layers * sizes.num_key_value_heads * sizes.head_dim * length
    return 2 * (model.num_parameters() + rows * numbers)  # bfloat16


def compare(paper, comparison, name, seeds, dtype, results):
    """Measures a model at each batch size until the memory ends, and the largest one repeatedly."""
    key, (*_, first_rows) = key_of(paper, name, comparison), comparison.models[name]
    load_once = functools.cache(lambda: load(name, comparison, dtype))
    # Calls that compile, with a cache of the same capacity. Llama compiles nothing.
    few = 8 if name == LLAMA else comparison.tokens // 2 + 1
    warm_up = functools.cache(lambda rows: seconds_of(load_once()[1](rows, comparison.prompt, few)))

    def run(rows, seeds):
        for seed in results.missing(seeds, **key, rows=rows):
            line = measure(*load_once(), rows, comparison, warm_up)
            results.append(**key, rows=rows, seed=seed, **line, machine=machine())
            print(f"{name}, batch size {rows:,}: {line['seconds']} s", flush=True)
        return all(line["seconds"] for line in results.select(**key, rows=rows))

    rows = first_rows
    while rows <= comparison.last_rows and run(rows, seeds[:1]):
        rows *= 2
    run(rows // 2, seeds)


def measure(model, prepare, rows, comparison, warm_up):
    """Times a call, and one that generates a single token; None if the memory is too small."""
    prompt, tokens = comparison.prompt, comparison.tokens
    found = dict.fromkeys(("seconds", "seconds_to_first_token", "peak_bytes"))
    if needed_bytes(model, rows, prompt + tokens) > room():
        return found
    reset_peak()
    try:
        warm_up(rows)
        first, whole = (seconds_of(prepare(rows, prompt, n)) for n in (1, tokens))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return found
    return {
        "seconds": round(whole, 3),
        "seconds_to_first_token": round(first, 3),
        "peak_bytes": peak_bytes(),
    }


def tell_comparison(paper, comparison, results):
    """Formats a table of each model at its largest batch size, and the verdicts."""
    rows, found = [], {}
    for name in comparison.models:
        lines = results.select(**key_of(paper, name, comparison))
        most = max(line["rows"] for line in lines if line["seconds"] is not None)
        whole, first, peaks = (
            np.array([line[field] for line in lines if line["rows"] == most])
            for field in ("seconds", "seconds_to_first_token", "peak_bytes")
        )
        found[name] = most / whole
        cells = (
            with_error(comparison.tokens * found[name], 0),
            with_error(whole / most),
            with_error(1000 * (whole - first) / (comparison.tokens - 1), 2),
            f"{peaks.max() / 2**30:.1f}",
        )
        rows.append((name, f"{most:,}", *cells))
    lengths = f"{comparison.tokens:,} tokens after {comparison.prompt:,}"
    header = (lengths, "rows", "tokens/s", "s per sample", "ms per step", "peak, GiB")
    said = (f"- {line}" for line in JUDGES[paper](found))
    return "\n\n".join((table(header, rows), "\n".join(said)))


def judge_tnl(found):
    ours, *others = found
    for name in others:
        factor = np.mean(found[ours]) / np.mean(found[name])
        clear = yes(above(found[ours], found[name]))
        yield f"{ours}: {factor:.2f} times the tokens/s of {name}, above by 2 deviations: {clear}"


def judge_gqa(found):
    (many, slow), (some, grouped), (one, fast) = found.items()
    few, more = np.mean(fast) / np.mean(grouped), np.mean(grouped) / np.mean(slow)
    yield f"{some} take {few:.2f} times the time of {one}, at most 1.3: {yes(few <= 1.3)}"
    yield f"{many} take {more:.2f} times the time of {some}, at least 2: {yes(more >= 2)}"


JUDGES = {"tnl": judge_tnl, "gqa": judge_gqa}


# --- 4. Results ---


def speeds(results, size, kind, tokens):
    """Returns the tokens/s of each repeat."""
    key = {"measure": "throughput", "tokens": tokens, "model": kind, "preset": size.preset}
    return np.array([1000 * line["rows"] / line["ms_a_step"] for line in results.select(**key)])


def ratios(results, size, kind, tokens):
    """Returns the tokens/s of each repeat, relative to MQA's median."""
    return speeds(results, size, kind, tokens) / np.median(speeds(results, size, "mqa", tokens))


def waits(results, size, kind, prompt, tokens):
    """Returns the milliseconds per token at a small batch size, for each repeat."""
    key = {"measure": "latency", "prompt": prompt, "tokens": tokens}
    lines = results.select(**key, model=kind, preset=size.preset)
    return np.array([line["ms_a_step"] for line in lines])


def above(one, other):
    """Returns True if the mean of one exceeds that of the other by two deviations."""
    return np.mean(one) - np.mean(other) > 2 * np.hypot(deviations(one), deviations(other))


def judge(results, size):
    """Formats the verdicts."""
    said = []
    for tokens in (n for n in size.tokens if n >= size.window):
        hawk, griffin, mqa = (speeds(results, size, kind, tokens) for kind in KINDS)
        for names, clear in (
            ("Hawk above Griffin", above(hawk, griffin)),
            ("Griffin above MQA", above(griffin, mqa)),
        ):
            said.append(f"{tokens:,} tokens: {names} by 2 deviations: {'yes' if clear else 'NO'}")
    for kind in ("hawk", "griffin"):
        medians = [np.median(ratios(results, size, kind, tokens)) for tokens in size.tokens]
        rising = all(a < b for a, b in itertools.pairwise(medians))
        said.append(f"{KINDS[kind]} relative to MQA rises with length: {'yes' if rising else 'NO'}")
    longest, prompt = max(size.latency_tokens), max(size.prompts)
    hawk, griffin, mqa = (waits(results, size, kind, prompt, longest) for kind in KINDS)
    for name, clear in (("Hawk", above(mqa, hawk)), ("Griffin", above(mqa, griffin))):
        said.append(
            f"{longest:,} tokens after {prompt:,}, batch size {size.latency_rows}: {name} takes "
            f"less time than MQA by 2 deviations: {'yes' if clear else 'NO'}"
        )
    return "\n".join(f"- {line}" for line in said)


def tell(results, size):
    key = {"measure": "throughput", "preset": size.preset}
    rows: list[tuple] = []
    for kind, name in KINDS.items():
        for tokens in size.tokens:
            lines = results.select(**key, model=kind, tokens=tokens)
            found = speeds(results, size, kind, tokens)
            least = lines[0]["roofline_ms"]
            rows.append(
                (
                    f"{name}, {tokens:,} tokens",
                    f"{lines[0]['rows']:,}",
                    lines[0]["ended_by"],
                    with_error(found, 0),
                    with_error(ratios(results, size, kind, tokens), 2),
                    f"{1000 * lines[0]['rows'] / least:,.0f}" if least else "",
                )
            )
    header = ("throughput", "rows", "ended by", "tokens/s", "factor over MQA", "roofline")
    first = table(header, rows)
    rows, places = [], [(prompt, n) for prompt in size.prompts for n in size.latency_tokens]
    for kind, name in KINDS.items():
        cells = (with_error(waits(results, size, kind, *place), 3) for place in places)
        rows.append((name, *cells))
    columns = [f"{n:,} after {prompt:,}" for prompt, n in places]
    second = table((f"ms per token, batch size {size.latency_rows}", *columns), rows)
    return "\n\n".join((first, second, judge(results, size)))


def draw(results, size, computed, path):
    figure = matplotlib.figure.Figure(figsize=(12, 4), layout="constrained")
    memory, speed, wait = figure.subplots(1, 3)
    for kind, name in KINDS.items():
        found = computed[kind]
        (line,) = memory.plot(LENGTHS, [found["cache"][n] / 1e6 for n in LENGTHS], label=name)
        color = line.get_color()
        found_ratios = [ratios(results, size, kind, n) for n in size.tokens]
        draw_band(
            speed, size.tokens, found_ratios, color=color, marker="o", label=f"{name}, measured"
        )
        if kind in PAPER:
            base = computed["mqa"]["tokens_a_second"]
            at = list(PAPER[kind])
            best = [found["tokens_a_second"][n] / base[n] for n in at]
            speed.plot(at, best, ":", color=color, label=f"{name} 1.3B, roofline of a TPU-v3")
            speed.plot(at, list(PAPER[kind].values()), "--", color=color, label=f"{name}, paper")
        for prompt, style in zip(size.prompts, ("--", "-"), strict=False):
            points = [waits(results, size, kind, prompt, n) for n in size.latency_tokens]
            label = f"{name}, after {prompt:,}"
            draw_band(
                wait,
                size.latency_tokens,
                points,
                color=color,
                linestyle=style,
                marker="o" if style == "-" else "x",
                label=label,
            )
    memory.set(xlabel="tokens", ylabel="megabytes", title="cache of a sequence, 1.3B, computed")
    speed.set(
        xlabel="generated tokens", ylabel="factor over MQA", title="tokens/s, largest batch size"
    )
    title = f"ms per token, batch size {size.latency_rows}"
    wait.set(xlabel="generated tokens", title=title, ylim=(0, None))
    for axes in (memory, speed):
        axes.set_yscale("log")
    for axes in (memory, speed, wait):
        axes.set_xscale("log", base=2)
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)


# --- 5. Main program ---


def main():
    parser = command_line(__doc__, MINIATURE, FULL)
    parser.add_argument("--compare", choices=COMPARISONS, help="models of another paper")
    parser.add_argument("--models", nargs="+", help="measure only some models of --compare")
    arguments, size = read_command_line(parser, MINIATURE, FULL)
    results = Results(arguments.output / "throughput.jsonl")
    if arguments.compare:
        comparison = COMPARISONS[arguments.compare][arguments.full]
        for name in arguments.models or comparison.models:
            compare(arguments.compare, comparison, name, arguments.seeds, size.dtype, results)
            gc.collect()
        if not arguments.models:
            print(tell_comparison(arguments.compare, comparison, results))
        return
    if not size.memory and "CPU" in machine():
        parser.error("on a CPU, --memory must say how many bytes to take")
    computed = compute()
    print(tell_computed(computed))
    for kind in KINDS:
        run(kind, size, arguments.seeds, results)
    draw(results, size, computed, picture(arguments, "throughput"))
    print(tell(results, size))


if __name__ == "__main__":
    main()
