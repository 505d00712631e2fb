"""Engine: requests that join and leave a running batch."""

import contextlib
import gc
import importlib
import os
import random
import threading
import time
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from keras_recurrent import dispatch, which_generation
from keras_recurrent.layers import hgrn2
from keras_recurrent.models import GriffinCausalLM, HGRN2CausalLM, SamplingParams
from keras_recurrent.serving import Engine, EngineClosed, EngineFull, scheduler
from keras_recurrent.serving.scheduler import Scheduler
from tests.generation.captures import capture_on_cpu
from tests.models.tiny import HYBRID, NIGHTLY_IF_COMPILED, tiny_causal_lm

IS_SUPPORTED = keras.config.backend() != "tensorflow"
needs_engine = pytest.mark.skipif(not IS_SUPPORTED, reason="the engine refuses TensorFlow")
PROMPTS = ["All happy families", "Once upon a time, there was", "x", "The cat sat on the mat and"]
PARAMS = [
    SamplingParams(top_p=0.9, repetition_penalty=1.3, min_new_tokens=6, seed=3, logprobs=2),
    SamplingParams(temperature=0, logprobs=0),
    SamplingParams(temperature=1.2, seed=1),
    SamplingParams(temperature=0.8, top_k=5, seed=2),
]
MAX_NEW_TOKENS, CHUNK = 10, 8
# The beginning of an answer is not that of a message: no prompt begins with an earlier one.
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}answer{% endif %}"
)


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(0)
    options = {"num_layers": 3, "sliding_window": 8, "dtype": "float32"}
    options["chat_template"] = TEMPLATE
    return GriffinCausalLM.from_preset("griffin_tiny", **options)


@pytest.fixture(scope="module")
def engine(model):
    if not IS_SUPPORTED:
        pytest.skip("the engine refuses TensorFlow")
    options = {"prefill_chunk": 8, "max_queued": 40, "prefix_cache_bytes": 0}
    with Engine(model, num_slots=3, max_length=2000, **options) as engine:
        yield engine


def _submit(engine, number, **options):
    options = {"sampling": PARAMS[number % 4], "max_new_tokens": MAX_NEW_TOKENS} | options
    return engine.submit(PROMPTS[number % 4], **options)


@pytest.fixture(scope="module")
def alone(engine):
    """Answers to requests that run alone."""
    return [_submit(engine, number).result(60) for number in range(4)]


@needs_engine
def test_answers_are_those_of_generate(model, alone):
    """A slot uses other options, random numbers or another state than its request."""
    options = {"sampling": PARAMS, "max_new_tokens": MAX_NEW_TOKENS, "strip_prompt": True}
    output = model.generate(PROMPTS, **options)
    assert [answer.text for answer in alone] == output.texts
    assert [answer.token_ids for answer in alone] == output.token_ids
    for answer, expected in zip(alone[:2], output.logprobs, strict=False):
        assert [each.token_id for each in answer.logprobs] == answer.token_ids
        found = [each.logprob for each in answer.logprobs]
        np.testing.assert_allclose(found, [each.logprob for each in expected], atol=1e-4)
    assert {answer.finish_reason for answer in alone} <= {"length", "stop"}


@needs_engine
def test_answers_do_not_depend_on_other_requests(engine, alone):
    """A request that joins, leaves or is cancelled changes tokens of another one."""
    rng, requests = random.Random(0), []
    for _ in range(16):
        number = rng.randrange(4)
        requests.append((number, _submit(engine, number)))
        if rng.random() < 0.3:
            _submit(engine, rng.randrange(4), max_new_tokens=100).cancel()
        time.sleep(rng.random() * 0.02)
    for number, request in requests:
        answer = request.result(60)
        assert answer.token_ids == alone[number].token_ids
        # On CPUs, libraries may round a product by the position of its row.
        pairs = zip(answer.logprobs, alone[number].logprobs, strict=True)
        assert all(abs(a.logprob - b.logprob) < 1e-5 for a, b in pairs)
    assert engine.stats()["active"] == engine.stats()["queued"] == 0


def capture_engines(monkeypatch):
    """Makes engines capture on a CPU, as `capture_on_cpu`, and process two prompts at once."""
    from keras_recurrent.serving import slots, torch_slots

    def fetch(tensor):  # a replay overwrites the tensor
        array = tensor.to("cpu", copy=True).numpy()
        return lambda: array

    monkeypatch.setattr(torch_slots, "Fetch", fetch)
    monkeypatch.setattr(slots, "is_on_cpu", lambda model: False)
    monkeypatch.setattr(slots, "SLOTS_PER_PROMPT", 1)
    monkeypatch.setattr(torch_slots, "MAX_PROMPTS", 2)
    return capture_on_cpu(monkeypatch)


@pytest.mark.skipif(keras.config.backend() != "torch", reason="CUDA graphs of torch")
def test_captured_steps_and_chunks_change_only_their_buffers(model, engine, alone, monkeypatch):
    """A capture advances sequences in progress, or a program writes to a state of another one."""
    captured, pools = capture_engines(monkeypatch)
    options = {"max_length": 200, "prefill_chunk": 8}
    with Engine(model, num_slots=3, **options) as captured_engine:
        assert len(captured) > 2  # a greedy step, and several parts of chunks
        requests = [_submit(captured_engine, number) for number in (1, 0, 3, 2, 1, 0)]
        answers = [request.result(60) for request in requests]
        more_stops = {"stop_token_ids": (1, 2, 4, 5, 6, 7)}  # another shape
        requests = [_submit(captured_engine, 1), _submit(captured_engine, 3, **more_stops)]
        answers += [request.result(60) for request in requests]
    for number, answer in zip((1, 0, 3, 2, 1, 0, 1), answers, strict=False):
        assert answer.token_ids == alone[number].token_ids
        assert len(answer.logprobs) == len(alone[number].logprobs)
    assert which_generation(model).name == "cuda_graph"
    assert len(captured) >= 4
    # The graphs of its larger stop tokens are deleted: nothing may be captured into their pool.
    del pools[:]
    options["prefix_cache_bytes"] = 0  # prompts that wait for a slot stay in the buffers
    with Engine(model, num_slots=3, **options) as captured_engine:
        assert pools[0] is None
        for _ in range(3):  # take all slots
            captured_engine.submit("a", PARAMS[1], max_new_tokens=60, stop_token_ids=None)
        requests = [(number, _submit(captured_engine, number)) for number in (3, 0, 1, 2)]
        for number, request in requests:
            assert request.result(60).token_ids == alone[number].token_ids


@needs_engine
def test_slots_write_states_every_few_tokens(monkeypatch):
    """Fails if a saved state misses recent tokens, or a slot has those of an earlier request."""
    if keras.config.backend() == "torch":
        from keras_recurrent.generation.torch import runner as chooser
    else:
        from keras_recurrent.generation import xla_programs as chooser

    model = tiny_causal_lm(family="hgrn2", num_layers=1)
    greedy = {"sampling": PARAMS[1], "stop_token_ids": None}
    prompts = [[5, 6, 7], [8], [9, 10, 11, 12]]

    def answers():
        with Engine(model, num_slots=2, max_length=200, prefill_chunk=8) as engine:
            pairs = list(zip(prompts, (9, 16, 12), strict=True))
            requests = [engine.submit(p, max_new_tokens=n, **greedy) for p, n in pairs]
            first = [request.result(60) for request in requests]
            longer = [[*p, *a.token_ids, 13] for p, a in zip(prompts, first, strict=True)]
            requests = [engine.submit(p, max_new_tokens=5, **greedy) for p in longer]
            second = [request.result(60) for request in requests]
        assert all(answer.num_cached_tokens for answer in second)
        return [[logprob.logprob for logprob in answer.logprobs] for answer in (*first, *second)]

    expected = answers()
    if keras.config.backend() == "torch":
        capture_engines(monkeypatch)
    monkeypatch.setattr(chooser, "MIN_DELAYED_ROWS", 2)
    monkeypatch.setattr(dispatch, "decodes_with_kernels", lambda tensor: True)
    monkeypatch.setattr(hgrn2, "hgrn2_step", None)
    for found, wanted in zip(answers(), expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-4)


@pytest.mark.skipif(keras.config.backend() != "jax", reason="programs of JAX")
def test_a_program_processes_several_prompts(model, alone, monkeypatch):
    """Prompts of one program get each other's states, or a saved state is that of another one."""
    from keras_recurrent.serving import jax_slots, slots

    monkeypatch.setattr(slots, "is_on_cpu", lambda model: False)
    monkeypatch.setattr(slots, "SLOTS_PER_PROMPT", 1)
    monkeypatch.setattr(jax_slots, "MAX_PROMPTS", 2)
    with Engine(model, num_slots=3, max_length=200, prefill_chunk=8) as engine:
        assert engine._slots.num_prompts == 2
        order = (1, 0, 3, 2, 1)
        for _ in range(2):  # then from saved states
            requests = [_submit(engine, number) for number in order]
            answers = [request.result(60) for request in requests]
            assert [answer.token_ids for answer in answers] == [alone[n].token_ids for n in order]
        assert any(answer.num_cached_tokens for answer in answers)


@pytest.mark.skipif(keras.config.backend() != "jax", reason="JAX compiles steps")
def test_compiling_does_not_stop_other_requests(engine, monkeypatch):
    """Requests wait while a step for other options is compiled, or the first step is."""
    from keras_recurrent.generation import loop

    may_compile, advance, compiled = threading.Event(), loop.advance, []
    engine.submit("a", SamplingParams(temperature=0), max_new_tokens=1).result(60)

    def wait(*arguments, **options):
        compiled.append(may_compile.wait(60))
        return advance(*arguments, **options)

    monkeypatch.setattr(loop, "advance", wait)
    options = {"max_new_tokens": 5, "stop_token_ids": (1, 2, 3, 4, 5)}
    running = engine.submit("a", SamplingParams(temperature=0), max_new_tokens=20)
    waiting = engine.submit("a", SamplingParams(min_p=0.5, seed=1), **options)
    try:
        assert running.result(30).token_ids
        assert not waiting.done
    finally:
        may_compile.set()
    assert waiting.result(60).token_ids
    assert len(compiled) == 1


@needs_engine
def test_deltas_are_the_answer(engine, alone):
    """Text is lost or doubled between deltas, or shows part of a stop string."""
    request = _submit(engine, 2)
    assert "".join(delta.text for delta in request) == alone[2].text
    assert list(request) == []
    stop = alone[2].text[3:5]
    deltas, done = [], threading.Event()
    request = _submit(engine, 2, stop=[stop])
    request.set_listener(deltas.append)
    request.add_done_callback(lambda request: done.set())
    assert done.wait(60)
    text = alone[2].text.partition(stop)[0]
    assert request.result().text == text == "".join(delta.text for delta in deltas)
    assert request.finish_reason == "stop"
    (token,) = alone[2].token_ids[3:4]
    request = _submit(engine, 2, stop_token_ids=(1, 2, 3, 4, token))
    assert request.result(60).token_ids[-1] == token
    assert request.finish_reason == "stop"


@needs_engine
def test_requests_end_from_outside(model, engine):
    """A cancelled or late request keeps its slot, or a listener's error ends engine or caller."""
    failures = []

    def fail(delta):
        failures.append(delta)
        raise RuntimeError("listener")

    ended = _submit(engine, 1)
    assert len(ended.result(60).token_ids) > 1
    ended.set_listener(fail)  # which is called in this thread
    assert len(failures) == 1
    running = [_submit(engine, number, max_new_tokens=1900) for number in range(3)]
    late = _submit(engine, 3, timeout=0)
    assert late.result(60).finish_reason == "timeout"
    assert not late.result().token_ids
    late.add_done_callback(fail)
    running[0].set_listener(fail)
    running[1].cancel()
    assert [request.result(60).finish_reason for request in running[:2]] == ["cancelled"] * 2
    assert _submit(engine, 1).result(60).finish_reason in ("stop", "length")
    running[2].cancel()


@needs_engine
@pytest.mark.once
def test_a_listener_that_exits_ends_its_request_only(engine):
    """`SystemExit` in a listener ends the engine, and all requests with it."""

    def leave(argument):
        raise SystemExit

    request, other = (_submit(engine, 1, stop_token_ids=None, max_new_tokens=99) for _ in range(2))
    request.set_listener(leave)
    other.add_done_callback(leave)
    assert request.result(60).finish_reason == "cancelled"
    assert other.result(60).finish_reason == "length"
    assert not engine.is_closed


@needs_engine
@pytest.mark.once
def test_bytes_that_a_tokenizer_rejects_end_their_request_only(model, engine, monkeypatch):
    """The text of one request ends the engine, and all requests with it."""
    from keras_recurrent.generation.stop_strings import StreamedText

    request, add = _submit(engine, 1, max_new_tokens=99), StreamedText.add
    monkeypatch.setattr(StreamedText, "add", lambda *_: b"\xff".decode())
    with pytest.raises(UnicodeDecodeError):
        request.result(60)
    monkeypatch.setattr(StreamedText, "add", add)
    assert _submit(engine, 1).result(60).token_ids


@needs_engine
@pytest.mark.once
def test_huge_numbers_are_as_no_limit(engine):
    """A number that does not fit into 32 bits or a timer ends the request with OverflowError."""
    for top_p in (1.0, 0.9):
        sampling = SamplingParams(top_k=2**31, top_p=top_p, seed=1)
        request = engine.submit("a", sampling, max_new_tokens=2, timeout=10**400)
        answer = request.result(10**400)
        unlimited = SamplingParams(top_p=top_p, seed=1)
        assert engine.submit("a", unlimited, 2).result(60).token_ids == answer.token_ids


@needs_engine
@pytest.mark.once
def test_an_engine_that_is_dropped_finishes_and_ends(model):
    """Each engine that a program drops keeps a thread and its memory, or loses requests."""
    engine = Engine(model, num_slots=1, max_length=200)
    thread, request = engine._thread, _submit(engine, 1)
    del engine
    gc.collect()
    assert request.result(60).token_ids
    thread.join(60)
    assert not thread.is_alive()


@needs_engine
@pytest.mark.once
def test_a_fork_of_an_engine_refuses(engine, monkeypatch):
    """A request in a fork, which does not have the engine's thread, waits forever."""
    request = _submit(engine, 1)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    for call in (lambda: _submit(engine, 1), request.result, lambda: next(request)):
        with pytest.raises(EngineClosed, match="after the fork"):
            call()


@needs_engine
def test_full_and_closed_engines_refuse(model):
    """A closed engine drops requests, or the queue grows without limit."""
    options = {"max_length": 200, "prefill_chunk": 8, "prefix_cache_bytes": 0}
    engine = Engine(model, num_slots=1, max_queued=2, **options)
    endless = {"max_new_tokens": 170, "stop_token_ids": None}
    with contextlib.suppress(EngineFull):
        for _ in range(10):
            _submit(engine, 1, **endless)
    with pytest.raises(EngineFull, match="2 requests are waiting"):
        _submit(engine, 1, **endless)
    requests = engine.close(wait=False)
    assert requests
    assert {request.finish_reason for request in requests} == {"cancelled"}
    with pytest.raises(EngineClosed, match="closed"):
        _submit(engine, 0)


@needs_engine
@pytest.mark.once
def test_another_call_of_close_cancels(model):
    """It does nothing while the first one waits, or the engine's thread waits for itself."""
    endless = {"max_new_tokens": 100_000, "stop_token_ids": None}
    options = {"max_length": 200_000, "prefill_chunk": 8, "prefix_cache_bytes": 0}
    engine = Engine(model, num_slots=2, **options)
    request = _submit(engine, 1, **endless)
    waiting = threading.Thread(target=engine.close)
    waiting.start()
    assert engine.close(wait=False) == [request]
    assert request.finish_reason == "cancelled"
    waiting.join()

    engine = Engine(model, num_slots=2, **options)
    request, found = _submit(engine, 1, **endless), []
    short = _submit(engine, 1, max_new_tokens=1)
    short.add_done_callback(lambda done: found.append(engine.close(wait=False)))
    assert request.result(60).finish_reason == "cancelled"
    engine.close()
    assert request in found[0]


@needs_engine
@pytest.mark.once
def test_a_failed_engine_ends_all_requests(model, monkeypatch):
    """A request that was on its way to a slot never ends."""
    engine = Engine(model, num_slots=1, max_length=200, prefix_cache_bytes=0)
    monkeypatch.setattr(engine._slots._rows, "insert", None)
    with pytest.raises(EngineClosed, match="'NoneType' object is not callable"):
        _submit(engine, 1).result(5)
    engine = Engine(model, num_slots=1, max_length=2000, prefix_cache_bytes=0)
    running = _submit(engine, 1, max_new_tokens=1900, stop_token_ids=None)
    next(iter(running))
    queued = _submit(engine, 2)
    monkeypatch.setattr(scheduler, "SECONDS_PER_SEARCH", 0)
    monkeypatch.setattr(engine._slots._rows, "stop", None)
    time.sleep(0.1)
    with engine._scheduler._lock:  # the engine waits for it, then finds both
        time.sleep(0.1)
        running.cancel()
        queued.cancel()
    assert queued.result(5).finish_reason == "cancelled"
    with pytest.raises(EngineClosed):
        running.result(5)


@needs_engine
@pytest.mark.parametrize(
    "family",
    [
        "griffin",
        "hgrn2",
        *(pytest.param(f, marks=NIGHTLY_IF_COMPILED) for f in ("hgrn2 hybrid", "lightning_hybrid")),
    ],
)
def test_a_conversation_continues_from_its_state(model, tmp_path, family):
    """A prefix state is one token ahead or behind, or is lost with the engine."""
    if family == "hgrn2":
        model = HGRN2CausalLM.from_preset("hgrn2_tiny", num_layers=2, dtype="float32")
    elif family == "hgrn2 hybrid":
        model = tiny_causal_lm(family="hgrn2", **HYBRID)
    elif family == "lightning_hybrid":
        model = tiny_causal_lm(family=family)
    options = {"num_slots": 3, "max_length": 200, "prefill_chunk": 8, "prefix_cache_dir": tmp_path}
    greedy = {"sampling": PARAMS[1], "max_new_tokens": 6, "stop_token_ids": None}
    tokens = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    with Engine(model, **options) as engine:
        first = engine.submit(tokens, **greedy).result(60)
        tokens = [*tokens, *first.token_ids]
        # A stop string is only known when the next step has begun.
        stop = first.text and [first.text[-1:]]
        second = engine.submit([*tokens, 20, 21], **greedy).result(60)
        assert second.num_cached_tokens == len(tokens) - 1
        assert engine.stats()["prefix_hits"] == 1
        if stop:
            stopped = engine.submit(tokens[:10], stop=stop, **greedy).result(60)
    tokens += [20, 21, *second.token_ids, 22]
    with Engine(model, **options) as engine:
        third = engine.submit(tokens, **greedy).result(60)
        assert third.num_cached_tokens == len(tokens) - 2
        assert engine.stats()["prompt_tokens"] == 1
        if stop:
            again = [*tokens[:10], *stopped.token_ids, 30]
            fourth = engine.submit(again, **greedy).result(60)
            assert fourth.num_cached_tokens == len(again) - 1
    with Engine(model, **options | {"prefix_cache_dir": None}) as engine:
        for prompt, answer in ((tokens, third), *([(again, fourth)] if stop else [])):
            result = engine.submit(prompt, **greedy).result(60)
            assert result.num_cached_tokens == 0
            assert result.token_ids == answer.token_ids


@needs_engine
def test_messages_are_processed_once(model, engine):
    """Only states at ends of prompts are saved, which a template need not continue."""
    names = ["system", *["user", "assistant"] * 3]
    messages = [
        {"role": name, "content": f"{number} {'and so on ' * (1 if number else 4)}"}
        for number, name in enumerate(names)
    ]
    ends = np.cumsum([len(f"{each['role']}: {each['content']}\n") for each in messages]) + 1
    chats = [[messages[0], {"role": "user", "content": f"{n}?"}] for n in range(5)]
    cached = [0, *[ends[0]] * 4]
    # A first turn, a later one, and the later one with another question.
    chats += [messages[:4], messages[:6], [*messages[:5], {"role": "user", "content": "Really?"}]]
    cached += [ends[0], ends[2], ends[4]]
    greedy = {"sampling": PARAMS[1], "max_new_tokens": 3}
    with Engine(model, num_slots=3, max_length=200, prefill_chunk=8) as other:
        answers = [other.submit(chat, **greedy).result(60) for chat in chats]
        stats = other.stats()
    assert [answer.num_cached_tokens for answer in answers] == cached
    assert (stats["prefix_hits"], stats["prefix_tokens"]) == (7, sum(cached))
    lengths = [answer.num_prompt_tokens - 1 for answer in answers]
    assert stats["prompt_tokens"] == sum(lengths) - sum(cached)
    expected = [engine.submit(chat, **greedy).result(60).token_ids for chat in chats]
    assert [answer.token_ids for answer in answers] == expected


@needs_engine
def test_the_prefix_cache_stays_within_its_bytes(model):
    """Memory grows with the number of requests."""
    with Engine(model, num_slots=3, max_length=200, prefill_chunk=8) as engine:
        engine.submit([5, 6, 7], max_new_tokens=2, sampling=PARAMS[1]).result(60)
        size = engine._prefixes._nbytes // 2
    options = {"prefill_chunk": 8, "prefix_cache_bytes": 3 * size}
    with Engine(model, num_slots=3, max_length=200, **options) as engine:
        for token in range(5, 10):
            prompt = [token, token + 1, token + 2]
            engine.submit(prompt, max_new_tokens=2, sampling=PARAMS[1]).result(60)
        assert engine._prefixes._nbytes == 3 * size


@needs_engine
@pytest.mark.parametrize(
    ("prompt", "options", "match"),
    [
        ([], {}, "`prompt` must be .* at least one token id"),
        (["text"], {}, "`prompt` must be a string"),
        ([[1, 2], [3]], {}, "`prompt` must be a string"),
        ([1, 9999], {}, "`prompt` must be ids from 0"),
        ("a", {"max_new_tokens": 2000}, "`max_length` of the engine is 2000"),
        ("a" * 2000, {}, "`max_length` of the engine is 2000"),
        ("a", {"timeout": -1}, "`timeout`"),
        ("a", {"stop": []}, "`stop`"),
        ("a", {"stop": ["a"] * 17}, "`stop` must have at most 16"),
        ("a", {"sampling": SamplingParams(logprobs=21)}, "`logprobs` must be at most 20"),
        ("a", {"cache_salt": ""}, "`cache_salt` must be"),
        ("\ud800", {}, "`prompt` must be valid Unicode"),
        ([{"role": "user", "content": "\ud800"}], {}, "`messages`.*surrogates"),
        ([2**70], {}, "`prompt` must be"),
        ("a", {"max_new_tokens": 2**70}, "`max_length` of the engine is 2000"),
        ("a", {"sampling": [SamplingParams()]}, "one `SamplingParams`"),
    ],
)
def test_bad_requests_are_refused(engine, prompt, options, match):
    """A bad argument reaches the thread of the engine, and ends all requests."""
    with pytest.raises(ValueError, match=match):
        engine.submit(prompt, **options)


def test_bad_engines_are_refused(model):
    """An argument is only noticed by the first request."""
    if not IS_SUPPORTED:
        with pytest.raises(NotImplementedError, match="not on TensorFlow"):
            Engine(model)
        return
    for options, match in (
        ({"num_slots": 0}, "`num_slots`"),
        ({"prefix_cache_bytes": -1}, "`prefix_cache_bytes`"),
        ({"prefix_cache_bytes": 0, "prefix_cache_dir": "x"}, "if `prefix_cache_dir` is set"),
        ({"prefix_cache_dir": __file__}, "`prefix_cache_dir` must be a directory"),
    ):
        with pytest.raises(ValueError, match=match):
            Engine(model, **options)
    with pytest.raises(ValueError, match="language model"):
        Engine(model.backbone)


@pytest.mark.nightly
@pytest.mark.once
def test_the_benchmark_runs(monkeypatch, capsys):
    """An option of the engine or of `generate` is renamed, and the script is not."""
    serving = importlib.import_module("benchmarks.serving")
    rates = {"bytes_per_second": 1e9, "flops_per_second": 1e9}
    monkeypatch.setattr(serving, "device_rates", lambda dtype: rates)
    arguments = "hawk_tiny --dtype float32 --slots 2 --prompt 8 --answer 4 --requests 6 --seconds 1"
    monkeypatch.setattr("sys.argv", ["serving", *arguments.split()])
    serving.main()
    written = capsys.readouterr().out
    for name in ("| generate |", "| engine |", "| between two tokens |"):
        assert name in written


class Slots:
    """Slots that only note the numbers of tokens of chunks, and never become free again."""

    max_chunk = CHUNK
    is_ready = staticmethod(lambda sequence: True)
    wait = staticmethod(lambda: None)
    num_active = 0

    def __init__(self, num_free, num_prompts, num_parts=1):
        self.num_free, self.num_prompts = num_free, num_prompts
        self.num_parts, self.processed = num_parts, []

    def cost(self, num_tokens):
        return max(num_tokens / CHUNK, 1 / 2) / min(self.num_parts, 2)

    def process(self, sequences, stops):
        pairs = list(zip(sequences, stops, strict=True))
        for part in range(self.num_parts):
            self.processed.append([stop - s.num_processed for s, stop in pairs])
            if part < self.num_parts - 1:
                yield
        for sequence, stop in pairs:
            sequence.num_processed = stop

    def insert(self, sequence):
        self.num_free -= 1

    def after_step(self, scheduler):
        scheduler.advance()
        processed, self.processed = self.processed, []
        return processed


def _scheduler(slots, lengths):
    prefixes = SimpleNamespace(restore=lambda sequence: None, is_enabled=False)
    scheduler = Scheduler(slots, prefixes)
    slots.active = ()
    for length in lengths:
        given = {"prompt": [1] * length, "ends": (), "row": None, "end_reason": lambda now: None}
        scheduler.add(SimpleNamespace(num_processed=0, num_cached=0, **given), 100)
    return scheduler


@pytest.mark.once
def test_chunks_between_two_steps_are_bounded():
    """A long chunk follows a short one before the next step, or short prompts take a step each."""
    slots = Slots(8, num_prompts=1)
    scheduler = _scheduler(slots, (19, 9, 3, 2, 5))
    found = [slots.after_step(scheduler) for _ in range(4)]
    # Three requests wait for the free slots before the first two steps.
    assert found == [[[8], [8]], [[2], [8], [2]], [[1], [4]], []]


@pytest.mark.once
def test_parts_of_chunks_are_bounded():
    """A program delays one step by all of its parts."""
    slots = Slots(1, num_prompts=1, num_parts=5)
    scheduler = _scheduler(slots, (9, 9))
    assert [slots.after_step(scheduler) for _ in range(6)] == [[[8]] * 2] * 5 + [[]]


@pytest.mark.once
def test_a_long_part_is_followed_by_steps_without_parts():
    """Each step is delayed by a program that takes longer than the bound, but free slots wait."""
    for num_active, expected in ((1, [1, 0, 1, 0, 0, 1, 0, 1]), (0, [1] * 4 + [0] * 4)):
        slots = Slots(2, num_prompts=1)
        slots.cost, slots.num_active = lambda num_tokens: 2.5, num_active
        slots.step = lambda: ((), lambda: (np.zeros(0), ()))
        scheduler = _scheduler(slots, (25, 9))
        assert [len(slots.after_step(scheduler)) for _ in expected] == expected


@pytest.mark.once
def test_chunks_of_prompts_run_together():
    """A program with one prompt takes the place of one with two."""
    slots = Slots(0, num_prompts=2)
    scheduler = _scheduler(slots, (19, 4, 9, 6))
    assert [slots.after_step(scheduler) for _ in range(4)] == [[[8, 3]], [[8, 8]], [[2, 5]], []]


@pytest.mark.once
def test_a_free_slot_does_not_wait_for_chunks():
    """A prompt that is ready waits until the chunks of others are finished."""
    slots = Slots(0, num_prompts=2, num_parts=5)
    scheduler = _scheduler(slots, (1, 9, 9))
    slots.after_step(scheduler)
    slots.num_free = 1
    slots.after_step(scheduler)  # the program still runs
    assert slots.num_free == 0
