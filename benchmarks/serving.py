"""Measures an engine and a server under requests, next to `generate` of one batch.

    python -m benchmarks.serving hgrn2 --backend torch                     # the engine
    python -m benchmarks.serving hgrn2 --backend torch --causes            # the engine's throughput
    python -m benchmarks.serving hgrn2 --backend torch --http --prefixes   # the server

Argument: a model of `benchmarks.models`, with random weights. Decoding of the engine is greedy
unless `--temperature` is given, and there is no text. Lengths are uniform from half to three halves
of the mean. Tables of the engine:

- decoding: the step time at half and at all slots, and the lower bound of `decoding_time` (from
  measured copy and matrix product rates) as a share of it;
- throughput: new tokens per second of `generate` on one batch of prompts and answers of the mean
  length, with prefill; and of the engine when more requests wait than there are slots. The time in
  which the slots fill or empty is not counted;
- latency: requests arrive at random (a Poisson process) at `--load` times the rate of the
  saturated engine. The first fifth of the time is not counted.

`--causes` repeats the throughput with equal lengths, with saved states and with a new request for
each one that ends. It also counts the time in which the slots fill and empty, and lists where the
thread of the engine spends its time.

`--http` saves the model as a preset and starts `python -m keras_recurrent.serving`. Clients in four
processes each send a request after the answer to the last one, and further requests arrive at
random, at `--load` times the highest rate. The engine then gets the same loads in this process.
`--prefixes` measures the time to the first token of prompts that begin as earlier ones, with saved
states and with a new `cache_salt` for each request, which shares none.

With `--turns`, a process compiles, and `benchmarks.in_turns` then measures throughput and latency
in turns. `--rate` compares versions of different speed at one rate of requests.

On a CPU, as a check:

    python -m benchmarks.serving hawk_tiny --backend torch --dtype float32 --slots 2 \
        --prompt 16 --answer 8 --requests 8 --seconds 1
"""

import asyncio
import collections
import contextlib
import functools
import itertools
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np
import tokenizers

from benchmarks import make_parser
from benchmarks.clients import Answer, Clients, Load, drive
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
from keras_recurrent.tokenizers import BPETokenizer

RUNS = 3
# Targets: minimum share of the throughput of `generate`, minimum share of the roofline, p95 seconds
# to the first token, p95 time between tokens in steps.
MIN_SHARE, MIN_ROOF, MAX_FIRST, MAX_STEPS = 0.85, 0.6, 0.25, 1.5
CLIENTS, PROCESSES = (1, 16, 128, 256), 4
# Targets of (streamed, clients): minimum share of the throughput of the engine.
MIN_HTTP = {(True, 128): 0.75, (False, 256): 0.85}
TURNS, QUESTIONS = 10, 10
PRESET = "preset"
BODY = {"model": PRESET, "temperature": 0}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


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


# --- The engine ---


def send_to(engine, temperature=0):
    """Returns a function for `drive` that sends random tokens to an engine."""
    rng = np.random.default_rng(0)

    async def send(num_prompt_tokens, num_new_tokens):
        tokens = rng.integers(1, engine.model.backbone.vocabulary_size, num_prompt_tokens)
        sampling = SamplingParams(temperature=temperature, seed=int(rng.integers(2**32)))
        times, loop, ended = [], asyncio.get_running_loop(), asyncio.Event()
        begin = time.perf_counter()
        request = engine.submit(tokens, sampling, num_new_tokens, stop_token_ids=None)
        request.set_listener(lambda delta: times.append(time.perf_counter()))
        request.add_done_callback(lambda request: loop.call_soon_threadsafe(ended.set))
        await ended.wait()
        return Answer(begin, times, len(request.result().token_ids))

    return send


def load_engine(engine, arguments, **load):
    """Returns the `Answer`s of an engine to a `Load`."""
    send = send_to(engine, arguments.temperature)
    return asyncio.run(drive(send, Load(arguments.prompt, arguments.answer, **load)))


def tokens_per_second(answers, begin, end):
    """Returns the new tokens per second from one time to another."""
    shares = (np.mean([begin <= t < end for t in answer.times]) for answer in answers)
    pairs = zip(answers, shares, strict=True)
    return sum(answer.num_tokens * share for answer, share in pairs) / (end - begin)


def saturated(answers, num_slots):
    """Returns the new tokens per second of requests that arrived at once, while slots are full."""
    first = answers[min(num_slots, len(answers) - 2)].times[0]
    return tokens_per_second(answers, first, answers[-1].times[0])


def delays(answers, begin):
    """Returns seconds to the first token, and between tokens, of requests after a time."""
    counted = [answer for answer in answers if answer.begin >= begin]
    first = [answer.times[0] - answer.begin for answer in counted]
    between = [gap for answer in counted for gap in np.diff(answer.times)]
    return np.array(first or [np.nan]), np.array(between or [np.nan])


def latency(engine, arguments, rate):
    answers = load_engine(engine, arguments, seconds=arguments.seconds, rate=rate)
    return delays(answers, answers[0].begin + arguments.seconds / 5)


def throughput(engine, arguments):
    """Returns the new tokens per second and the requests per second of a saturated engine."""
    answers = load_engine(engine, arguments, requests=arguments.requests)
    rate = saturated(answers, arguments.slots)
    return rate, rate / statistics.mean(answer.num_tokens for answer in answers)


def measure_in_turns(model, make_engine, arguments):
    """Measures throughput and the 95th percentiles of latencies for `benchmarks.in_turns`."""

    def measure():
        static = static_throughput(model, arguments)
        with make_engine() as engine:  # it times chunks while no other process runs
            tokens, rate = throughput(engine, arguments)
            times = latency(engine, arguments, arguments.rate or arguments.load * rate)
        first, between = (1000 * np.quantile(part, 0.95) for part in times)
        return {
            **{"generate": static, "engine": tokens, "engine / generate": tokens / static},
            **{"first token, ms": first, "between tokens, ms": between},
        }

    measure()
    answer_turns(measure)


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
        tokens, rate = throughput(engine, arguments)
        share = {"share": round(tokens / static, 3), "bar": MIN_SHARE}
        yield {"call": "engine", "tokens/s": round(tokens), **share}
        first, between = latency(engine, arguments, arguments.load * rate)
    yield latency_line(f"first token, {arguments.load * rate:.1f} requests/s", first, MAX_FIRST)
    step = steps[-1]["step ms"] / 1000
    yield latency_line("between two tokens", between, MAX_STEPS * step)


# --- Causes of a lower throughput ---


@contextlib.contextmanager
def count_frames(thread, counts, interval=2e-3):
    """Counts what a thread does, by functions of this package below `advance`."""
    ended = threading.Event()

    def sample():
        while not ended.wait(interval):
            frame, names = sys._current_frames().get(thread.ident), []
            while frame is not None and frame.f_code.co_name != "run":
                if "keras_recurrent" in frame.f_code.co_filename:
                    names.append(frame.f_code.co_name)
                frame = frame.f_back
            counts[" > ".join(names[::-1][1:4]) or "idle"] += 1

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    yield
    ended.set()
    sampler.join()


def measure_causes(make_engine, arguments):
    shares = collections.defaultdict(dict)
    for max_bytes, is_equal in itertools.product((0, 2**30), (False, True)):
        with make_engine(prefix_cache_bytes=max_bytes) as engine:
            load_engine(engine, arguments, requests=4)  # compiles
            for arrivals in ("at once", "one for each slot"):
                load = {"requests": arguments.requests}
                if arrivals != "at once":
                    load = {"clients": arguments.slots, "seconds": arguments.seconds}
                counts: collections.Counter = collections.Counter()
                with count_frames(engine._thread, counts):
                    answers = load_engine(engine, arguments, is_equal=is_equal, **load)
                begin, end = answers[0].begin, max(answer.times[-1] for answer in answers)
                full = saturated(answers, arguments.slots)
                if arrivals != "at once":
                    window = begin + arguments.seconds / 4, begin + arguments.seconds
                    full = tokens_per_second(answers, *window)
                name = f"{'equal' if is_equal else 'mixed'} lengths, {arrivals}"
                name += ", saved states" if max_bytes else ""
                yield {
                    "requests": name,
                    "tokens/s, slots full": round(full),
                    "tokens/s, all": round(tokens_per_second(answers, begin, end + 1e-6)),
                }
                for function, number in counts.most_common(12):
                    shares[name][function] = f"{number / counts.total():.1%}"
    for name, found in shares.items():
        for function, share in found.items():
            yield {"requests": name, "function of the generation thread": function, "share": share}


# --- The server ---


def make_preprocessor(model, max_length):
    """Returns a preprocessor with a vocabulary of the model's size.

    Tokens are a space and one to four letters, or single bytes, such as digits. Generated
    words tokenize to the same tokens, so that a conversation continues from the state after an
    answer.
    """
    size = model.backbone.vocabulary_size
    names = ["<end>", *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    merges, words, letters = [], ["Ġ"], "abcdefghijklmnopqrstuvwxyz"
    for word in words:  # which grows
        new = letters[: size - len(names)]
        merges += [(word, letter) for letter in new]
        words += [word + letter for letter in new]
        names += [word + letter for letter in new]
        if len(names) >= size:
            break
    vocabulary = {name: id for id, name in enumerate(names)}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = BPETokenizer(library.to_str().encode(), end_token_id=0)
    options = {"sequence_length": max_length, "chat_template": TEMPLATE}
    return type(model).preprocessor_cls(tokenizer, **options)


@contextlib.contextmanager
def start_server(folder, arguments, max_length):
    """Starts a server of the preset in a folder; yields its port."""
    preset = os.path.join(folder, PRESET)
    options = {"--preset": preset, "--dtype": arguments.dtype, "--slots": arguments.slots}
    options |= {"--max-length": max_length, "--port": 0}
    command = [sys.executable, "-m", "keras_recurrent.serving"]
    command += [str(each) for pair in options.items() for each in pair]
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
    log, start = pathlib.Path(folder) / "log", time.perf_counter()
    with log.open("w") as file:
        process = subprocess.Popen(command, env=environment, stderr=file)
    try:
        while not (match := re.search(r"Listening on http://.*:(\d+)", log.read_text())):
            if process.poll() is not None:
                raise SystemExit(f"The server failed:\n{log.read_text()}")
            time.sleep(0.1)
        print(f"The server started in {time.perf_counter() - start:.1f} s", flush=True)
        yield int(match[1])
    finally:
        process.terminate()
        process.wait()


def load_server(port, load, stream):
    """Returns the `Answer`s of a server to a `Load`, and the busy share of the busiest client."""
    options, processes = BODY | (STREAM if stream else {}), []
    for part in load.parts(PROCESSES):
        pipes: dict = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen([sys.executable, "-m", "benchmarks.clients"], **pipes)
        print(json.dumps([port, options, part._asdict()]), file=process.stdin, flush=True)
        processes.append(process)
    found = [json.loads(process.communicate()[0]) for process in processes]
    answers = sorted(Answer(*each) for part in found for each in part["answers"])
    busy = max(part["cpu_seconds"] for part in found)
    return answers, busy / (max(answer.times[-1] for answer in answers) - answers[0].begin)


def load_line(name, answers, load, busy=None):
    """Returns the figures of answers to a load, after the first quarter of its seconds.

    There are no times between tokens of whole answers, whose tokens arrive together.

    busy: the busy share of the busiest process of clients.
    """
    begin, end = (answers[0].begin + share * load.seconds for share in (1 / 4, 1))
    first, between = delays(answers, begin)
    counted = [each for each in answers if each.begin >= begin]
    durations = sum(each.times[-1] - each.times[0] for each in counted)
    num_gaps = sum(each.num_tokens - 1 for each in counted if len(each.times) > 1) or np.nan
    ms = [1000 * np.quantile(first, 0.5), 1000 * np.quantile(first, 0.95)]
    ms += [1000 * durations / num_gaps, 1000 * np.quantile(between, 0.95)]
    names = "first p50", "first p95", "between mean", "between p95", "longest"
    rounded = (round(float(value), 2) for value in (*ms, 1000 * between.max()))
    return {
        "requests": name,
        "tokens/s": round(tokens_per_second(answers, begin, end)),
        **{f"{name}, ms": value for name, value in zip(names, rounded, strict=True)},
        "busiest client": "" if busy is None else f"{busy:.0%}",
    }


def measure_server(model, make_engine, arguments):
    """Yields the tables of `--http` and `--prefixes`."""
    question, document = arguments.prompt // 4, arguments.document
    max_length = max(
        3 * arguments.prompt // 2 + 3 * arguments.answer // 2,
        arguments.prefixes * (document + question + arguments.answer + 64),
        arguments.prefixes * TURNS * (question + arguments.answer + 64),
    )
    lines = {}
    with tempfile.TemporaryDirectory() as folder:
        model.preprocessor = make_preprocessor(model, max_length)
        model.save_to_preset(os.path.join(folder, PRESET))
        model.preprocessor = None
        with start_server(folder, arguments, max_length) as port:
            if arguments.prefixes:
                options = {"logit_bias": {str(id): -100 for id in range(257)}}
                clients = Clients(port, {**BODY, **STREAM, **options})
                yield from asyncio.run(measure_prefixes(clients, question, arguments))
            if arguments.http:
                for key, line in measure_http(port, arguments):
                    lines[key] = line
                    yield line
    if arguments.http:
        with make_engine() as engine:
            yield from compare_with_engine(engine, lines, arguments)


def measure_http(port, arguments):
    """Yields (streamed, clients, requests/s) and the figures of each load."""
    means, seeds = (arguments.prompt, arguments.answer, arguments.seconds), itertools.count()

    def measure(is_streamed, clients=0, rate=0):
        load = Load(*means, clients=clients, rate=rate, seed=next(seeds))
        answers, busy = load_server(port, load, is_streamed)
        name = f"{clients} clients" if clients else f"{rate:.1f} requests/s"
        name += ", streamed" if is_streamed else ", whole answers"
        return (is_streamed, clients, rate), load_line(f"HTTP, {name}", answers, load, busy)

    rates = []
    for is_streamed, clients in itertools.product((True, False), CLIENTS):
        key, line = measure(is_streamed, clients)
        rates.append(line["tokens/s"] / arguments.answer if is_streamed else 0)
        yield key, line
    yield measure(True, rate=arguments.load * max(rates))


def compare_with_engine(engine, lines, arguments):
    """Yields the figures of the engine for the loads of the server, and their ratios."""
    found = {}
    for _, clients, rate in lines:
        if (clients, rate) not in found:
            load = {"seconds": arguments.seconds, "clients": clients, "rate": rate}
            answers = load_engine(engine, arguments, **load)
            name = f"{clients} clients" if clients else f"{rate:.1f} requests/s"
            found[clients, rate] = load_line(f"engine, {name}", answers, arguments)
            yield found[clients, rate]
    for (is_streamed, clients, rate), line in lines.items():
        own = found[clients, rate]
        between = line["between p95, ms"], line["between mean, ms"]
        later = (between[0] - own["between p95, ms"]) / own["between mean, ms"]
        yield {
            "requests": line["requests"],
            "HTTP / engine": round(line["tokens/s"] / own["tokens/s"], 3),
            "bar": MIN_HTTP.get((is_streamed, clients), ""),
            "between, p95 / mean": round(between[0] / between[1], 2) if between[1] else "",
            "p95 - engine's, steps": round(later, 2),
        }


async def measure_prefixes(clients, question, arguments):
    """Returns lines of times to the first token, with saved states and without."""
    found, numbers = collections.defaultdict(list), itertools.count()

    async def compare(name, path, **body):
        shared = await clients.post(path, body)
        salted = {**body, "max_tokens": 1, "cache_salt": str(next(numbers))}
        found[name].append((shared, await clients.post(path, salted)))
        return shared

    def message(role, content):
        return {"role": role, "content": content}

    def ask():
        return message("user", clients.prompt(question))

    await clients.send(question, arguments.answer)  # compiles
    for _ in range(RUNS):
        messages = []
        for turn in range(1, TURNS + 1):
            messages.append(ask())
            body = {"messages": messages, "max_tokens": arguments.answer}
            answer = await compare(f"turn {turn} of a conversation", "chat/completions", **body)
            messages.append(message("assistant", answer.text))
    text, names = clients.prompt(arguments.document), ("first", "second", *["later"] * QUESTIONS)
    size = f"{arguments.document} tokens"
    for _, name in zip(range(QUESTIONS), names, strict=False):
        body = {"messages": [message("system", text), ask()], "max_tokens": 2}
        await compare(f"system message of {size}, {name} question", "chat/completions", **body)
    for _, name in zip(range(QUESTIONS), names, strict=False):
        body = {"prompt": text[::-1] + clients.prompt(question), "max_tokens": 2}
        await compare(f"document of {size}, {name} question", "completions", **body)
        body = {"prompt": clients.prompt(question), "max_tokens": 2}
        await compare("question alone", "completions", **body)

    def milliseconds(answers):
        return statistics.median(1000 * (each.times[0] - each.begin) for each in answers)

    lines = []
    for name, pairs in found.items():
        shared, salted = zip(*pairs, strict=True)
        times = milliseconds(shared), milliseconds(salted)
        counts = {"tokens": shared[-1].num_prompt_tokens, "cached": shared[-1].num_cached}
        ms = {"first token, ms": round(times[0], 1), "nothing shared, ms": round(times[1], 1)}
        lines.append({"prompt": name, **counts, **ms, "factor": round(times[1] / times[0], 2)})
    return lines


def main():
    parser = make_parser(__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--causes", action="store_true", help="what lowers the throughput")
    parser.add_argument("--http", action="store_true", help="the server, next to the engine")
    parser.add_argument("--prefixes", action="store_true", help="prompts with a shared beginning")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=512, help="mean number of tokens")
    parser.add_argument("--answer", type=int, default=256, help="mean number of tokens")
    parser.add_argument("--document", type=int, default=4000, help="number of shared tokens")
    parser.add_argument(
        "--requests", type=int, default=1024, help="number of requests in the throughput run"
    )
    parser.add_argument("--load", type=float, default=0.7, help="share of the saturated rate")
    parser.add_argument("--rate", type=float, help="requests/s in turns, instead of `--load`")
    parser.add_argument(
        "--seconds", type=float, help="seconds per load (default 60; 8 with --causes or --http)"
    )
    parser.add_argument("--temperature", type=float, default=0)
    parser.add_argument("--turns", action="store_true", help="for `benchmarks.in_turns`")
    parser.add_argument("--prefill-chunk", type=int, help="`prefill_chunk` of the engine")
    arguments = parser.parse_args()
    if min(arguments.requests - 2, arguments.prompt, arguments.answer) < 2:
        parser.error("--requests must be at least 4, --prompt and --answer 2")
    if arguments.seconds is None:
        arguments.seconds = 8 if arguments.causes or arguments.http else 60

    model = make_model(arguments.model, dtype=arguments.dtype)
    model.compile(sampler="greedy")
    chunk = {} if arguments.prefill_chunk is None else {"prefill_chunk": arguments.prefill_chunk}
    max_length = 3 * arguments.prompt // 2 + 3 * arguments.answer // 2
    num_queued = max(arguments.requests, *CLIENTS)
    options = {"max_queued": num_queued, "prefix_cache_bytes": 0, **chunk}
    make_engine = functools.partial(Engine, model, arguments.slots, max_length, **options)
    if arguments.turns:
        static_throughput(model, arguments)
        return measure_in_turns(model, make_engine, arguments)

    print_header(arguments.dtype)
    if arguments.causes:
        print_results(measure_causes(make_engine, arguments))
    elif arguments.http or arguments.prefixes:
        print_results(measure_server(model, make_engine, arguments))
    else:
        print_results(measure_all(model, make_engine, arguments))


if __name__ == "__main__":
    main()
