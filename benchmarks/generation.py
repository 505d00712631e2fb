"""Times generation of a model: `generate` and `stream`, prefill, options, or calls on a CPU.

    python -m benchmarks.generation hgrn2 1 --backend torch                     # speed
    python -m benchmarks.generation hgrn2 1 --quantizations int8 int4           # and bfloat16
    python -m benchmarks.generation hgrn2 1 --measure baseline
    python -m benchmarks.generation hgrn2 --measure prefill --lengths 8192 131072
    python -m benchmarks.generation hgrn2 16 --measure options
    python -m benchmarks.generation griffin_tiny_text --measure cpu             # CPU time of calls
    python -m benchmarks.generation hgrn2 1 --first-call --backend jax

Arguments: a model of `benchmarks.models`, or `griffin_tiny_text`, and a batch size. Weights are
random in bfloat16; decoding is greedy.

- speed: the time per token is the difference between two calls that generate different numbers of
  tokens, so that it contains neither prefill nor the start of a call. A stream is timed between the
  same tokens. The floor is `decoding_time` at the rates of a copy and of a matrix product in the
  same process. Quantized models are compared with bfloat16 in one process, and logits of a fused
  step with those of the layers one by one.
- baseline: `generate` of flash-linear-attention or transformers with as many parameters, with fewer
  new tokens, because each takes up to a tenth of a second.
- prefill: tokens/s of `prefill` of one sequence, and its memory in addition to weights and state;
  of the forward pass of the backbone on this sequence, and on 8 sequences of 2,048 tokens.
- options: times per token with options of sampling, relative to greedy decoding, on texts of bytes;
  and the time to the first token in the second turn of a chat, whose prompt is mostly cached.
- cpu: milliseconds of CPU time, with child processes, of the first call in this process, and
  medians of later calls, on texts.

With `--first-call`, the first two calls of `generate` are timed in two new processes, without
building the model: one with empty caches of Triton, XLA and CUDA, and one with the caches of the
first.

With `--turns`, a process compiles and is then measured in turns by `benchmarks.in_turns`, with the
last of the quantizations only.
"""

import contextlib
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

from benchmarks import make_parser
from benchmarks.decoding import least_seconds_a_token
from benchmarks.in_turns import answer_turns
from benchmarks.models import MODELS, make_model
from benchmarks.timing import (
    BACKEND,
    device_rates,
    has_gpu,
    peak_bytes,
    print_header,
    print_results,
    random_tokens,
    reset_peak,
    seconds,
)
from keras_recurrent import which_generation
from keras_recurrent.layers.decoding import decoding_scope
from keras_recurrent.models import GriffinCausalLM, SamplingParams
from keras_recurrent.tokenizers import ByteTokenizer

if BACKEND == "torch":
    import torch
elif BACKEND == "jax":
    import jax

PROMPT, FEW, MANY = 16, 64, 1088  # tokens
RUNS = 5
GREEDY = SamplingParams(temperature=0)


def to_milliseconds(times, digits=3):
    return [round(1000 * t, digits) for t in sorted(times)]


# --- Speed ---

TIMES = ("generate, ms a token", "stream, ms a token", "stream, ms to the first token")
QUANTIZATIONS = ("int8", "int8-weights", "int4", "int4-columns")


def quantize(model, name):
    """Quantizes linear layers, but not the embedding.

    Keras dequantizes the whole embedding for the logits of each token.
    """
    quantizers = keras.quantizers
    config = {
        "int8": quantizers.Int8QuantizationConfig(),
        "int8-weights": quantizers.Int8QuantizationConfig(activation_quantizer=None),
        "int4": quantizers.Int4QuantizationConfig(),  # blocks of 128 channels
        "int4-columns": quantizers.Int4QuantizationConfig(block_size=-1),
    }[name]
    model.quantize(config=config, filters=lambda layer: type(layer) is keras.layers.Dense)


def logits_apart(model):
    """Returns the largest difference of logits, fused and layer by layer, over the largest."""
    state = model.backbone.get_initial_state(1, max_length=PROMPT)
    token = np.ones((1, 1), "int32")
    no_gradients = torch.no_grad() if BACKEND == "torch" else contextlib.nullcontext()

    def logits(context):
        with context, no_gradients:
            found = model.call_with_cache(token, state)[0]
        return keras.ops.convert_to_numpy(keras.ops.cast(found, "float32"))

    fused, expected = logits(decoding_scope()), logits(contextlib.nullcontext())
    return float(np.abs(fused - expected).max() / np.abs(expected).max())


def random_prompts(vocabulary, batch, new):
    """Returns the inputs of `generate` for `new` tokens after `PROMPT` random ones."""
    given = np.arange(PROMPT + new) < PROMPT
    token_ids = random_tokens(vocabulary, batch, PROMPT + new)
    return {"token_ids": token_ids * given, "padding_mask": np.broadcast_to(given, token_ids.shape)}


class Speed:
    """Calls of `generate` and `stream` of one model."""

    def __init__(self, model, batch):
        self._model, self._batch = model, batch
        self._vocabulary = model.backbone.vocabulary_size
        self.first_call = self._generate(MANY)
        self._generate(FEW)
        self._stream()

    def _generate(self, new):
        inputs = random_prompts(self._vocabulary, self._batch, new)
        return seconds(
            lambda: keras.ops.convert_to_numpy(
                self._model.generate(inputs, stop_token_ids=None)["token_ids"]
            )
        )

    def _stream(self):
        """Returns the seconds of a token after the first ones, and those to the first one."""
        start = time.perf_counter()
        inputs = random_prompts(self._vocabulary, self._batch, MANY)
        times = [time.perf_counter() for _ in self._model.stream(inputs, stop_token_ids=None)]
        return (times[-1] - times[FEW - 1]) / (MANY - FEW), times[0] - start

    def measure(self):
        token = (self._generate(MANY) - self._generate(FEW)) / (MANY - FEW)
        mode = str(which_generation(self._model))
        times = zip(TIMES, (token, *self._stream()), strict=True)
        return {**{name: 1000 * value for name, value in times}, "mode": mode}


def prepare(arguments, quantization):
    """Returns a model, and the difference of its logits if it is quantized."""
    model = make_model(arguments.model, arguments.dtype)
    apart = None
    if quantization:
        quantize(model, quantization)
        apart = logits_apart(model)
    model.compile(sampler="greedy")
    return model, apart


def measure_speed(arguments):
    for quantization in [None, *arguments.quantizations]:
        model, apart = prepare(arguments, quantization)
        speed = Speed(model, arguments.batch)
        measured = [speed.measure() for _ in range(RUNS)]
        token, streamed, to_first = (sorted(turn[name] for turn in measured) for name in TIMES)
        median, rates = statistics.median(token) / 1000, device_rates(arguments.dtype)
        least = least_seconds_a_token(model, arguments.batch, MANY - FEW, PROMPT + FEW, **rates)
        yield {
            "model": arguments.model,
            "quantization": quantization,
            "logits apart": apart,
            "batch": arguments.batch,
            "ms a token": [round(t, 3) for t in token],
            "floor ms": round(1000 * least, 3),
            "share of floor": round(least / median, 3),
            "copy TB/s": round(rates["bytes_per_second"] / 1e12, 2),
            "tokens/s": round(arguments.batch / median),
            "stream tokens/s": round(1000 * arguments.batch / statistics.median(streamed)),
            "stream ms to the first token": round(statistics.median(to_first), 1),
            "first call s": round(speed.first_call, 1),
            "mode": measured[-1]["mode"],
        }


# --- Baselines ---


def measure_baseline(arguments, few=16, many=48, runs=3):
    """Measures `generate` of a model of another library."""
    baseline = MODELS[arguments.model].baseline
    model = make_model(arguments.model, arguments.dtype)
    vocabulary = model.backbone.vocabulary_size
    peer = baseline.make(model, use_cache=True).eval()
    del model
    peer.generation_config.eos_token_id = None  # no sequence ends early
    prompt = random_tokens(vocabulary, arguments.batch, PROMPT)
    token_ids = torch.tensor(prompt, device=peer.device).long()

    def generate(new):
        options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        with torch.no_grad():
            mask = torch.ones_like(token_ids)
            result = peer.generate(token_ids, attention_mask=mask, **options)
        if result.shape != (arguments.batch, PROMPT + new):
            raise SystemExit(f"{baseline.library} generated {tuple(result.shape)}")

    def time_of(new):
        return seconds(lambda: generate(new))

    first = time_of(many)
    time_of(few)
    times = [(time_of(many) - time_of(few)) / (many - few) for _ in range(runs)]
    yield {
        "model": f"{baseline.library}: {arguments.model}",
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
    if BACKEND == "torch":
        forward = torch.no_grad()(lambda: backbone(inputs))
    elif BACKEND == "jax":
        program = jax.jit(lambda weights, inputs: backbone.stateless_call(weights, [], inputs)[0])
        weights = [v.value for v in backbone.trainable_variables]
        forward = functools.partial(program, weights, inputs)
    else:
        import tensorflow as tf

        forward = functools.partial(tf.function(backbone), inputs)
    seconds(forward)
    return [seconds(forward) for _ in range(runs)]


# --- Options, and turns of a chat ---

NEW_TOKENS = 576  # of a call with options
TURN = 4000  # tokens
TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}{{ message.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)
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
    """Returns a model of texts and chats, with bytes as tokens."""
    if name == "griffin_tiny_text":
        return GriffinCausalLM.from_preset(name, chat_template=TEMPLATE)
    family = MODELS[name].family
    preprocessor = family.preprocessor_cls(ByteTokenizer(), chat_template=TEMPLATE)
    return make_model(name, dtype, preprocessor)


def measure_options(arguments):
    model = make_text_model(arguments.model, arguments.dtype)
    model.compile(sampler="greedy")
    prompts = ["All happy families"] * arguments.batch

    def time_of(case, new):
        options = {"stop_token_ids": None, "max_new_tokens": new, **CASES[case]}
        return seconds(lambda: model.generate(prompts, **options))

    for case in CASES:
        time_of(case, NEW_TOKENS), time_of(case, FEW)
    found: dict = {case: [] for case in CASES}
    for _ in range(RUNS):
        for case, times in found.items():
            difference = time_of(case, NEW_TOKENS) - time_of(case, FEW)
            times.append(difference / (NEW_TOKENS - FEW))
    base = statistics.median(found["greedy"])
    for case, times in found.items():
        ratio = round(statistics.median(times) / base, 3)
        yield {"options": case, "ms a token": to_milliseconds(times), "times greedy": ratio}
    yield from measure_chat(model)


def measure_chat(model):
    """Measures the time to the first token of the second turn, and of its new tokens alone."""
    options = {"max_new_tokens": 8, "sampling": GREEDY}
    messages = [{"role": "user", "content": "x" * TURN}]
    answer, cache = model.chat(messages, return_cache=True, **options)
    question = {"role": "user", "content": "And now?"}

    def time_of(messages, cache=None):
        start = time.perf_counter()
        stream = model.stream(messages, cache=cache, stop_token_ids=None, **options)
        next(stream)
        stream.close()
        return time.perf_counter() - start

    turns = {"second turn": ([*messages, answer, question], cache), "new tokens": ([question],)}
    found: dict = {name: [] for name in turns}
    for _ in range(RUNS + 1):
        for name, inputs in turns.items():
            found[name].append(time_of(*inputs))
    for name, times in found.items():
        yield {"chat": name, "ms to the first token": to_milliseconds(times[1:], 1)}


# --- CPU time of calls ---

TEXT = "What is the time o' the day? Past the mid season. At least two glasses."
TOP_K = {"sampling": SamplingParams(temperature=1, top_k=40, seed=0)}


def cpu_seconds():
    """Returns the CPU time so far of this process and of its children that have ended."""
    return time.process_time() + sum(os.times()[2:4])


def cpu_milliseconds(function):
    start = cpu_seconds()
    function()
    return 1000 * (cpu_seconds() - start)


def measure_cpu(arguments, runs=3):
    """Yields one dictionary, so that `benchmarks.in_turns` compares its entries."""
    model = make_text_model(arguments.model, arguments.dtype)
    found = {"import and load": 1000 * cpu_seconds()}
    first_tokens = []
    options = {"max_new_tokens": FEW, "stop_token_ids": None, "sampling": GREEDY}
    generate = functools.partial(model.generate, **options)

    def stream():
        start = time.perf_counter()
        chunks = model.stream(TEXT, **options)
        next(chunks)
        first_tokens.append(1000 * (time.perf_counter() - start))
        for _ in chunks:
            pass

    cases = {"stream": stream}
    for size, inputs in ((1, TEXT), (16, [TEXT[: 4 + 4 * row] for row in range(16)])):
        cases[f"generate, batch size {size}"] = functools.partial(generate, inputs)
        cases[f"generate, batch size {size}, top_k"] = functools.partial(generate, inputs, **TOP_K)
    cases["generate, a stop string"] = functools.partial(generate, TEXT, stop=["\n\n"])
    cases["generate, return_cache"] = functools.partial(generate, TEXT, return_cache=True)
    found["first call"] = cpu_milliseconds(lambda: generate(TEXT))
    for name, function in cases.items():
        function()
        found[name] = statistics.median(cpu_milliseconds(function) for _ in range(runs))
    found["first token of a stream, wall time"] = statistics.median(first_tokens[1:])
    yield {f"{name}, ms": round(value, 3) for name, value in found.items()}


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
    model, _ = prepare(arguments, None)
    inputs = random_prompts(model.backbone.vocabulary_size, arguments.batch, FEW)
    generate = functools.partial(model.generate, inputs, stop_token_ids=None)
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
    "options": measure_options,
    "cpu": measure_cpu,
}


def main():
    parser = make_parser(__doc__)
    parser.add_argument("model", choices=[*MODELS, "griffin_tiny_text"])
    parser.add_argument("batch", type=int, nargs="?", default=1)
    parser.add_argument("--measure", choices=MEASURES, default="speed")
    parser.add_argument("--quantizations", nargs="+", choices=QUANTIZATIONS, default=[])
    parser.add_argument("--lengths", type=int, nargs="+", default=[131_072], help="of prefill")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--first-call", action="store_true", help="in new processes")
    parser.add_argument("--turns", action="store_true", help="of `benchmarks.in_turns`")
    arguments = parser.parse_args()
    if arguments.model not in MODELS and arguments.measure not in ("options", "cpu"):
        parser.error("griffin_tiny_text is a model for --measure options and cpu")
    if arguments.measure == "baseline" and not MODELS[arguments.model].baseline:
        parser.error(f"{arguments.model} has no baseline")
    if arguments.first_call and arguments.turns:
        return answer_turns(functools.partial(measure_first_call, arguments))
    if arguments.first_call:
        return print_results(measure_first_calls())
    if arguments.turns:
        model, _ = prepare(arguments, [None, *arguments.quantizations][-1])
        return answer_turns(Speed(model, arguments.batch).measure)
    print_header(arguments.dtype)
    print_results(MEASURES[arguments.measure](arguments))


if __name__ == "__main__":
    main()
