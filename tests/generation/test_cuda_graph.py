"""CUDA graphs of decoding steps on torch. Without an NVIDIA GPU, a replay runs the function."""

import gc

import keras
import numpy as np
import pytest

from keras_recurrent import dispatch, implementation, which_generation
from keras_recurrent.layers import hgrn2
from keras_recurrent.models import SamplingParams
from tests.generation.captures import capture_on_cpu
from tests.generation.test_programs import CHANGES, check_threads, generate, prompts
from tests.gpu import has_gpu
from tests.models.tiny import FAMILIES, HYBRID, VOCABULARY, tiny_causal_lm

if keras.config.backend() != "torch":
    pytest.skip("torch captures CUDA graphs", allow_module_level=True)

import torch

from keras_recurrent.generation import torch_batch
from keras_recurrent.generation.torch import decoder

needs_gpu = pytest.mark.skipif(not has_gpu(), reason="needs an NVIDIA GPU")
LENGTHS, TOTAL = (4, 9), 40
OPTIONS = {
    **{"seed": 5, "min_p": 0.1, "logprobs": 3, "min_new_tokens": 10},
    **{"repetition_penalty": 1.2, "frequency_penalty": 0.3, "logit_bias": {5: 2.0}},
}


@pytest.fixture(autouse=True)
def _graphs(monkeypatch):
    """Runs as on a GPU."""
    if not has_gpu():
        capture_on_cpu(monkeypatch)
        monkeypatch.setattr(torch_batch, "runs_ahead", lambda model: True)
        monkeypatch.setattr(dispatch, "decodes_with_kernels", lambda tensor: True)


def compiled(sampler="greedy", family="hgrn2", jit_compile="auto", **kwargs):
    model = tiny_causal_lm(family=family, **kwargs)
    model.compile(sampler=sampler, jit_compile=jit_compile)
    return model


def compiled_and_traced(sampler="greedy", **kwargs):
    return [compiled(sampler, jit_compile=mode, **kwargs) for mode in ("auto", False)]


@pytest.mark.parametrize(
    ("family", "sampler"), [*((family, "greedy") for family in FAMILIES), ("hgrn2", "beam")]
)
def test_cuda_graph_generates_tokens_of_traced_step(family, sampler):
    model, traced = compiled_and_traced(sampler, family=family)
    found = [generate(model, LENGTHS, TOTAL)["token_ids"] for _ in range(3)]
    assert which_generation(model)[:2] == ("cuda_graph", {})
    expected = generate(traced, LENGTHS, TOTAL)["token_ids"]
    assert which_generation(traced).name == "traced"
    for rows in found:
        np.testing.assert_array_equal(rows, expected)


def test_step_after_a_row_with_other_options_ended_is_not_captured_again():
    """Another capture, in the middle of a call, computes a token twice."""
    model, traced = (compiled(jit_compile=c, num_layers=1) for c in ("auto", False))
    sampling = [SamplingParams(temperature=0, logprobs=n) for n in (1, 8)]
    options = {"sampling": sampling, "max_new_tokens": 20}
    whole = generate(traced, LENGTHS, 9, **options).token_ids
    stop = next(token for token in whole[1] if token not in whole[0])
    # More stop tokens than fit into one group.
    unused = sorted({*range(VOCABULARY)} - {*whole[0], *whole[1]})[:6]
    options["stop_token_ids"] = (stop, *unused)
    found, expected = (generate(m, LENGTHS, 9, **options).logprobs[0] for m in (model, traced))
    assert len(found) == 20
    for a, b in zip(found, expected, strict=True):
        assert abs(a.logprob - b.logprob) < 1e-5


@pytest.mark.parametrize("cached", [False, True])
def test_all_options_as_in_the_traced_step(cached):
    """Buffers of a reused graph must start as those of a new call."""
    model, traced = compiled_and_traced()
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
    make_choice = decoder.make_choice

    def make(*arguments):
        choose = make_choice(*arguments)

        def run(logits, tensors):
            if torch.cuda.is_current_stream_capturing():
                action()
            return choose(logits, tensors)

        return run

    monkeypatch.setattr(decoder, "make_choice", make)


def captured():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ones(1, device="cuda")
    return graph


@needs_gpu
def test_a_graph_that_is_garbage_outlives_a_capture(monkeypatch):
    def garbage():
        cycle = [graphs.pop()]
        cycle.append(cycle)
        del cycle
        for _ in range(3 * gc.get_threshold()[0]):
            kept.append([])  # collects garbage, if that is enabled

    kept, graphs, model = [], [captured()], compiled("top_k")
    while_capturing(monkeypatch, garbage)
    generate(model, LENGTHS, TOTAL)
    assert which_generation(model)[:2] == ("cuda_graph", {})


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
    check_threads(model, [(4, 6), (7, 2), (3, 3)])
    assert which_generation(model).name == "cuda_graph"


def test_after_an_exception(monkeypatch):
    """Fails if a decoder whose call raised an exception serves another call as it is."""
    model, prepare, calls = compiled(), decoder.CapturedDecoder.prepare, []
    expected = generate(model, LENGTHS, TOTAL)["token_ids"]

    def prepare_or_fail(self, features):
        calls.append(self)
        if len(calls) == 5:
            raise ArithmeticError
        return prepare(self, features)

    monkeypatch.setattr(decoder.CapturedDecoder, "prepare", prepare_or_fail)
    with pytest.raises(ArithmeticError):
        generate(model, LENGTHS, TOTAL)
    np.testing.assert_array_equal(generate(model, LENGTHS, TOTAL)["token_ids"], expected)
    assert calls[-1] is not calls[0]


@pytest.mark.parametrize(
    ("error", "num_captures"), [(RuntimeError, 1), (torch.OutOfMemoryError, 2)]
)
def test_sampling_whose_capture_fails_runs_kernel_by_kernel(error, num_captures, monkeypatch):
    """The step of a decoder that has another graph advances a state twice, or never."""
    (model, traced), captures = compiled_and_traced(), []
    generate(model, LENGTHS, TOTAL, return_cache=True)

    def capture(function, *arguments):
        captures.append(function)
        function()
        raise error("no capture")

    monkeypatch.setattr(decoder, "capture", capture)
    options = {"sampling": SamplingParams(**OPTIONS), "return_cache": True}
    with pytest.warns(UserWarning, match="Steps run kernel by kernel: .*no capture"):
        found = [generate(model, LENGTHS, TOTAL, **options).token_ids for _ in range(2)]
    assert found == [generate(traced, LENGTHS, TOTAL, **options).token_ids] * 2
    assert len(captures) == num_captures


@needs_gpu
def test_memory_is_flat():
    model = compiled(num_layers=1)

    def allocated(calls):
        for _ in range(calls):
            generate(model, LENGTHS, TOTAL)
        gc.collect()
        return torch.cuda.memory_allocated()

    before = allocated(3)
    assert allocated(20) <= before


MANY = tuple(1 + i % 7 for i in range(20))  # lengths of more prompts than `MIN_DELAYED_ROWS`


@pytest.mark.parametrize(
    ("sizes", "name"),
    [({}, None), (HYBRID, None), pytest.param({}, "triton", marks=pytest.mark.nightly)],
    ids=["hgrn2", "hybrid", "interpreted"],
)
def test_a_cache_of_many_sequences_continues(sizes, name, monkeypatch):
    """Fails if tokens or a kept cache lack recent tokens, or padding counts as one of them."""
    results = []
    for jit_compile in (False, "auto"):
        model, cache = compiled(jit_compile=jit_compile, **sizes), None
        for total, lengths in ((13, MANY), (6, (2,) * 20), (9, (1,) * 20)):
            with implementation(name if jit_compile else None):
                output, cache = model.generate(
                    prompts(lengths, total), cache=cache, stop_token_ids=None, return_cache=True
                )
            results.append((output["token_ids"], keras.tree.flatten(cache.state)))
        monkeypatch.setattr(hgrn2, "STATE_WRITE_INTERVAL", 3)
        monkeypatch.setattr(hgrn2, "hgrn2_step", None)
    assert which_generation(model).name == "cuda_graph"
    for (expected, other), (found, state) in zip(results[:3], results[3:], strict=True):
        np.testing.assert_array_equal(found, expected)
        for a, b in zip(state, other, strict=True):
            assert a.shape == b.shape
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
