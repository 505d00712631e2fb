"""Measures an engine that serves requests, next to `generate` of one batch.

    python -m benchmarks.serving hgrn2 --backend torch

Argument: a model of `benchmarks.models`, with random weights. Decoding is greedy unless
`--temperature` is given, and there is no text. Tables:

- decoding: the step time at half and at all slots, and the lower bound of `decoding_time` (from
  measured copy and matrix product rates) as a share of it;
- throughput: new tokens per second of `generate` on one batch of prompts and answers of the mean
  length, with prefill; and of the engine when more requests wait than there are slots. Lengths of
  its requests are uniform from half to three halves of the mean. The time in which the slots fill
  or empty is not counted;
- latency: requests arrive at random (a Poisson process) at `--load` times the rate of the
  saturated engine. The first fifth of the time is not counted.

With `--turns`, a process compiles, and `benchmarks.in_turns` then measures throughput and latency
in turns. `--rate` compares versions of different speed at one rate of requests.

On a CPU, as a check:

    python -m benchmarks.serving hawk_tiny --backend torch --dtype float32 --slots 2 \
        --prompt 16 --answer 8 --requests 8 --seconds 1
"""

import functools
import statistics
import time

import numpy as np

from benchmarks import make_parser
from benchmarks.decoding import (
    least_seconds_a_token,
    seconds_a_token,
    seconds_of_call,
    warm_up,
)
from benchmarks.in_turns import answer_turns
from benchmarks.models import MODELS, make_model
from benchmarks.timing import device_rates, print_header, print_results
from keras_recurrent import which_generation
from keras_recurrent.models import SamplingParams
from keras_recurrent.serving import Engine

RUNS = 3
# Targets: minimum share of the throughput of `generate`, minimum share of the roofline, p95 seconds
# to the first token, p95 time between tokens in steps.
MIN_SHARE, MIN_ROOF, MAX_FIRST, MAX_STEPS = 0.85, 0.6, 0.25, 1.5


def decoding(model, arguments, rates):
    """Yields the step times of two batch sizes."""
    for batch in sorted({max(1, arguments.slots // 2), arguments.slots}):
        warm_up(model, batch, arguments.answer, arguments.prompt)
        times = [
            seconds_a_token(model, batch, arguments.answer, arguments.prompt) for _ in range(RUNS)
        ]
        step = statistics.median(times)
        least = least_seconds_a_token(model, batch, arguments.answer, arguments.prompt, **rates)
        share = {"share of roof": round(least / step, 3), "bar": MIN_ROOF}
        yield {"batch size": batch, "step ms": round(1000 * step, 3), **share}


def static_throughput(model, arguments):
    """Returns the new tokens per second of `generate` for one batch, with prefill."""
    sizes = arguments.slots, arguments.prompt, arguments.prompt + arguments.answer
    seconds = statistics.median(seconds_of_call(model, *sizes) for _ in range(RUNS))
    return arguments.slots * arguments.answer / seconds


class Requests:
    """Random requests to an engine, and the times of their tokens.

    Args:
        engine: the `Engine`.
        arguments: the arguments of the command line.
    """

    def __init__(self, engine, arguments):
        self._engine, self._arguments = engine, arguments
        self._rng = np.random.default_rng(0)
        self.times = []  # of the tokens of each request
        self.requests = []

    def submit(self):
        """Submits a request of random lengths."""
        given, new = (
            self._length(mean) for mean in (self._arguments.prompt, self._arguments.answer)
        )
        tokens = self._rng.integers(1, self._engine.model.backbone.vocabulary_size, given)
        sampling = SamplingParams(temperature=self._arguments.temperature, seed=len(self.requests))
        options = {"sampling": sampling, "max_new_tokens": new, "stop_token_ids": None}
        request, times = self._engine.submit(tokens, **options), []
        request.set_listener(lambda delta: times.append(time.perf_counter()))
        self.requests.append(request)
        self.times.append(times)

    def _length(self, mean):
        return int(self._rng.integers(max(1, mean // 2), 3 * mean // 2 + 1))

    def wait(self):
        """Waits for all answers, and returns them."""
        return [request.result() for request in self.requests]


def saturated(engine, arguments):
    """Returns the new tokens per second and the requests per second of an engine with a queue."""
    load = Requests(engine, arguments)
    for _ in range(arguments.requests):
        load.submit()
    load.wait()
    begin, end = load.times[min(arguments.slots, arguments.requests - 2)][0], load.times[-1][0]
    tokens = sum(begin <= t < end for times in load.times for t in times)
    per_second = tokens / (end - begin)
    return per_second, per_second / statistics.mean(map(len, load.times))


def measure_in_turns(model, make_engine, arguments):
    """Measures throughput and the 95th percentiles of latencies for `benchmarks.in_turns`."""

    def measure():
        static = static_throughput(model, arguments)
        with make_engine() as engine:  # it times chunks while no other process runs
            tokens, rate = saturated(engine, arguments)
            times = latency(engine, arguments, arguments.rate or arguments.load * rate)
        first, between = (1000 * np.quantile(part, 0.95) for part in times)
        return {
            **{"generate": static, "engine": tokens, "engine / generate": tokens / static},
            **{"first token, ms": first, "between tokens, ms": between},
        }

    measure()
    answer_turns(measure)


def latency(engine, arguments, rate):
    """Returns seconds to the first token, and between two tokens, of requests at a rate."""
    load, begin = Requests(engine, arguments), time.perf_counter()
    arrival = begin
    while arrival < begin + arguments.seconds:
        time.sleep(max(0.0, arrival - time.perf_counter()))
        load.submit()
        arrival += load._rng.exponential(1 / rate)
    answers = load.wait()
    counted = begin + arguments.seconds / 5
    first, between = [], []
    for answer, times in zip(answers, load.times, strict=True):
        if times[0] - answer.time_to_first_token >= counted:
            first.append(answer.time_to_first_token)
            between.extend(np.diff(times))
    return np.array(first or [np.nan]), np.array(between or [np.nan])


def latency_line(name, times, bar):
    quantiles = np.quantile(times, (0.5, 0.95, 0.99))
    names = "p50 ms", "p95 ms", "p99 ms"
    found = {key: round(1000 * q, 2) for key, q in zip(names, quantiles, strict=True)}
    return {"time": name, **found, "bar of p95": round(1000 * bar, 2)}


def measure_all(model, make_engine, arguments):
    steps = list(decoding(model, arguments, device_rates(arguments.dtype)))
    yield from steps
    static = static_throughput(model, arguments)
    yield {"call": "generate", "tokens/s": round(static), "share": 1, "bar": ""}
    print(f"generate: {which_generation(model)}", flush=True)
    start = time.perf_counter()
    with make_engine() as engine:
        print(f"The engine started in {time.perf_counter() - start:.1f} s: ", end="")
        print(which_generation(model), flush=True)
        tokens, rate = saturated(engine, arguments)
        share = {"share": round(tokens / static, 3), "bar": MIN_SHARE}
        yield {"call": "engine", "tokens/s": round(tokens), **share}
        first, between = latency(engine, arguments, arguments.load * rate)
    yield latency_line(f"first token, {arguments.load * rate:.1f} requests/s", first, MAX_FIRST)
    step = steps[-1]["step ms"] / 1000
    yield latency_line("between two tokens", between, MAX_STEPS * step)


def main():
    parser = make_parser(__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=512, help="mean number of tokens")
    parser.add_argument("--answer", type=int, default=256, help="mean number of tokens")
    parser.add_argument(
        "--requests", type=int, default=1024, help="number of requests in the throughput run"
    )
    parser.add_argument("--load", type=float, default=0.7, help="share of the saturated rate")
    parser.add_argument("--rate", type=float, help="requests/s in turns, instead of `--load`")
    parser.add_argument("--seconds", type=float, default=60, help="duration of the latency run")
    parser.add_argument("--temperature", type=float, default=0)
    parser.add_argument("--turns", action="store_true", help="of `benchmarks.in_turns`")
    parser.add_argument("--prefill-chunk", type=int, help="`prefill_chunk` of the engine")
    arguments = parser.parse_args()
    if min(arguments.requests - 2, arguments.prompt, arguments.answer) < 2:
        parser.error("--requests must be at least 4, --prompt and --answer 2")

    model = make_model(arguments.model, dtype=arguments.dtype)
    model.compile(sampler="greedy")
    chunk = {} if arguments.prefill_chunk is None else {"prefill_chunk": arguments.prefill_chunk}
    max_length = 3 * arguments.prompt // 2 + 3 * arguments.answer // 2
    options = {"max_queued": arguments.requests, "prefix_cache_bytes": 0, **chunk}
    make_engine = functools.partial(Engine, model, arguments.slots, max_length, **options)
    if arguments.turns:
        static_throughput(model, arguments)
        return measure_in_turns(model, make_engine, arguments)

    print_header(arguments.dtype)
    print_results(measure_all(model, make_engine, arguments))


if __name__ == "__main__":
    main()
