"""Engine: answers of requests that join and leave a batch, its limits and its scheduler."""

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
from keras_recurrent.generation import batch
from keras_recurrent.generation.sampling_params import TokenLogprobs
from keras_recurrent.generation.text import StreamedText
from keras_recurrent.layers import hgrn2
from keras_recurrent.models import GriffinCausalLM, HGRN2CausalLM, SamplingParams
from keras_recurrent.serving import Engine, EngineClosed, EngineFull, scheduler
from keras_recurrent.serving import engine as engine_module
from tests.generation.captures import capture_on_cpu
from tests.generation.numpy_sampling import log_softmax
from tests.generation.test_programs import CHANGES
from tests.models.tiny import HYBRID, NIGHTLY_IF_COMPILED, tiny_causal_lm

BACKEND = keras.config.backend()
needs_engine = pytest.mark.skipif(BACKEND == "tensorflow", reason="the engine refuses TensorFlow")
PROMPTS = ["All happy families", "Once upon a time, there was", "x", "The cat sat on the mat and"]
GREEDY = SamplingParams(temperature=0, logprobs=0)
# The text of an answer of letters has the same tokens in the prompt of a later request.
LETTERS = {byte + 3: 20 for byte in b"abcdefgh"}
# Sampling options and `stop_token_ids`. Few, because JAX compiles a step for each of them.
OPTIONS = [
    ({"temperature": 0, "logprobs": 2, "logit_bias": LETTERS}, "auto"),
    ({"temperature": 1.2, "logit_bias": LETTERS}, None),
    (
        {"temperature": 1.2, "grammar": "start: /([a-h]{2} ?)+/", "logprobs": 0}
        | {"presence_penalty": 0.5},
        "auto",
    ),
    ({"temperature": 0.8, "top_k": 5, "logprobs": 0}, (1, 2, 3, 4, 5, 6, 100)),
    (
        {"top_p": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_new_tokens": 6}
        | {"logprobs": 2, "logit_bias": LETTERS},
        (2, 100),
    ),
]
CHUNK = 8
FAMILIES_OF_STATES = [
    "griffin",
    pytest.param("hgrn2 hybrid", marks=NIGHTLY_IF_COMPILED),
    *(
        pytest.param(name, marks=pytest.mark.nightly)
        for name in ("hgrn2", "lightning_hybrid", "mamba_hybrid", "lfm2")
    ),
]
# An answer begins differently from a message, so that no prompt begins with an earlier prompt.
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}answer{% endif %}"
)


def make_model(family):
    """Returns a language model with text and random weights."""
    keras.utils.set_random_seed(0)
    if family == "hgrn2":
        return HGRN2CausalLM.from_preset("hgrn2_tiny", num_layers=1, dtype="float32")
    options = {"num_layers": 3, "sliding_window": 8, "dtype": "float32"}
    return GriffinCausalLM.from_preset("griffin_tiny", chat_template=TEMPLATE, **options)


@pytest.fixture(scope="module")
def model():
    if BACKEND == "tensorflow":
        pytest.skip("the engine refuses TensorFlow")
    return make_model("griffin")


@pytest.fixture(scope="module")
def small_model():
    """A model of one layer, whose prompts are token ids."""
    return tiny_causal_lm(num_layers=1, block_types=("recurrent",))


@pytest.fixture(scope="module")
def engine(model):
    options = {"prefill_chunk": CHUNK, "max_queued": 40, "prefix_cache_bytes": 0}
    with Engine(model, num_slots=3, max_length=2000, **options) as engine:
        yield engine


def submit_greedy(engine, max_new_tokens=10, **options):
    return engine.submit("Once upon a time", GREEDY, max_new_tokens, **options)


def emulate_accelerator(monkeypatch):
    """Runs engines as on a GPU: steps ahead, captures on torch, several prompts per program."""
    for module in (batch, scheduler, engine_module):
        monkeypatch.setattr(module, "is_on_cpu", lambda model: False)
    monkeypatch.setattr(scheduler, "SLOTS_PER_PROMPT", 1)
    monkeypatch.setattr(scheduler, "MAX_PROMPTS", 2)
    if BACKEND == "torch":
        from keras_recurrent.generation import torch_programs as programs
    else:
        from keras_recurrent.generation import xla_programs as programs
    # HGRN2 writes its states every few tokens.
    monkeypatch.setattr(programs, "MIN_DELAYED_ROWS", 2)
    monkeypatch.setattr(dispatch, "uses_triton_kernels", lambda tensor: True)
    monkeypatch.setattr(hgrn2, "hgrn2_step", None)
    return capture_on_cpu(monkeypatch) if BACKEND == "torch" else (None, None)


def random_requests(rng, model, count):
    """Returns pairs of the arguments of `submit` and the `GenerationOutput` of `generate`.

    Most prompts continue the answer to an earlier one.
    """
    found = []
    for _ in range(count):
        prompt = rng.choice(PROMPTS)
        if found and rng.random() < 0.75:
            arguments, output = rng.choice(found)
            answer = model.preprocessor.tokenizer.detokenize(output.token_ids[0])
            prompt = arguments["prompt"] + answer + prompt[:4]
        (sampling, stop_token_ids), seed = rng.choice(OPTIONS), rng.randrange(2**64)
        arguments = {
            "prompt": prompt,
            "sampling": SamplingParams(**sampling, seed=seed),
            "max_new_tokens": rng.randint(1, 16),
            "stop": rng.choice([None, None, "a", ["bc", "h"]]),
            "stop_token_ids": stop_token_ids,
        }
        # `generate` returns a `GenerationOutput` if there are log probabilities.
        sampling = SamplingParams(**{"logprobs": 0, **sampling}, seed=seed)
        options = dict(arguments, sampling=sampling)
        output = model.generate(options.pop("prompt"), strip_prompt=True, **options)
        found.append((arguments, output))
    return found


def check_answer(request, deltas, expected, may_end):
    """Asserts that a request has the output of `generate`.

    may_end: boolean, True if the request was cancelled or has a timeout, and may have less.
    """
    answer = request.result(60)
    deltas = [*deltas, *request]
    (token_ids,), (finish_reason,) = expected.token_ids, expected.finish_reason
    if may_end and answer.finish_reason in ("cancelled", "timeout"):
        token_ids = token_ids[: len(answer.token_ids)]
        assert expected.texts.startswith(answer.text)
    else:
        assert (answer.text, answer.finish_reason) == (expected.texts, finish_reason)
    assert answer.token_ids == token_ids
    assert "".join(delta.text for delta in deltas) == answer.text
    assert [token for delta in deltas for token in delta.token_ids] == token_ids
    logprobs = [each for delta in deltas for each in delta.logprobs]
    assert logprobs == answer.logprobs
    if logprobs:
        assert [each.token_id for each in logprobs] == token_ids
        for pair in zip(logprobs, expected.logprobs[0][: len(token_ids)], strict=True):
            values = ([each.logprob, *each.top.values()] for each in pair)
            np.testing.assert_allclose(*values, atol=1e-5)


@needs_engine
@pytest.mark.parametrize(
    ("family", "is_accelerated"),
    [
        *(pytest.param("griffin", each, marks=NIGHTLY_IF_COMPILED) for each in (False, True)),
        ("hgrn2", True),
    ],
)
def test_engine_with_random_requests_answers_as_generate(family, is_accelerated, monkeypatch):
    """A slot, chunk or saved state belongs to another request, or a token is lost or repeated."""
    rng = random.Random(0)
    model = make_model(family)
    cases = random_requests(rng, model, 12)
    num_slots, chunk, max_bytes = (2, 16, 0)
    if is_accelerated:
        emulate_accelerator(monkeypatch)
        num_slots, chunk, max_bytes = (3, 8, 2**30)
    options = {"prefill_chunk": chunk, "prefix_cache_bytes": max_bytes}
    with Engine(model, num_slots, max_length=256, **options) as engine:
        assert engine._chunks.num_prompts == 1 + is_accelerated
        for _ in range(num_slots):  # prompts that are ready wait for a slot
            submit_greedy(engine, 100, stop_token_ids=None)
        requests = []
        for number, (arguments, expected) in enumerate([*cases, *rng.sample(cases, 12)]):
            timeout, deltas = rng.choice([None] * 9 + [0]), []
            request = engine.submit(**arguments, timeout=timeout)
            if rng.random() < 0.5:
                request.set_listener(deltas.append)
            requests.append((request, deltas, expected, timeout == 0))
            if rng.random() < 0.2:
                index = rng.randint(max(0, number - 3), number)
                requests[index] = (*requests[index][:3], True)
                requests[index][0].cancel()
            if number == 11:  # later prompts continue these answers
                for request, *_ in requests:
                    request.result(60)
        for each in requests:
            check_answer(*each)
        stats = engine.stats()
    assert stats["active"] == stats["queued"] == 0
    assert bool(stats["prefix_hits"]) == bool(max_bytes)
    assert not is_accelerated or BACKEND == "jax" or which_generation(model).name == "cuda_graph"


@needs_engine
@pytest.mark.parametrize(
    "change",
    [
        pytest.param("LoRA", marks=NIGHTLY_IF_COMPILED),
        pytest.param("quantized", marks=pytest.mark.nightly),
    ],
)
def test_engine_of_a_changed_model_answers_as_generate(change, monkeypatch):
    """Programs of the engine omit or misread weights that a change has added."""
    model = make_model("hgrn2")
    CHANGES[change](model)
    options = {"sampling": GREEDY, "max_new_tokens": 10, "strip_prompt": True}
    expected = model.generate(PROMPTS, **options)
    emulate_accelerator(monkeypatch)
    with Engine(model, num_slots=2, max_length=100, prefill_chunk=CHUNK) as engine:
        requests = [engine.submit(prompt, GREEDY, 10) for prompt in PROMPTS]
        found = [request.result(60) for request in requests]
    assert [answer.token_ids for answer in found] == expected.token_ids
    assert [answer.text for answer in found] == expected.texts


@pytest.mark.skipif(BACKEND != "torch", reason="CUDA graphs of torch")
def test_engine_with_fewer_stop_tokens_captures_into_a_new_pool(small_model, monkeypatch):
    """A graph is captured into the memory pool of deleted graphs, and torch fails."""
    _, pools = emulate_accelerator(monkeypatch)
    for stop_token_ids in (tuple(range(1, 8)), (1,)):
        del pools[:]
        with Engine(small_model, num_slots=3, max_length=64, prefill_chunk=CHUNK) as engine:
            engine.submit([1] * 9, GREEDY, 10, stop_token_ids=stop_token_ids).result(60)
        assert pools[0] is None


@pytest.mark.skipif(BACKEND != "torch", reason="CUDA graphs of torch")
@pytest.mark.parametrize("num_slots", [1, 3])
def test_engine_captures_no_chunk_after_its_start(num_slots, small_model, monkeypatch):
    """All requests wait for the capture of a chunk of a new length."""
    captured, _ = emulate_accelerator(monkeypatch)
    with Engine(small_model, num_slots, max_length=64, prefill_chunk=16) as engine:
        del captured[:]
        greedy, options = SamplingParams(temperature=0), {"stop_token_ids": None}
        for request in [engine.submit([1] * n, greedy, 2, **options) for n in range(1, 40, 3)]:
            request.result(60)
        assert not captured


@pytest.mark.skipif(BACKEND != "jax", reason="JAX compiles steps")
def test_engine_decodes_while_a_step_for_other_options_compiles(engine, monkeypatch):
    """All requests wait for a compilation that only a queued request needs."""
    from keras_recurrent.generation import xla_programs

    may_compile, advance, compiled = threading.Event(), xla_programs.advance, []
    submit_greedy(engine, 1).result(60)

    def wait(*arguments, **options):
        compiled.append(may_compile.wait(60))
        return advance(*arguments, **options)

    monkeypatch.setattr(xla_programs, "advance", wait)
    options = {"max_new_tokens": 5, "stop_token_ids": (1, 2, 3, 4, 5)}
    running = submit_greedy(engine, 20)
    waiting = engine.submit("a", SamplingParams(min_p=0.5, seed=1), **options)
    try:
        assert running.result(30).token_ids
        assert not waiting.done
    finally:
        may_compile.set()
    assert waiting.result(60).token_ids
    assert len(compiled) == 1


@pytest.mark.skipif(BACKEND != "jax", reason="JAX compiles steps")
def test_request_cancelled_while_its_step_compiles_keeps_no_state(engine, monkeypatch):
    """The engine fails because the batch holds the request, whose state is one of two."""
    from keras_recurrent.generation.xla_batch import JaxBatch

    has_begun, may_end = threading.Event(), threading.Event()

    def compile_never(batch, *key):
        batch._compiling[key] = threading.Thread(target=may_end.wait)
        batch._compiling[key].start()
        has_begun.set()

    submit_greedy(engine, 1).result(60)
    monkeypatch.setattr(JaxBatch, "_compile", compile_never)
    waiting = engine.submit("Once upon a time", SamplingParams(min_p=0.5, seed=1, top_k=3))
    try:
        assert has_begun.wait(60)
        waiting.cancel()
        assert waiting.result(60).finish_reason == "cancelled"
        requests = [submit_greedy(engine, 20) for _ in range(6)]
        assert all(request.result(60).token_ids for request in requests)
    finally:
        may_end.set()


@pytest.mark.once
@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_request_that_is_cancelled_or_late_or_has_failing_listener_ends_alone(engine, error):
    """A request keeps its slot, or the error of a listener ends the engine and all requests."""
    failures = []

    def fail(argument):
        failures.append(argument)
        raise error

    ended = submit_greedy(engine)
    ended.result(60)
    exits = contextlib.nullcontext() if error is RuntimeError else pytest.raises(error)
    with exits:  # the listener is called in this thread
        ended.set_listener(fail)
    assert len(failures) == 1
    running = [submit_greedy(engine, 1900, stop_token_ids=None) for _ in range(3)]
    late = submit_greedy(engine, timeout=0)
    assert (late.result(60).finish_reason, late.result().token_ids) == ("timeout", [])
    # All slots are in use, so that these have no tokens yet: only the engine calls `fail`.
    waiting = [submit_greedy(engine, 99, stop_token_ids=None) for _ in range(2)]
    waiting[0].set_listener(fail)
    waiting[1].add_done_callback(fail)
    for request in running:
        request.cancel()
    reasons = [request.result(60).finish_reason for request in running + waiting]
    assert reasons == ["cancelled"] * 4 + ["length"]
    assert not engine.is_closed


def test_submit_with_n_answers_processes_the_prompt_once(model, engine):
    """An answer starts from another state, or ends with the first answer, which is cancelled."""
    sampling, prompt = SamplingParams(seed=1, n=5, logit_bias=LETTERS), PROMPTS[1] * 20
    before = engine.stats()["prompt_tokens"]
    expected = model.generate(
        prompt, strip_prompt=True, sampling=sampling, max_new_tokens=12, max_length=2000
    )
    for cancelled in ((), (0,), (0, 1, 3)):
        requests = engine.submit(prompt, sampling, 12)
        for number in cancelled:
            requests[number].cancel()
        found = [request.result(60) for request in requests]
        texts = [None if number in cancelled else text for number, text in enumerate(expected)]
        assert [f.text if f.finish_reason == "length" else None for f in found] == texts
        assert {f.num_prompt_tokens for f in found} == {len(prompt) + 1}
    assert engine.stats()["prompt_tokens"] - before == 3 * len(prompt)
    for request in (requests := engine.submit(prompt * 3, sampling, 12)):
        request.cancel()
    assert {request.result(60).finish_reason for request in requests} == {"cancelled"}


@pytest.mark.parametrize("max_new_tokens", [0, 3])
def test_prompt_logprobs_match_a_forward_pass(model, engine, max_new_tokens):
    """Log probabilities belong to another token, chunk or request, or a request does not end."""
    prompts = ["Once upon a time", "x", "All happy families are alike"]
    sampling = SamplingParams(temperature=0, n=2)
    options = {"prompt_logprobs": 3, "max_new_tokens": max_new_tokens}
    requests = [engine.submit(prompt, sampling, **options) for prompt in prompts]
    others = [submit_greedy(engine), engine.submit([1], GREEDY, 0, prompt_logprobs=0)]
    assert len(others[1].result(60).prompt_logprobs) == 1
    for prompt, pair in zip(prompts, requests, strict=True):
        token_ids = [1, *model.preprocessor.tokenizer(prompt).tolist()]
        padded = np.pad(token_ids, (0, 30 - len(token_ids)))  # JAX compiles one length
        logits = keras.ops.convert_to_numpy(model.score(padded[None])[0])
        expected = [*map(log_softmax, logits[: len(token_ids)])]
        for request in pair:
            answer = request.result(60)
            assert (len(answer.token_ids), answer.finish_reason) == (max_new_tokens, "length")
            assert answer.prompt_logprobs[0] == TokenLogprobs(1, None, {})
            assert [each.token_id for each in answer.prompt_logprobs] == token_ids
            for row, each in zip(expected, answer.prompt_logprobs[1:], strict=False):
                assert each.logprob == pytest.approx(row[each.token_id], abs=1e-5)
                np.testing.assert_allclose([*each.top.values()], np.sort(row)[:-4:-1], atol=1e-5)
                assert each.top == pytest.approx({id: row[id] for id in each.top}, abs=1e-5)
    assert others[0].result(60).prompt_logprobs is None


@pytest.mark.once
def test_request_whose_bytes_the_tokenizer_rejects_ends_alone(engine, monkeypatch):
    """Invalid text of one request ends the engine and all requests."""
    with monkeypatch.context() as patch:
        patch.setattr(StreamedText, "add", lambda *_: b"\xff".decode())
        with pytest.raises(UnicodeDecodeError):
            submit_greedy(engine, 99).result(60)
    assert submit_greedy(engine).result(60).token_ids


@pytest.mark.once
def test_request_after_warm_up_has_no_cached_tokens(model):
    """The first request of a server starts from the state of a prompt that no user sent."""
    with Engine(model, num_slots=1, max_length=100, prefill_chunk=CHUNK) as engine:
        engine.warm_up()
        assert submit_greedy(engine).result(60).num_cached_tokens == 0


@pytest.mark.once
def test_huge_top_k_and_timeout_set_no_limit(engine):
    """A number that exceeds 32 bits or a timer ends the request with an OverflowError."""
    for top_p in (1.0, 0.9):
        sampling = SamplingParams(top_k=2**31, top_p=top_p, seed=1)
        request = engine.submit("a", sampling, max_new_tokens=2, timeout=10**400)
        answer = request.result(10**400)
        unlimited = SamplingParams(top_p=top_p, seed=1)
        assert engine.submit("a", unlimited, 2).result(60).token_ids == answer.token_ids


@pytest.mark.once
def test_engine_after_garbage_collection_finishes_its_requests(model):
    """An engine without references keeps its thread and memory, or loses requests."""
    engine = Engine(model, num_slots=1, max_length=200)
    thread, request = engine._thread, submit_greedy(engine)
    del engine
    gc.collect()
    assert request.result(60).token_ids
    thread.join(20)
    assert not thread.is_alive()


@pytest.mark.once
def test_engine_in_a_forked_process_raises(engine, monkeypatch):
    """A request waits forever for the engine's thread, which a fork does not have."""
    request = submit_greedy(engine)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    for call in (lambda: submit_greedy(engine), request.result, lambda: next(request)):
        with pytest.raises(EngineClosed, match="after the fork"):
            call()


@pytest.mark.once
def test_submit_to_a_full_or_closed_engine_raises(model):
    """A closed engine drops requests, or the queue grows without limit."""
    engine = Engine(model, 1, max_length=200, max_queued=2, prefix_cache_bytes=0)
    with pytest.raises(EngineFull, match="`max_queued` is 2"):
        [submit_greedy(engine, 170, stop_token_ids=None) for _ in range(10)]
    requests = engine.close(wait=False)
    assert requests
    assert {request.finish_reason for request in requests} == {"cancelled"}
    with pytest.raises(EngineClosed, match="closed"):
        submit_greedy(engine)


@pytest.mark.once
@pytest.mark.parametrize("in_listener", [False, True])
def test_second_call_of_close_cancels_requests(model, in_listener):
    """`close` waits for another call of `close`, or the engine's thread waits for itself."""
    engine, found = Engine(model, 2, max_length=200_000, prefix_cache_bytes=0), []
    request = submit_greedy(engine, 100_000, stop_token_ids=None)
    if in_listener:
        short = submit_greedy(engine, 1)
        short.add_done_callback(lambda _: found.extend(engine.close(wait=False)))
    else:
        waiting = threading.Thread(target=engine.close)
        waiting.start()
        found = engine.close(wait=False)
    assert request.result(60).finish_reason == "cancelled"
    engine.close()
    assert request in found


@pytest.mark.skipif(BACKEND != "jax", reason="`predict` on JAX")
def test_engine_after_predict_answers_as_before(model, engine):
    """Keras's `predict` on JAX replaces the arrays of all weights, which the engine had stored."""
    expected = submit_greedy(engine).result().token_ids
    model.predict_on_batch({"token_ids": np.ones((1, 4), "int32"), "padding_mask": np.ones((1, 4))})
    assert submit_greedy(engine).result().token_ids == expected


@pytest.mark.once
def test_failed_engine_ends_all_requests(model, monkeypatch):
    """A request that moves into a slot during the failure never ends."""
    engine = Engine(model, num_slots=1, max_length=200, prefix_cache_bytes=0)
    monkeypatch.setattr(engine._scheduler.batch, "_write", None)
    with pytest.raises(EngineClosed, match="'NoneType' object is not callable"):
        submit_greedy(engine).result(60)
    engine = Engine(model, num_slots=1, max_length=2000, prefix_cache_bytes=0)
    running = submit_greedy(engine, 1900, stop_token_ids=None)
    next(iter(running))
    queued = submit_greedy(engine)
    monkeypatch.setattr(scheduler, "SECONDS_PER_SEARCH", 0)
    monkeypatch.setattr(engine._scheduler.batch, "_stop", None)
    time.sleep(0.1)
    with engine._scheduler.changed:  # the engine waits for it, then finds both
        time.sleep(0.1)
        running.cancel()
        queued.cancel()
    assert queued.result(60).finish_reason == "cancelled"
    with pytest.raises(EngineClosed, match="The engine failed"):
        running.result(60)


@needs_engine
@pytest.mark.parametrize("family", FAMILIES_OF_STATES)
def test_prefix_states_continue_a_conversation_after_a_restart(tmp_path, family):
    """A saved state has one token too many or too few, or is lost with the engine."""
    options = {"num_layers": 2, "block_types": ("recurrent", "global_attention")}
    options = {"hgrn2 hybrid": HYBRID, "griffin": options}.get(family, {})
    model = tiny_causal_lm(family=family.partition(" ")[0], **options)
    options = {"num_slots": 3, "max_length": 200, "prefill_chunk": CHUNK}
    greedy = {"sampling": GREEDY, "max_new_tokens": 6, "stop_token_ids": None}
    tokens, num_cached, answers = [*range(5, 15)], 0, []
    for _ in range(2):
        with Engine(model, **options, prefix_cache_dir=tmp_path) as engine:
            for more in ([20, 21], [22]):
                answer = engine.submit(tokens, **greedy).result(60)
                assert answer.num_cached_tokens == num_cached
                answers.append((tokens, answer))
                tokens = [*tokens, *answer.token_ids, *more]
                num_cached = len(tokens) - len(more) - 1
    with Engine(model, **options, prefix_cache_bytes=0) as engine:
        for prompt, answer in answers:
            assert engine.submit(prompt, **greedy).result(60).token_ids == answer.token_ids


@pytest.mark.once
def test_prompts_with_the_same_document_resume_inside_it(model, engine):
    """A shared document is processed again, or its states cut chunks that later prompts have."""
    document, greedy = list(range(5, 105)), {"sampling": GREEDY, "max_new_tokens": 3}
    prompts = [[*document, 200 + n, 201, 202] for n in range(3)]
    options = {"num_slots": 3, "max_length": 200, "prefill_chunk": CHUNK}
    with Engine(model, **options, prefix_cache_interval=5 * CHUNK - 1) as other:
        answers = [other.submit(prompt, **greedy).result(60) for prompt in (*prompts, document)]
        salted = other.submit(prompts[0], **greedy, cache_salt="a").result(60)
    assert [answer.num_cached_tokens for answer in answers] == [0, 80, 80, 80]
    assert salted.num_cached_tokens == 0
    expected = [engine.submit(prompt, **greedy).result(60) for prompt in (*prompts, document)]
    assert [each.token_ids for each in answers] == [each.token_ids for each in expected]


def test_engine_processes_messages_once(model, engine):
    """Messages that several prompts share are processed again for each request."""
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
    greedy = {"sampling": GREEDY, "max_new_tokens": 3}
    with Engine(model, num_slots=3, max_length=200, prefill_chunk=8) as other:
        answers = [other.submit(chat, **greedy).result(60) for chat in chats]
        stats = other.stats()
    assert [answer.num_cached_tokens for answer in answers] == cached
    assert (stats["prefix_hits"], stats["prefix_tokens"]) == (7, sum(cached))
    lengths = [answer.num_prompt_tokens - 1 for answer in answers]
    assert stats["prompt_tokens"] == sum(lengths) - sum(cached)
    expected = [engine.submit(chat, **greedy).result(60).token_ids for chat in chats]
    assert [answer.token_ids for answer in answers] == expected


@pytest.mark.parametrize(
    ("prompt", "options", "match"),
    [
        ([], {}, "`prompt` must be .* at least one token id"),
        (["text"], {}, "`prompt` must be a string"),
        ([[1, 2], [3]], {}, "`prompt` must be a string"),
        ([1, 9999], {}, "`prompt` must be ids from 0"),
        ("a", {"max_new_tokens": 2000}, "2000 tokens, the `max_length` of the engine"),
        ("a" * 2000, {}, "2000 tokens, the `max_length` of the engine"),
        ("a", {"timeout": -1}, "`timeout`"),
        ("a", {"stop": ["a"] * 17}, "`stop` must have at most 16"),
        ("a", {"sampling": SamplingParams(logprobs=21)}, "`logprobs` must be an integer from 0"),
        ("a", {"cache_salt": ""}, "`cache_salt` must be"),
        ("\ud800", {}, "`prompt` must be valid Unicode"),
        ([{"role": "user", "content": "\ud800"}], {}, "`messages`.*surrogates"),
        ([2**70], {}, "`prompt` must be"),
        ("a", {"max_new_tokens": 2**70}, "2000 tokens, the `max_length` of the engine"),
        ("a", {"sampling": [SamplingParams()]}, "one `SamplingParams`"),
    ],
)
def test_submit_with_an_invalid_argument_raises(engine, prompt, options, match):
    """An invalid argument reaches the thread of the engine, and ends all requests."""
    with pytest.raises(ValueError, match=match):
        engine.submit(prompt, **options)


def test_engine_with_an_invalid_argument_raises():
    """The first request of an engine fails because of an argument of the engine."""
    model = make_model("hgrn2")
    if BACKEND == "tensorflow":
        with pytest.raises(NotImplementedError, match="not on TensorFlow"):
            Engine(model)
        return
    for causal_lm, options, match in (
        (model, {"num_slots": 0}, "`num_slots`"),
        (model, {"max_length": 2**40}, "`max_length` must be at most"),
        (model, {"prefix_cache_bytes": -1}, "`prefix_cache_bytes`"),
        (model, {"prefix_cache_interval": 1.5}, "`prefix_cache_interval`"),
        (model, {"prefix_cache_bytes": 0, "prefix_cache_dir": "x"}, "if `prefix_cache_dir` is set"),
        (model, {"prefix_cache_dir": __file__}, "`prefix_cache_dir` must be a directory"),
        (model.backbone, {}, "language model"),
    ):
        with pytest.raises(ValueError, match=match):
            Engine(causal_lm, **options)


@pytest.mark.nightly
@pytest.mark.once
@pytest.mark.parametrize(
    ("options", "names"),
    [
        ("", {"| generate", "| engine"}),
        ("--causes", {"| equal lengths, at once, saved states"}),
        (
            "--http --prefixes --document 40",
            {
                "| HTTP, 256 clients, whole answers",
                "| engine, 256 clients",
                "| turn 10 of a conversation",
                "| question alone",
            },
        ),
    ],
)
def test_benchmark_of_serving_runs(monkeypatch, capsys, options, names):
    """The benchmark uses an option of the engine or of `generate` that was renamed."""
    serving = importlib.import_module("benchmarks.serving")
    arguments = "hawk_tiny --dtype float32 --slots 2 --prompt 8 --answer 4 --requests 6 --seconds 1"
    monkeypatch.setattr("sys.argv", ["serving", *arguments.split(), *options.split()])
    serving.main()
    rows = {line.split(" |")[0] for line in capsys.readouterr().out.splitlines()}
    assert names <= rows


class Device:
    """Batch and chunks that record the lengths of chunks; slots never become free again."""

    max_chunk = CHUNK
    is_ready = staticmethod(lambda sequence: True)
    make_matchers = staticmethod(lambda params, stop_token_ids: [None] * len(params))
    wait = staticmethod(lambda: None)
    active_slots, initial_state, num_delayed = (), None, 0

    def __init__(self, num_free, num_prompts=1, num_parts=1, cost=None, num_active=0):
        self.active = []
        self.num_free, self.num_prompts, self.num_active = num_free, num_prompts, num_active
        self.num_parts, self.processed, self._cost = num_parts, [], cost

    def cost(self, num_tokens):
        return self._cost or max(num_tokens / CHUNK, 1 / 2) / min(self.num_parts, 2)

    def process(self, sequences, stops):
        pairs = list(zip(sequences, stops, strict=True))
        for part in range(self.num_parts):
            self.processed.append([stop - s.num_processed for s, stop in pairs])
            if part < self.num_parts - 1:
                yield
        for sequence, stop in pairs:
            sequence.num_processed = stop

    @property
    def num_slots(self):
        return self.num_free + len(self.active)

    def insert(self, sequence, state):
        self.num_free -= 1
        self.active.append(sequence)

    def remove(self, sequence):
        self.active.remove(sequence)


def make_scheduler(device, lengths):
    """Returns a `Scheduler` with prompts of these lengths in its queue."""
    prefixes = SimpleNamespace(restore=lambda sequence: None, is_enabled=False)
    made = scheduler.Scheduler(device, device, prefixes)
    options = {"deadline": None, "ends": (), "salt": None}
    for number, length in enumerate(lengths):
        prompt, seed = np.ones(length, "int32"), np.random.SeedSequence(0)
        made.submit(number, prompt, GREEDY, seed, 1, (), **options)
    return made


@pytest.mark.once
@pytest.mark.parametrize(
    ("num_launched", "max_new_tokens", "expected"), [(8, 9, None), (4, 9, 3), (3, 9, 2), (8, 3, 2)]
)
def test_tokens_in_state_with_steps_ahead_omit_the_last_or_are_unknown(
    num_launched, max_new_tokens, expected
):
    """After a stop string, the prefix cache keeps a state with tokens beyond the answer."""
    prompt, options = np.array([7, 8], "int32"), {"deadline": None, "ends": (), "salt": None}
    sequence = scheduler.RequestSequence(
        0, print, prompt, GREEDY, np.random.SeedSequence(0), max_new_tokens, **options
    )
    for token in (1, 2, 3):
        sequence.add(token)
    sequence.num_launched = num_launched
    found = sequence.tokens_in_state
    assert (None if found is None else found[2:].tolist()) == (
        None if expected is None else [1, 2, 3][:expected]
    )


@pytest.mark.once
@pytest.mark.parametrize(
    ("options", "lengths", "expected"),
    [
        # More chunks share a step while requests wait although slots are free.
        ({"num_free": 8}, (19, 9, 3, 2, 5), [[[8], [8]], [[2], [8], [2]], [[1], [4]], []]),
        # The parts of a program are processed between several steps.
        ({"num_free": 1, "num_parts": 5}, (9, 9), [[[8], [8]]] * 5 + [[]]),
        # Some steps follow each other without a chunk, if chunks take long.
        (
            {"num_free": 2, "cost": 2.5, "num_active": 1},
            *((25, 9), [[[8]], [], [[8]], [], [], [[8]], [], [[8]]]),
        ),
        # Chunks run before each step if no sequence decodes.
        ({"num_free": 2, "cost": 2.5}, (25, 9), [[[8]]] * 4 + [[]] * 4),
        # A program with space for two prompts waits for a second one.
        ({"num_free": 0, "num_prompts": 2}, (19, 4, 9, 6), [[[8, 3]], [[8, 8]], [[2, 5]], []]),
    ],
)
def test_scheduler_between_two_steps_processes_chunks(options, lengths, expected):
    """Chunks of prompts delay decoding steps for too long, or prompts wait for no reason."""
    device = Device(**options)
    scheduler, found = make_scheduler(device, lengths), []
    for _ in expected:
        scheduler.advance()
        found.append(device.processed)
        device.processed = []
    assert found == expected


@pytest.mark.once
def test_scheduler_starts_no_prompt_without_room_for_its_state():
    """An engine on JAX fails while a grammar delays the insertion of sequences."""
    device = Device(num_free=8)
    made, device.num_delayed = make_scheduler(device, (9, 9)), 2
    made._process_chunks()
    assert device.processed == []
    device.num_delayed = 1
    made._process_chunks()
    assert device.processed == [[8]]


@pytest.mark.once
def test_scheduler_fills_a_free_slot_while_chunks_are_processed():
    """A prompt that is ready waits until the chunks of others are finished."""
    device = Device(0, num_prompts=2, num_parts=5)
    scheduler = make_scheduler(device, (1, 9, 9))
    scheduler.advance()
    device.num_free = 1
    scheduler.advance()  # the program still runs
    assert device.num_free == 0


@pytest.mark.once
def test_cancelled_request_that_shares_its_prompt_ends_after_the_prompt(monkeypatch):
    """The search at the cancellation skips the request, and it then generates all tokens."""
    monkeypatch.setattr(scheduler, "SECONDS_PER_SEARCH", 1000)
    device, results = Device(num_free=3), []
    made = make_scheduler(device, ())
    made.emit = results.extend
    made.advance()  # the only search for timeouts
    arguments = np.ones(19, "int32"), SamplingParams(n=2), np.random.SeedSequence(0), 5, ()
    made.submit(1, *arguments, deadline=None, ends=(), salt=None)
    made.stop(1, None)
    for _ in range(5):
        made.advance()
    made._deliver()
    assert [(number, reason) for number, _, _, reason, *_ in results] == [(1, "cancelled")]
    assert len(device.active) == 1
