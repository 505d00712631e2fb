"""CUDA graphs of decoding steps on torch. Without an NVIDIA GPU, a replay runs the function."""

import contextlib
import gc

import keras
import numpy as np
import pytest

from keras_recurrent import dispatch, implementation, which_generation
from keras_recurrent.layers import hgrn2
from keras_recurrent.models import SamplingParams
from tests.generation.captures import capture_on_cpu
from tests.generation.test_programs import CHANGES, check_threads
from tests.generation.tokens import generate, pad, random_prompts
from tests.gpu import has_gpu
from tests.models.tiny import FAMILIES, HYBRID, VOCABULARY, tiny_causal_lm

if keras.config.backend() != "torch":
    pytest.skip("torch captures CUDA graphs", allow_module_level=True)

import torch

from keras_recurrent.generation import torch_batch, torch_graphs, torch_programs

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
        monkeypatch.setattr(dispatch, "uses_triton_kernels", lambda tensor: True)


def make_model(sampler="greedy", family="hgrn2", jit_compile="auto", **options):
    sizes = {"num_layers": 1} if family in ("hgrn2", "transnormer") else {}
    model = tiny_causal_lm(family=family, **{**sizes, **options})
    model.compile(sampler=sampler, jit_compile=jit_compile)
    return model


@pytest.fixture(scope="module")
def traced():
    """The model whose steps are traced, but not captured."""
    return make_model(jit_compile=False)


def assert_logprobs_close(found, expected, atol):
    for pair in zip(found, expected, strict=True):
        np.testing.assert_allclose(*([each.logprob for each in row] for row in pair), atol=atol)


@pytest.mark.parametrize(
    ("family", "sampler"),
    [
        *(("griffin", "greedy"), ("hgrn2", "greedy"), ("hgrn2", "beam")),
        *(
            pytest.param(family, "greedy", marks=pytest.mark.nightly)
            for family in [*FAMILIES][2:]  # a replay copies the states of any model
        ),
    ],
)
def test_cuda_graph_generates_tokens_of_traced_step(family, sampler):
    model, traced = (make_model(sampler, family, mode) for mode in ("auto", False))
    found = [generate(model, LENGTHS, TOTAL)["token_ids"] for _ in range(3)]
    assert which_generation(model)[:2] == ("cuda_graph", {})
    expected = generate(traced, LENGTHS, TOTAL)["token_ids"]
    assert which_generation(traced).name == "traced"
    for rows in found:
        np.testing.assert_array_equal(rows, expected)


def test_step_after_the_end_of_a_sequence_with_other_options_is_not_captured_again(traced):
    """Another capture, in the middle of a call, computes a token twice."""
    model = make_model()
    sampling = [SamplingParams(temperature=0, logprobs=n) for n in (1, 8)]
    options = {"sampling": sampling, "max_new_tokens": 20}
    whole = generate(traced, LENGTHS, 9, **options).token_ids
    stop = next(token for token in whole[1] if token not in whole[0])
    # More stop tokens than fit into one group.
    unused = sorted({*range(VOCABULARY)} - {*whole[0], *whole[1]})[:6]
    options["stop_token_ids"] = (stop, *unused)
    found, expected = (generate(m, LENGTHS, 9, **options).logprobs[:1] for m in (model, traced))
    assert len(found[0]) == 20
    assert_logprobs_close(found, expected, 1e-5)


@pytest.mark.parametrize("return_cache", [False, True])
def test_cuda_graph_with_all_options_matches_traced_step(return_cache, traced):
    """Buffers of a graph that an earlier call has used keep its values."""
    model = make_model()
    for seed in (1, 2):
        sampling = [SamplingParams(**{**OPTIONS, "seed": s}) for s in (seed, 9)]
        options = {"stop_token_ids": (1,), "sampling": sampling, "return_cache": return_cache}
        found, expected = (generate(m, LENGTHS, TOTAL, **options) for m in (model, traced))
        assert found.token_ids == expected.token_ids
        assert found.finish_reason == expected.finish_reason
        assert_logprobs_close(found.logprobs, expected.logprobs, 1e-4)
    assert which_generation(model).name == "cuda_graph"


@needs_gpu
def test_garbage_collection_of_a_graph_does_not_end_a_capture(monkeypatch):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ones(1, device="cuda")
    kept, graphs, make_choice = [], [graph], torch_batch.make_choice
    del graph

    def collect_graph():
        cycle = [graphs.pop()]
        cycle.append(cycle)
        del cycle
        for _ in range(3 * gc.get_threshold()[0]):
            kept.append([])  # collects garbage, if that is enabled

    def make(*arguments):
        choose = make_choice(*arguments)

        def run(logits, tensors):
            if torch.cuda.is_current_stream_capturing():
                collect_graph()
            return choose(logits, tensors)

        return run

    monkeypatch.setattr(torch_batch, "make_choice", make)
    model = make_model("top_k")
    generate(model, LENGTHS, TOTAL)
    assert which_generation(model)[:2] == ("cuda_graph", {})


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("LoRA", "float32"), ("quantized", "float32"), ("trained", "mixed_bfloat16")],
)
def test_cuda_graph_after_a_change_of_weights_uses_the_new_ones(name, dtype):
    model = make_model(dtype=dtype)
    generate(model, LENGTHS, TOTAL)
    CHANGES[name](model)
    found = generate(model, LENGTHS, TOTAL)["token_ids"]
    assert which_generation(model)[:2] == ("cuda_graph", {})
    model.compile(sampler="greedy", jit_compile=False)
    np.testing.assert_array_equal(found, generate(model, LENGTHS, TOTAL)["token_ids"])


def test_threads_do_not_share_captured_decoders():
    model = make_model()
    check_threads(model, [(4, 6), (7, 2), (3, 3)])
    assert which_generation(model).name == "cuda_graph"


def test_decoder_whose_call_raised_an_exception_is_not_used_again(monkeypatch):
    """A later call begins with tensors between two tokens."""
    model, prepare, calls = make_model(), torch_graphs.CapturedDecoder.prepare, []
    expected = generate(model, LENGTHS, TOTAL)["token_ids"]

    def prepare_or_fail(self, features):
        calls.append(self)
        if len(calls) == 5:
            raise ArithmeticError
        return prepare(self, features)

    monkeypatch.setattr(torch_graphs.CapturedDecoder, "prepare", prepare_or_fail)
    with pytest.raises(ArithmeticError):
        generate(model, LENGTHS, TOTAL)
    np.testing.assert_array_equal(generate(model, LENGTHS, TOTAL)["token_ids"], expected)
    assert calls[-1] is not calls[0]


@pytest.mark.parametrize("has_other_graph", [False, True])
@pytest.mark.parametrize(
    ("error", "num_captures"), [(RuntimeError, 1), (torch.OutOfMemoryError, 2)]
)
def test_failed_capture_is_repeated_only_if_memory_was_short(
    error, num_captures, has_other_graph, traced, monkeypatch
):
    """A capture is given up after memory ran out, is retried after other errors, or changes tokens.

    Tokens change if the step after the failure advances a state twice, or never.
    """
    model, captures = make_model(), []
    if has_other_graph:
        generate(model, LENGTHS, TOTAL, return_cache=True)

    def capture(function, *arguments):
        captures.append(function)
        function()
        raise error("no capture")

    monkeypatch.setattr(torch_graphs, "capture", capture)
    options = {"sampling": SamplingParams(**OPTIONS), "return_cache": True}
    warning = pytest.warns(UserWarning, match="Steps run kernel by kernel: .*no capture")
    with warning if has_other_graph else contextlib.nullcontext():
        found = [generate(model, LENGTHS, TOTAL, **options).token_ids for _ in range(2)]
    assert has_other_graph or "no capture" in which_generation(model).refused["cuda_graph"]
    assert found == [generate(traced, LENGTHS, TOTAL, **options).token_ids] * 2
    assert len(captures) == num_captures


@pytest.mark.parametrize(
    ("lengths", "return_cache"),
    [(LENGTHS, False), ((3,) * 20, True)],  # `MIN_DELAYED_ROWS` and more
)
def test_first_call_traces_the_step_while_kernels_of_prompts_compile(
    return_cache, lengths, monkeypatch
):
    """Kernels of the step compile after those of prompts, or another step is traced."""
    events, make = [], torch_programs.Step

    @contextlib.contextmanager
    def compile_ahead():
        events.append("begin")
        yield True
        events.append("end")

    def make_step(*arguments):
        events.append("step")
        return make(*arguments)

    monkeypatch.setattr(torch_programs, "compile_ahead", compile_ahead)
    monkeypatch.setattr(torch_programs, "Step", make_step)
    for _ in range(2):
        generate(model := make_model(), lengths, TOTAL, return_cache=return_cache)
        generate(model, lengths, TOTAL, return_cache=return_cache)
    assert events == ["begin", "step", "begin", "end", "end"] * 2  # the step compiles ahead, too


@needs_gpu
def test_device_memory_does_not_grow_with_calls():
    model = make_model()

    def measure(calls):
        for _ in range(calls):
            generate(model, LENGTHS, TOTAL)
        gc.collect()
        return torch.cuda.memory_allocated()

    before = measure(3)
    assert measure(20) <= before


@pytest.mark.parametrize(
    ("sizes", "name"),
    [(HYBRID, None), pytest.param({}, "triton", marks=pytest.mark.nightly)],
    ids=["hybrid", "interpreted"],
)
def test_delayed_writes_of_many_sequences_match_the_traced_step(sizes, name, monkeypatch):
    """Tokens or a returned cache lack recent tokens, or padding counts as one of them."""
    lengths = tuple(1 + i % 7 for i in range(20))  # of more prompts than `MIN_DELAYED_ROWS`
    results = []
    for jit_compile in (False, "auto"):
        model, cache = make_model(jit_compile=jit_compile, **sizes), None
        for lengths_of_call, total in ((lengths, 13), ((2,) * 20, 6), ((1,) * 20, 9)):
            inputs = pad(random_prompts(lengths_of_call), total)
            with implementation(name if jit_compile else None):
                output, cache = model.generate(
                    inputs, cache=cache, stop_token_ids=None, return_cache=True
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
