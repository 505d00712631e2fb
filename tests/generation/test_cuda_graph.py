"""On an NVIDIA GPU with torch: steps that are captured as CUDA graphs."""

import gc
import threading

import keras
import keras_hub
import numpy as np
import pytest

from keras_recurrent import which_generation
from keras_recurrent.generation.torch.sampling import TokenSampler
from keras_recurrent.layers import hgrn2
from keras_recurrent.models import SamplingParams
from keras_recurrent.serving import Engine
from tests.generation.test_programs import CHANGES, generate, prompts
from tests.gpu import has_gpu
from tests.models import plain_generation
from tests.models.test_generation import MARGIN
from tests.models.tiny import HYBRID, any_family, tiny_causal_lm

if keras.config.backend() != "torch":
    pytest.skip("torch captures CUDA graphs", allow_module_level=True)

if not has_gpu():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

import torch

LENGTHS, TOTAL = (4, 9), 40
SAMPLERS = {
    "greedy": keras_hub.samplers.GreedySampler,
    "top_k": lambda: keras_hub.samplers.TopKSampler(k=7, seed=5, temperature=2.0),
    "top_p": lambda: keras_hub.samplers.TopPSampler(p=0.8, seed=5, temperature=2.0),
    "random": lambda: keras_hub.samplers.RandomSampler(seed=5, temperature=2.0),
}
OPTIONS = {
    "seed": 5,
    "min_p": 0.1,
    "logprobs": 3,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.3,
    "logit_bias": {5: 2.0},
    "min_new_tokens": 10,
}


def compiled(sampler="greedy", family="hgrn2", jit_compile="auto", **kwargs):
    model = tiny_causal_lm(family=family, **kwargs)
    model.compile(sampler=sampler, jit_compile=jit_compile)
    return model


@any_family
def test_greedy_tokens_are_those_of_the_traced_step(family):
    model = compiled(family=family)
    found = [generate(model, LENGTHS, TOTAL)["token_ids"] for _ in range(3)]
    assert which_generation(model)[:2] == ("cuda_graph", {})
    traced = compiled(family=family, jit_compile=False)
    expected = generate(traced, LENGTHS, TOTAL)["token_ids"]
    assert which_generation(traced).name == "traced"
    for rows in found:
        np.testing.assert_array_equal(rows, expected)


def test_rows_end_at_stop_tokens_as_those_of_the_traced_step():
    model, traced = (compiled(jit_compile=c) for c in ("auto", False))
    whole = generate(traced, LENGTHS, TOTAL)["token_ids"]
    for column in (LENGTHS[1] + 1, 24, TOTAL - 1):
        stops = tuple({int(row[column]) for row in keras.ops.convert_to_numpy(whole)})
        found, expected = (
            generate(m, LENGTHS, TOTAL, stop_token_ids=stops) for m in (model, traced)
        )
        for name, rows in expected.items():
            np.testing.assert_array_equal(found[name], rows)
    assert which_generation(model).name == "cuda_graph"


@pytest.mark.parametrize("name", SAMPLERS)
def test_random_tokens_are_those_of_the_traced_step(name):
    model, traced = (compiled(SAMPLERS[name](), jit_compile=c) for c in ("auto", False))
    for total in (TOTAL, 17, TOTAL):  # the second and third go on with the generator's state
        found, expected = (generate(m, LENGTHS, total)["token_ids"] for m in (model, traced))
        np.testing.assert_array_equal(found, expected)
    assert which_generation(model).name == "cuda_graph"


@pytest.mark.parametrize("cached", [False, True])
def test_all_options_as_in_the_traced_step(cached):
    """Buffers of a reused graph must start as those of a new call."""
    model, traced = (compiled(jit_compile=c) for c in ("auto", False))
    for seed in (1, 2):
        sampling = [SamplingParams(**{**OPTIONS, "seed": s}) for s in (seed, 9)]
        arguments = {"stop_token_ids": (1,), "sampling": sampling, "return_cache": cached}
        found, expected = (generate(m, LENGTHS, TOTAL, **arguments) for m in (model, traced))
        assert found.token_ids == expected.token_ids
        assert found.finish_reason == expected.finish_reason
        for row, rows in zip(found.logprobs, expected.logprobs, strict=True):
            for a, b in zip(row, rows, strict=True):
                assert abs(a.logprob - b.logprob) < 1e-4
    assert which_generation(model).name == "cuda_graph"


def while_capturing(monkeypatch, action):
    """Runs `action` while a step with sampling is captured."""
    sample = TokenSampler.__call__

    def sampled(self, logits):
        if torch.cuda.is_current_stream_capturing():
            action()
        return sample(self, logits)

    monkeypatch.setattr(TokenSampler, "__call__", sampled)


def captured():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ones(1, device="cuda")
    return graph


def test_a_graph_that_is_garbage_outlives_a_capture(monkeypatch):
    def garbage():
        cycle = [graphs.pop()]
        cycle.append(cycle)
        del cycle
        for _ in range(3 * gc.get_threshold()[0]):
            kept.append([])  # collects garbage, if that is enabled

    kept, graphs, model = [], [captured()], compiled(SAMPLERS["top_k"]())
    while_capturing(monkeypatch, garbage)
    generate(model, LENGTHS, TOTAL)
    assert which_generation(model)[:2] == ("cuda_graph", {})


def test_random_tokens_after_a_capture_that_failed(monkeypatch):
    model, traced = (compiled(SAMPLERS["top_k"](), jit_compile=c) for c in ("auto", False))
    graphs = [captured()]
    while_capturing(monkeypatch, graphs.clear)  # no graph can be destroyed during a capture
    found, expected = (generate(m, LENGTHS, TOTAL)["token_ids"] for m in (model, traced))
    assert "could not capture" in which_generation(model).refused["cuda_graph"]
    np.testing.assert_array_equal(found, expected)


def test_beam_search_is_that_of_the_traced_step():
    model, traced = (compiled("beam", jit_compile=c) for c in ("auto", False))
    found, expected = (generate(m, LENGTHS, TOTAL)["token_ids"] for m in (model, traced))
    assert which_generation(model).name == "cuda_graph"
    np.testing.assert_array_equal(found, expected)


@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method:UserWarning")
@pytest.mark.filterwarnings("ignore:.*The use of `x.T` on tensors:UserWarning")
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_the_weights_are_those_of_now(name, dtype):
    model = compiled(num_layers=1, dtype=dtype)
    generate(model, LENGTHS, TOTAL)
    CHANGES[name](model)
    found = generate(model, LENGTHS, TOTAL)["token_ids"]
    assert which_generation(model)[:2] == ("cuda_graph", {})
    model.compile(sampler="greedy", jit_compile=False)
    np.testing.assert_array_equal(found, generate(model, LENGTHS, TOTAL)["token_ids"])


def test_threads_do_not_share_buffers():
    model = compiled(num_layers=1)
    lengths = [(4, 6), (7, 2), (3, 3)]
    expected = [generate(model, pair, 200)["token_ids"] for pair in lengths]
    found = [None] * 3

    def run(i):
        for _ in range(3):
            found[i] = generate(model, lengths[i], 200)["token_ids"]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(found, expected)
    assert which_generation(model).name == "cuda_graph"


def test_after_an_exception(monkeypatch):
    """Fails if a graph whose call raised an exception serves another call as it is."""
    model, prepare, calls = compiled(), TokenSampler.prepare, []
    expected = generate(model, LENGTHS, TOTAL)["token_ids"]

    def prepare_or_fail(sampler):
        calls.append(sampler)
        if len(calls) == 5:
            raise ArithmeticError
        prepare(sampler)

    monkeypatch.setattr(TokenSampler, "prepare", prepare_or_fail)
    with pytest.raises(ArithmeticError):
        generate(model, LENGTHS, TOTAL)
    np.testing.assert_array_equal(generate(model, LENGTHS, TOTAL)["token_ids"], expected)


def test_memory_is_flat():
    model = compiled(num_layers=1)

    def allocated(calls):
        for _ in range(calls):
            generate(model, LENGTHS, TOTAL)
        gc.collect()
        return torch.cuda.memory_allocated()

    before = allocated(3)
    assert allocated(20) <= before


def test_tokens_are_those_of_plain_passes():
    model = compiled()
    prompt = prompts(LENGTHS, TOTAL)
    found = generate(model, LENGTHS, TOTAL)["token_ids"]
    expected, margin = plain_generation.sample(
        model, model.sampler, prompt["token_ids"], prompt["padding_mask"]
    )
    assert margin > MARGIN
    np.testing.assert_array_equal(found, expected)


MANY = tuple(1 + i % 7 for i in range(20))  # lengths of more prompts than `MIN_DELAYED_ROWS`


@pytest.mark.parametrize(("sizes", "seed"), [({}, 5), (HYBRID, 3)], ids=["hgrn2", "hybrid"])
@pytest.mark.parametrize("cached", [False, True])
def test_many_sequences_generate_the_tokens_of_plain_passes(sizes, seed, cached, monkeypatch):
    """Fails if a state that is written every few tokens lacks one of them."""
    model, prompt = compiled(**sizes), prompts(MANY, 24, seed)
    monkeypatch.setattr(hgrn2, "hgrn2_step", None)
    for _ in range(2):  # the second call copies its state to the buffers of a captured step
        found = model.generate(prompt, stop_token_ids=None, return_cache=cached)
        found = (found[0] if cached else found)["token_ids"]
        assert which_generation(model)[:2] == ("cuda_graph", {})
        expected, margin = plain_generation.sample(
            model, model.sampler, prompt["token_ids"], prompt["padding_mask"]
        )
        assert margin > MARGIN
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("sizes", [{}, HYBRID], ids=["hgrn2", "hybrid"])
def test_a_cache_of_many_sequences_continues(sizes):
    results = []
    for jit_compile in ("auto", False):
        model, cache = compiled(jit_compile=jit_compile, **sizes), None
        for total, lengths in ((13, MANY), (6, (2,) * 20), (9, (1,) * 20)):
            output, cache = model.generate(
                prompts(lengths, total), cache=cache, stop_token_ids=None, return_cache=True
            )
            results.append((output["token_ids"], keras.tree.flatten(cache.state)))
    for (found, state), (expected, other) in zip(results[:3], results[3:], strict=True):
        np.testing.assert_array_equal(found, expected)
        for a, b in zip(state, other, strict=True):
            assert a.shape == b.shape
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_many_slots_answer_as_one_alone(monkeypatch):
    """Fails if the tokens since a state was written are those of another request."""
    monkeypatch.setattr(hgrn2, "hgrn2_step", None)
    model = tiny_causal_lm(family="hgrn2")
    options = {"sampling": SamplingParams(temperature=0, logprobs=0), "stop_token_ids": None}
    requests = [([1 + i, 2 + i, 3 + i][: 1 + i % 3], 5 + i % 17) for i in range(40)]
    with Engine(model, num_slots=20, max_length=200, prefix_cache_bytes=0) as engine:

        def submit(prompt, count):
            return engine.submit(prompt, max_new_tokens=count, **options)

        together = [submit(*request) for request in requests]
        together = [request.result(60) for request in together]
        alone = [submit(*request).result(60) for request in requests]
    assert which_generation(model).name == "cuda_graph"
    for found, expected in zip(together, alone, strict=True):
        assert found.token_ids == expected.token_ids
        for a, b in zip(found.logprobs, expected.logprobs, strict=True):
            assert abs(a.logprob - b.logprob) < 1e-5
