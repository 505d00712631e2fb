"""Times generation of a model: `generate` and `stream`, prefill, options, or calls on a CPU.

Arguments: a model of `benchmarks.models` or a preset, and a batch size. Weights are random in
bfloat16; decoding is greedy.

- speed: the time per token is the difference between two calls that generate different numbers of
  tokens, so that it contains neither prefill nor the start of a call. A stream is timed between the
  same tokens. The floor is `decoding_time` at the rates of a copy and of a matrix product in the
  same process. Quantized models are compared with bfloat16 in one process.
- baseline: `generate` of flash-linear-attention or transformers with as many parameters, with fewer
  new tokens, because each takes up to a tenth of a second.
- prefill: tokens/s of `prefill` of one sequence, and its memory in addition to weights and state;
  of the forward pass of the backbone on this sequence, and on 8 sequences of 2,048 tokens.
- cache: tokens/s of a decoding step of the layers, without fused steps, by the number of tokens in
  the cache.
- options: times per token with options of sampling, relative to greedy decoding, on texts of bytes.
- cpu: milliseconds of CPU time, with child processes, of the first call in this process, and
  medians of later calls, on texts.

With `--first-call`, the first two calls of `generate` are timed in two new processes, without
building the model: one with empty caches of Triton, XLA and CUDA, and one with the caches of the
first.

With `--turns`, a process compiles and is then measured in turns by `benchmarks.in_turns`, with the
last of the quantizations only.
"""

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import keras
import numpy as np
from keras import quantizers
from keras.layers import Dense

from benchmarks import make_parser
from benchmarks.decoding import (
    least_seconds_a_token,
    prepare_baseline_call,
    prepare_call,
    random_prompts,
    seconds_a_token,
)
from benchmarks.in_turns import answer_turns
from benchmarks.models import BASELINES, MODEL, make_model
from benchmarks.timing import (
    compile_forward,
    device_rates,
    has_gpu,
    medians,
    peak_bytes,
    print_header,
    print_results,
    random_tokens,
    reset_peak,
    seconds,
    seconds_between,
)
from keras_recurrent import which_generation
from keras_recurrent.models import GriffinCausalLM, SamplingParams, memory_sizes
from keras_recurrent.tokenizers import ByteTokenizer

PROMPT, FEW, MANY = 16, 64, 1088  # tokens
RUNS = 5
GREEDY = SamplingParams(temperature=0)


def to_milliseconds(times):
    return [round(1000 * t, 3) for t in sorted(times)]


# --- Speed ---

TIMES = ("generate, ms a token", "stream, ms a token", "stream, ms to the first token")
# Linear layers are quantized. Keras would dequantize the embedding for the logits of each token.
QUANTIZATIONS = {
    "int8": quantizers.Int8QuantizationConfig(),
    "int8-weights": quantizers.Int8QuantizationConfig(activation_quantizer=None),
    "int4": quantizers.Int4QuantizationConfig(),  # blocks of 128 channels
    "int4-columns": quantizers.Int4QuantizationConfig(block_size=-1),
}


class Speed:
    """Calls of `generate` and `stream` of one model."""

    def __init__(self, arguments, quantization):
        self._model, self._batch = make_model(arguments.model, arguments.dtype), arguments.batch
        if quantization:
            config = QUANTIZATIONS[quantization]
            self._model.quantize(config=config, filters=lambda layer: type(layer) is Dense)
        self._model.compile(sampler="greedy")
        self.first_call = seconds(prepare_call(self._model, self._batch, PROMPT, MANY))
        self.measure()

    def _stream(self):
        """Returns the seconds of a token after the first ones, and those to the first one."""
        start = time.perf_counter()
        inputs = random_prompts(self._model, self._batch, PROMPT, MANY)
        times = [time.perf_counter() for _ in self._model.stream(inputs, stop_token_ids=None)]
        return (times[-1] - times[FEW - 1]) / (MANY - FEW), times[0] - start

    def measure(self):
        token = seconds_a_token(self._model, self._batch, MANY, PROMPT, FEW)
        mode = str(which_generation(self._model))
        times = zip(TIMES, (token, *self._stream()), strict=True)
        return {**{name: 1000 * value for name, value in times}, "mode": mode}

    def floor(self, **rates):
        """Returns the least milliseconds of a token."""
        sizes = self._batch, MANY - FEW, PROMPT + FEW
        return 1000 * least_seconds_a_token(self._model, *sizes, **rates)


def measure_speed(arguments):
    for quantization in [None, *arguments.quantizations]:
        speed = Speed(arguments, quantization)
        measured = [speed.measure() for _ in range(RUNS)]
        tokens, streamed, first = (sorted(turn[name] for turn in measured) for name in TIMES)
        median, rates = statistics.median(tokens), device_rates(arguments.dtype)
        floor = speed.floor(**rates)
        yield {
            "model": arguments.model,
            "quantization": quantization,
            "batch": arguments.batch,
            "ms a token": [round(t, 3) for t in tokens],
            "floor ms": round(floor, 3),
            "share of floor": round(floor / median, 3),
            "copy TB/s": round(rates["bytes_per_second"] / 1e12, 2),
            "tokens/s": round(1000 * arguments.batch / median),
            "stream tokens/s": round(1000 * arguments.batch / statistics.median(streamed)),
            "stream ms to the first token": round(statistics.median(first), 1),
            "first call s": round(speed.first_call, 1),
            "mode": measured[-1]["mode"],
        }


# --- Baselines ---


def measure_baseline(arguments, few=16, many=48, runs=3):
    """Measures `generate` of a model of another library."""
    library, _, make = BASELINES[arguments.model]
    model = make_model(arguments.model, arguments.dtype)
    peer = make(model).eval()
    del model
    prepare = functools.partial(prepare_baseline_call, peer, arguments.batch, PROMPT)
    first, _ = seconds(prepare(many)), seconds(prepare(few))
    times = [seconds_between(prepare, few, many) for _ in range(runs)]
    yield {
        "model": f"{library}: {arguments.model}",
        "batch": arguments.batch,
        "ms a token": to_milliseconds(times),
        "tokens/s": round(arguments.batch / statistics.median(times)),
        "first call s": round(first, 1),
    }


# --- Prefill ---


def measure_prefill(arguments, runs=3):
    model = make_model(arguments.model, arguments.dtype)
    vocabulary = model.backbone.vocabulary_size
    for length in arguments.lengths:
        token_ids = random_tokens(vocabulary, 1, length)
        inputs = {"token_ids": token_ids, "padding_mask": np.ones_like(token_ids)}

        def prefill(inputs=inputs, length=length):
            cache = model.prefill(inputs, max_length=length)
            keras.ops.convert_to_numpy(cache.state["segment"])
            return cache

        cache, held = prefill(), reset_peak()
        times = [seconds(prefill) for _ in range(runs)]
        peak = peak_bytes() - held
        passes = times_of_forward(model.backbone, inputs, runs)
        yield {
            "model": arguments.model,
            "tokens": length,
            "tokens/s": round(length / statistics.median(times)),
            "slowest and fastest": [round(length / t) for t in (max(times), min(times))],
            "forward pass, tokens/s": round(length / statistics.median(passes)),
            "GiB in addition to weights and state": round(peak / 2**30, 2),
            "bytes of state": cache.nbytes,
        }
    rows = np.ones((8, 2048) if has_gpu() else (8, 64), "int32")  # as in training
    passes = times_of_forward(model.backbone, {"token_ids": rows, "padding_mask": rows}, runs)
    yield {"forward pass, tokens/s": round(rows.size / statistics.median(passes))}


def times_of_forward(backbone, inputs, runs):
    """Returns seconds of forward passes of a backbone, without gradients."""
    forward = functools.partial(compile_forward(backbone.__call__, backbone), inputs)
    seconds(forward)
    return [seconds(forward) for _ in range(runs)]


# --- Steps with a filled cache ---


def full_cache(model, length):
    """Returns a cache that claims to hold `length` - 1 tokens, which changes no timing."""
    cache = model.backbone.get_initial_state(1, max_length=length)
    rng = np.random.default_rng(0)
    values = {"position": length - 1, "segment": 0}

    def fill(path, array):
        if path[-1] in values:
            return keras.ops.full_like(array, values[path[-1]])
        return keras.ops.convert_to_tensor(0.1 * rng.normal(size=array.shape), array.dtype)

    filled = [fill(path, array) for path, array in keras.tree.flatten_with_path(cache)]
    return keras.tree.pack_sequence_as(cache, filled)


def measure_cache(arguments):
    model = make_model(arguments.model, arguments.dtype)
    token = keras.ops.ones((1, 1), "int32")
    step = compile_forward(lambda cache: model.call_with_cache(token, cache)[0], model)
    steps = {n: functools.partial(step, full_cache(model, n)) for n in arguments.lengths}
    for length, median in medians(steps).items():
        yield {
            "model": arguments.model,
            "tokens": length,
            "tokens/s": round(1 / median, 1),
            "cache, MiB": round(memory_sizes(model, 1, length).cache / 2**20, 1),
        }


# --- Options ---

NEW_TOKENS = 576  # of a call with options
STOP = {"stop": ["a stop string"]}
CASES: dict = {
    "greedy": {"sampling": GREEDY},
    "top_k": {"sampling": SamplingParams(top_k=5)},
    "top_p": {"sampling": SamplingParams(top_p=0.9)},
    "penalty": {"sampling": SamplingParams(temperature=0, repetition_penalty=1.2)},
    "logprobs": {"sampling": SamplingParams(temperature=0, logprobs=5)},
    "stop": {"sampling": GREEDY, **STOP},
    "penalty, logprobs and stop": {
        "sampling": SamplingParams(temperature=0, repetition_penalty=1.2, logprobs=5),
        **STOP,
    },
}


def make_text_model(name, dtype):
    """Returns a model of texts, with bytes as tokens."""
    if name == "griffin_tiny_text":  # whose weights are in the package
        return GriffinCausalLM.from_preset(name)
    model = make_model(name, dtype)
    model.preprocessor = model.preprocessor_cls(ByteTokenizer())
    return model


def measure_options(arguments):
    model = make_text_model(arguments.model, arguments.dtype)
    model.compile(sampler="greedy")
    prompts = ["All happy families"] * arguments.batch

    def prepare(case, new):
        options = {"stop_token_ids": None, "max_new_tokens": new, **CASES[case]}
        return functools.partial(model.generate, prompts, **options)

    calls = {case: functools.partial(prepare, case) for case in CASES}
    found: dict = {case: [] for case in CASES}
    for _ in range(1 + RUNS):  # the first one compiles
        for case, times in found.items():
            times.append(seconds_between(calls[case], FEW, NEW_TOKENS))
    base = statistics.median(found["greedy"][1:])
    for case, (_, *times) in found.items():
        ratio = round(statistics.median(times) / base, 3)
        yield {"options": case, "ms a token": to_milliseconds(times), "times greedy": ratio}


# --- CPU time of calls ---

TEXT = "What is the time o' the day? Past the mid season. At least two glasses."
TOP_K = {"sampling": SamplingParams(temperature=1, top_k=40, seed=0)}


def cpu_seconds():
    """Returns the CPU time so far of this process and of its children that have ended."""
    return time.process_time() + sum(os.times()[2:4])


def measure_cpu(arguments, runs=3):
    """Yields one dictionary, so that `benchmarks.in_turns` compares its entries."""
    model = make_text_model(arguments.model, arguments.dtype)
    found, first_tokens = {"import and load": cpu_seconds()}, []
    options = {"max_new_tokens": FEW, "stop_token_ids": None, "sampling": GREEDY}
    generate = functools.partial(model.generate, **options)

    def stream():
        start = time.perf_counter()
        chunks = model.stream(TEXT, **options)
        next(chunks)
        first_tokens.append(time.perf_counter() - start)
        for _ in chunks:
            pass

    cases = {"stream": stream}
    for size, inputs in ((1, TEXT), (16, [TEXT[: 4 + 4 * row] for row in range(16)])):
        cases[f"generate, batch size {size}"] = functools.partial(generate, inputs)
        cases[f"generate, batch size {size}, top_k"] = functools.partial(generate, inputs, **TOP_K)
    cases["generate, a stop string"] = functools.partial(generate, TEXT, stop=["\n\n"])
    cases["generate, return_cache"] = functools.partial(generate, TEXT, return_cache=True)
    found["first call"] = seconds(lambda: generate(TEXT), clock=cpu_seconds)
    for name, function in cases.items():
        function()
        found[name] = statistics.median(seconds(function, clock=cpu_seconds) for _ in range(runs))
    found["first token of a stream, wall time"] = statistics.median(first_tokens[1:])
    yield {f"{name}, ms": round(1000 * value, 3) for name, value in found.items()}


# --- First calls of processes ---

# Variables with the folders of the compilers' caches.
CACHES = (
    "TRITON_CACHE_DIR",
    "JAX_COMPILATION_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "CUDA_CACHE_PATH",
)


def measure_first_call(arguments):
    """Measures the first calls of this process."""
    model = make_model(arguments.model, arguments.dtype)
    model.compile(sampler="greedy")
    generate = prepare_call(model, arguments.batch, PROMPT, FEW)
    return {f"{name} call s": round(seconds(generate), 2) for name in ("first", "second")}


def measure_first_calls():
    """Yields `measure_first_call` of a process with empty caches, and of a second one."""
    command = [sys.executable, "-m", "benchmarks.generation", *sys.argv[1:], "--turns"]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, **{name: f"{folder}/{name}" for name in CACHES}}
        for caches in ("empty", "of the first process"):
            output = subprocess.check_output(command, env=environment, text=True, input="\n")
            yield {"caches": caches, **json.loads(output.splitlines()[-1])}


MEASURES = {
    "speed": measure_speed,
    "baseline": measure_baseline,
    "prefill": measure_prefill,
    "cache": measure_cache,
    "options": measure_options,
    "cpu": measure_cpu,
}


def main():
    parser = make_parser(__doc__)
    parser.add_argument("model", help=MODEL)
    parser.add_argument("batch", type=int, nargs="?", default=1)
    parser.add_argument("--measure", choices=MEASURES, default="speed")
    parser.add_argument("--quantizations", nargs="+", choices=QUANTIZATIONS, default=[])
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[131_072], help="of prefill, cache"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--first-call", action="store_true", help="in new processes")
    parser.add_argument("--turns", action="store_true", help="of `benchmarks.in_turns`")
    arguments = parser.parse_args()
    if arguments.measure == "baseline" and arguments.model not in BASELINES:
        parser.error(f"{arguments.model} has no baseline")
    if arguments.first_call and arguments.turns:
        return answer_turns(functools.partial(measure_first_call, arguments))
    if arguments.first_call:
        return print_results(measure_first_calls())
    if arguments.turns:
        return answer_turns(Speed(arguments, [None, *arguments.quantizations][-1]).measure)
    print_header(arguments.dtype)
    print_results(MEASURES[arguments.measure](arguments))


if __name__ == "__main__":
    main()
