"""Engine: requests that join and leave a running batch."""

import contextlib
import random
import threading
import time

import keras
import numpy as np
import pytest

from keras_recurrent.generation.sampling import features_of
from keras_recurrent.models import GriffinCausalLM, HGRN2CausalLM, SamplingParams
from keras_recurrent.serving import Engine, EngineClosed, EngineFull
from keras_recurrent.serving.slots import covers

IS_SUPPORTED = keras.config.backend() != "tensorflow"
needs_engine = pytest.mark.skipif(not IS_SUPPORTED, reason="the engine refuses TensorFlow")
PROMPTS = ["All happy families", "Once upon a time, there was", "x", "The cat sat on the mat and"]
PARAMS = [
    SamplingParams(top_p=0.9, repetition_penalty=1.3, min_new_tokens=6, seed=3, logprobs=2),
    SamplingParams(temperature=0, logprobs=0),
    SamplingParams(temperature=1.2, seed=1),
    SamplingParams(temperature=0.8, top_k=5, seed=2),
]
MAX_NEW_TOKENS = 10


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(0)
    options = {"num_layers": 3, "sliding_window": 8, "dtype": "float32"}
    return GriffinCausalLM.from_preset("griffin_tiny", **options)


@pytest.fixture(scope="module")
def engine(model):
    if not IS_SUPPORTED:
        pytest.skip("the engine refuses TensorFlow")
    options = {"prefill_chunk": 8, "max_queued": 40, "prefix_cache_bytes": 0}
    with Engine(model, num_slots=3, max_length=200, **options) as engine:
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


@pytest.mark.skipif(keras.config.backend() != "jax", reason="JAX compiles steps")
def test_compiling_does_not_stop_other_requests(engine, monkeypatch):
    """Requests wait while a step for other options is compiled, or the first step is."""
    from keras_recurrent.generation import loop

    may_compile, advance, compiled = threading.Event(), loop.advance, []

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
    """A cancelled or late request keeps its slot, or a listener's error ends the engine."""
    running = [_submit(engine, number, max_new_tokens=150) for number in range(3)]
    late = _submit(engine, 3, timeout=0)
    assert late.result(60).finish_reason == "timeout"
    assert not late.result().token_ids

    def fail(delta):
        raise RuntimeError("listener")

    running[0].set_listener(fail)
    running[1].cancel()
    assert [request.result(60).finish_reason for request in running[:2]] == ["cancelled"] * 2
    assert _submit(engine, 1).result(60).finish_reason in ("stop", "length")
    running[2].cancel()


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
@pytest.mark.parametrize("family", ["griffin", "hgrn2"])
def test_a_conversation_continues_from_its_state(model, tmp_path, family):
    """A prefix state is one token ahead or behind, or is lost with the engine."""
    if family == "hgrn2":
        model = HGRN2CausalLM.from_preset("hgrn2_tiny", num_layers=2, dtype="float32")
    options = {"num_slots": 3, "max_length": 200, "prefill_chunk": 8, "prefix_cache_dir": tmp_path}
    greedy = {"sampling": PARAMS[1], "max_new_tokens": 6, "stop_token_ids": None}
    tokens = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    with Engine(model, **options) as engine:
        first = engine.submit(tokens, **greedy).result(60)
        tokens = [*tokens, *first.token_ids]
        # A stop string is only known when the next step has begun.
        stop = first.text[-1:] and [first.text[-1:]]
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


@pytest.mark.once
def test_features_that_keep_all_tokens_are_not_covered_by_sorted_ones():
    """`SamplingParams()` runs in a step for `top_k=100`, and loses its less probable tokens."""
    few, every = SamplingParams(top_k=100), SamplingParams()
    known, both = (features_of(params, 1000) for params in ([few], [few, every]))
    needed = features_of([every], 1000)
    assert not covers(known, needed, 1000)
    assert covers(both, needed, 1000)
    assert covers(both, known, 1000)
    assert not covers(needed, known, 1000)


@needs_engine
@pytest.mark.parametrize(
    ("prompt", "options", "match"),
    [
        ([], {}, "at least one token"),
        (["text"], {}, "`prompt` must be a string"),
        ([1, 9999], {}, "`prompt` must be ids from 0"),
        ("a", {"max_new_tokens": 500}, "`max_length` of the engine is 200"),
        ("a" * 300, {}, "`max_length` of the engine is 200"),
        ("a", {"timeout": -1}, "`timeout`"),
        ("a", {"stop": []}, "`stop`"),
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
        ({"prefix_cache_bytes": 0, "prefix_cache_dir": "x"}, "`prefix_cache_dir` needs"),
    ):
        with pytest.raises(ValueError, match=match):
            Engine(model, **options)
    with pytest.raises(ValueError, match="language model"):
        Engine(model.backbone)
