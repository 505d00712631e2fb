"""Measures an engine and a server under requests, next to `generate` of one batch.

Argument: a model of `benchmarks.models` or a preset, with random weights. Decoding of the engine is
greedy unless `--temperature` is given, and there is no text. Lengths are uniform from half to three
halves of the mean. Tables of the engine:

- throughput: new tokens per second of `generate` on one batch of prompts and answers of the mean
  length, with prefill; and of the engine when more requests wait than there are slots. The time in
  which the slots fill or empty is not counted;
- latency: requests arrive at random (a Poisson process) at `--load` times the rate of the
  saturated engine. The first quarter of the time is not counted.

`--causes` repeats the throughput with equal lengths, with saved states and with a new request for
each one that ends, and also counts the time in which the slots fill and empty. Profile the process
with py-spy to see where the thread of the engine spends its time.

`--http` saves the model as a preset and starts `python -m keras_recurrent.serving`. Clients in four
processes each send a request after the answer to the last one, and further requests arrive at
random, at `--load` times the highest rate. The engine then gets the same loads in this process.
`--prefixes` measures the time to the first token of prompts that begin as earlier ones, with saved
states and with a new `cache_salt` for each request, which shares none.

`--grammars` fills the slots with greedy requests, of which none, one or 32 have a grammar, and
compares the step time, and the tokens of the requests without a grammar. Then it times the masks of
one and of 32 sequences.

With `--turns`, a process compiles, and `benchmarks.in_turns` then measures throughput and latency
in turns. `--rate` compares versions of different speed at one rate of requests.
"""

import asyncio
import collections
import contextlib
import functools
import gc
import itertools
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
import tokenizers

from benchmarks import make_parser
from benchmarks.clients import Answer, Clients, Load, drive
from benchmarks.decoding import prepare_call
from benchmarks.in_turns import answer_turns
from benchmarks.models import MODEL, make_model
from benchmarks.timing import print_header, print_results, seconds
from keras_recurrent import which_generation
from keras_recurrent.models import SamplingParams
from keras_recurrent.serving import Engine
from keras_recurrent.tokenizers import BPETokenizer

RUNS = 3
CLIENTS, PROCESSES = (1, 16, 128, 256), 4
GRAMMARS = 0, 1, 32  # requests with a grammar
TURNS, QUESTIONS = 10, 10
PRESET = "preset"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
BODY = {"model": PRESET, "temperature": 0}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def static_throughput(model, arguments):
    """Returns the new tokens per second of `generate` for one batch, with prefill."""
    call = prepare_call(model, arguments.slots, arguments.prompt, arguments.answer)
    median = statistics.median(seconds(call) for _ in range(RUNS))
    return arguments.slots * arguments.answer / median


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


def load_engine(engine, arguments, load):
    """Returns the `Answer`s of an engine to a `Load`."""
    gc.collect()
    gc.freeze()  # as the server does: a full collection would stop all threads for half a second
    return asyncio.run(drive(send_to(engine, arguments.temperature), load))


def tokens_per_second(answers, begin, end):
    """Returns the new tokens per second from one time to another."""
    shares = (np.mean([begin <= t < end for t in answer.times]) for answer in answers)
    pairs = zip(answers, shares, strict=True)
    return sum(answer.num_tokens * share for answer, share in pairs) / (end - begin)


def saturated(answers, num_slots):
    """Returns the new tokens per second of requests that arrived at once, while slots are full."""
    first = answers[min(num_slots, len(answers) - 2)].times[0]
    return tokens_per_second(answers, first, answers[-1].times[0])


def throughput(engine, arguments):
    """Returns the new tokens per second and the requests per second of a saturated engine."""
    load = Load(arguments.prompt, arguments.answer, requests=arguments.requests)
    answers = load_engine(engine, arguments, load)
    rate = saturated(answers, arguments.slots)
    return rate, rate / statistics.mean(answer.num_tokens for answer in answers)


def measure_load(engine, arguments, load):
    """Returns the figures of an engine under a `Load`."""
    answers = load_engine(engine, arguments, load)
    return load_line(f"engine, {load.name}", answers, load)


def load_line(name, answers, load, busy=None):
    """Returns the figures of answers to a load, after the first quarter of its seconds.

    There are no times between tokens of whole answers, whose tokens arrive together.

    busy: the busy share of the busiest process of clients.
    """
    begin, end = (answers[0].begin + share * load.seconds for share in (1 / 4, 1))
    counted = [answer for answer in answers if answer.begin >= begin]
    first = [1000 * (answer.times[0] - answer.begin) for answer in counted] or [np.nan]
    between = [1000 * gap for answer in counted for gap in np.diff(answer.times)] or [np.nan]
    durations = sum(each.times[-1] - each.times[0] for each in counted)
    num_gaps = sum(each.num_tokens - 1 for each in counted if len(each.times) > 1) or np.nan
    figures = {
        f"{time}, p{n}, ms": np.quantile(times, n / 100)
        for time, times in {"first token": first, "between": between}.items()
        for n in (50, 95, 99)
    }
    figures |= {"between, mean, ms": 1000 * durations / num_gaps, "longest, ms": max(between)}
    return {
        "requests": name,
        "tokens/s": round(tokens_per_second(answers, begin, end)),
        **{name: round(float(figure), 2) for name, figure in figures.items()},
        "busiest client": "" if busy is None else f"{busy:.0%}",
    }


def measure_in_turns(model, make_engine, arguments):
    """Measures throughput and the 95th percentiles of latencies for `benchmarks.in_turns`."""

    def measure():
        static = static_throughput(model, arguments)
        with make_engine() as engine:  # it times chunks while no other process runs
            tokens, rate = throughput(engine, arguments)
            line = measure_load(engine, arguments, random_load(arguments, rate))
        return {
            **{"generate": static, "engine": tokens, "engine / generate": tokens / static},
            **{name: line[name] for name in ("first token, p95, ms", "between, p95, ms")},
        }

    measure()
    answer_turns(measure)


def random_load(arguments, rate):
    """Returns requests at `--rate`, or at `--load` times the rate of the saturated engine."""
    rate = arguments.rate or arguments.load * rate
    return Load(arguments.prompt, arguments.answer, arguments.seconds, rate=rate)


def measure_all(model, make_engine, arguments):
    static = static_throughput(model, arguments)
    yield {"call": "generate", "tokens/s": round(static), "share": 1}
    print(f"generate: {which_generation(model)}", flush=True)
    start = time.perf_counter()
    with make_engine() as engine:
        print(f"The engine started in {time.perf_counter() - start:.1f} s: ", end="")
        print(which_generation(model), flush=True)
        tokens, rate = throughput(engine, arguments)
        yield {"call": "engine", "tokens/s": round(tokens), "share": round(tokens / static, 3)}
        yield measure_load(engine, arguments, random_load(arguments, rate))


# --- Grammars ---


def measure_grammars(model, make_engine, arguments):
    # Older trees, with which `in_turns` compares, have no such module.
    from keras_recurrent.generation.grammar import consume, make_masks, make_matchers

    size, rng = model.backbone.vocabulary_size, np.random.default_rng(0)
    prompts = rng.integers(1, size, (arguments.slots, arguments.prompt))
    schema = {"type": "array", "items": {"type": "string"}, "minItems": arguments.answer}
    options = SamplingParams(temperature=0), SamplingParams(temperature=0, grammar=schema)
    model.preprocessor, found = make_preprocessor(model, 2 * arguments.prompt), []

    def run(engine, count):
        """Returns the seconds per step, and the tokens of the requests without a grammar."""
        times, requests = [[] for _ in prompts], []
        for row, prompt in enumerate(prompts, count - arguments.slots):
            stops = "auto" if row >= 0 else None
            requests.append(engine.submit(prompt, options[row >= 0], arguments.answer, None, stops))
        for request, own in zip(requests, times, strict=True):
            request.set_listener(lambda delta, own=own: own.append(time.perf_counter()))
        results = [request.result() for request in requests]
        steps = np.diff([each for each in times[0] if each > times[-1][0]])  # while slots are full
        return np.mean(steps), [each.token_ids for each in results[: arguments.slots - count]]

    with make_engine() as engine:
        for count in GRAMMARS:
            run(engine, count)  # compiles
            runs = [run(engine, count) for _ in range(RUNS)]
            found.append((statistics.median(each[0] for each in runs), runs[-1][1]))
            (base, tokens), (step, others) = found[0], found[-1]
            equal = all(a == b for a, b in zip(tokens, others, strict=False))
            ms = {"step, ms": round(1000 * step, 3), "relative": round(step / base, 3)}
            yield {"with a grammar": count, **ms, "other tokens equal": "yes" if equal else "no"}
    begin, preprocessor = '["', model.preprocessor
    for count in GRAMMARS[1:]:
        stops = preprocessor.stop_token_ids
        matchers = make_matchers(preprocessor, size, [options[1]] * count, stops)
        for matcher, token in itertools.product(matchers, preprocessor.tokenizer(begin).tolist()):
            consume(matcher, token)
        pairs = list(zip(matchers, range(count), strict=True))
        median = statistics.median(
            seconds(lambda pairs=pairs: make_masks(pairs, len(pairs), size)) for _ in range(1000)
        )
        us = {"us": round(1e6 * median, 1), "steps": round(median / found[0][0], 3)}
        yield {"masks": count, "vocabulary": size, **us}


# --- Causes of a lower throughput ---


def measure_causes(make_engine, arguments):
    for max_bytes, is_equal in itertools.product((0, 2**30), (False, True)):
        load = Load(arguments.prompt, arguments.answer, arguments.seconds, is_equal)
        loads = {
            "at once": load._replace(requests=arguments.requests, seconds=0),
            "one for each slot": load._replace(clients=arguments.slots),
        }
        with make_engine(prefix_cache_bytes=max_bytes) as engine:
            load_engine(engine, arguments, load._replace(requests=4, seconds=0))  # compiles
            for arrivals, each in loads.items():
                answers = load_engine(engine, arguments, each)
                begin, end = answers[0].begin, max(answer.times[-1] for answer in answers)
                name = f"{'equal' if is_equal else 'mixed'} lengths, {arrivals}"
                name += ", saved states" if max_bytes else ""
                if each.clients:
                    full = load_line(name, answers, each)["tokens/s"]
                else:
                    full = saturated(answers, arguments.slots)
                yield {
                    "requests": name,
                    "tokens/s, slots full": round(full),
                    "tokens/s, all": round(tokens_per_second(answers, begin, end + 1e-6)),
                }


# --- The server ---


def make_preprocessor(model, max_length):
    """Returns a preprocessor with a vocabulary of the model's size.

    Tokens are a space and one to four letters, or single bytes, such as digits. Generated
    words tokenize to the same tokens, so that a conversation continues from the state after an
    answer.
    """
    names = ["<end>", *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    letters = (word for n in range(1, 5) for word in itertools.product(LETTERS, repeat=n))
    num_words = model.backbone.vocabulary_size - len(names)
    words = ["Ġ" + "".join(word) for word in itertools.islice(letters, num_words)]
    merges = [(word[:-1], word[-1]) for word in words]
    vocabulary = {name: id for id, name in enumerate(names + words)}
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


def measure_server(model, make_engine, arguments):
    """Yields the tables of `--http` and `--prefixes`."""
    question, document = arguments.prompt // 4, arguments.document
    max_length = max(
        3 * arguments.prompt // 2 + 3 * arguments.answer // 2,
        arguments.prefixes * (document + question + arguments.answer + 64),
        arguments.prefixes * TURNS * (question + arguments.answer + 64),
    )
    lines = []
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
                for load, line in measure_http(port, arguments):
                    lines.append((load, line))
                    yield line
    if arguments.http:
        with make_engine() as engine:
            yield from compare_with_engine(engine, lines, arguments)


def measure_http(port, arguments):
    """Yields each load of the server and its figures."""
    means, seeds = (arguments.prompt, arguments.answer, arguments.seconds), itertools.count()

    def measure(is_streamed, clients=0, rate=0):
        load = Load(*means, clients=clients, rate=rate, seed=next(seeds))
        answers, busy = load_server(port, load, is_streamed)
        name = f"HTTP, {load.name}, {'streamed' if is_streamed else 'whole answers'}"
        return load._replace(seed=0), load_line(name, answers, load, busy)

    rates = []
    for is_streamed, clients in itertools.product((True, False), CLIENTS):
        key, line = measure(is_streamed, clients)
        rates.append(line["tokens/s"] / arguments.answer if is_streamed else 0)
        yield key, line
    yield measure(True, rate=arguments.load * max(rates))


def compare_with_engine(engine, lines, arguments):
    """Yields the figures of the engine for the loads of the server, and their ratios."""
    found = {}
    for load in dict.fromkeys(load for load, _ in lines):
        found[load] = measure_load(engine, arguments, load)
        yield found[load]
    for load, line in lines:
        own, mean = found[load], line["between, mean, ms"]
        later = line["between, p95, ms"] - own["between, p95, ms"]
        yield {
            "requests": line["requests"],
            "HTTP / engine": round(line["tokens/s"] / own["tokens/s"], 3),
            "between, p95 / mean": round(line["between, p95, ms"] / mean, 2),
            "p95 - engine's, steps": round(later / own["between, mean, ms"], 2),
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

    clients.close()

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
    parser.add_argument("model", help=MODEL)
    parser.add_argument("--causes", action="store_true", help="what lowers the throughput")
    parser.add_argument("--grammars", action="store_true", help="requests with a grammar")
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
    elif arguments.grammars:
        print_results(measure_grammars(model, make_engine, arguments))
    elif arguments.http or arguments.prefixes:
        print_results(measure_server(model, make_engine, arguments))
    else:
        print_results(measure_all(model, make_engine, arguments))


if __name__ == "__main__":
    main()
