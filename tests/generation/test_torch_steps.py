"""What a step on torch becomes before it is captured, on any device."""

import collections
import threading
from types import SimpleNamespace

import keras
import numpy as np
import pytest

if keras.config.backend() != "torch":
    pytest.skip("steps of torch", allow_module_level=True)

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from keras_recurrent import dispatch, implementation, which_generation
from keras_recurrent.generation.recent_tokens import apply_recent_tokens
from keras_recurrent.generation.request import Request
from keras_recurrent.generation.sampling import features_of
from keras_recurrent.generation.torch import runner, step
from keras_recurrent.generation.torch.cuda_graph import (
    CapturedStep,
    GraphPool,
    clone_stacked,
    overwrite,
)
from keras_recurrent.generation.torch.loop import ActiveSequences
from keras_recurrent.generation.torch.runner import _FunctionDecoder, _GraphDecoder
from keras_recurrent.generation.torch.sampling import RECENT, choose_tokens, tracing
from keras_recurrent.generation.torch.step import Step, _inline_scalars
from keras_recurrent.layers import hgrn2
from keras_recurrent.models import SamplingParams
from keras_recurrent.serving.torch_slots import TorchRows
from tests.generation.captures import capture_on_cpu
from tests.generation.test_programs import prompts
from tests.generation.token_samplers import token_sampler
from tests.models.tiny import HYBRID, any_family, tiny_causal_lm


def test_writing_over_reads_parts_of_the_cache_first():
    a, b, c = torch.arange(4.0), torch.arange(4.0, 8), torch.arange(3)
    kept = torch.ones(2)
    new = b.clone(), a, c + 1, kept  # b becomes a, which is overwritten itself
    expected = [t.clone() for t in new]
    overwrite([a, b, c, kept], new)
    for t, value in zip((a, b, c, kept), expected, strict=True):
        assert torch.equal(t, value)


def test_tensors_that_are_alike_are_written_over_together():
    tensors = [torch.full((2, 4), float(i)) for i in range(4)] + [torch.ones(3), torch.ones(3)]
    copies, stacks = clone_stacked(tensors)
    assert [indices for indices, _ in stacks] == [[0, 1, 2, 3]]  # three numbers are not aligned
    for found, given in zip(copies, tensors, strict=True):
        assert torch.equal(found, given)
        assert found.data_ptr() != given.data_ptr()
    (_, stack) = stacks[0]
    new = [copies[1], copies[0], torch.full((2, 4), 7.0), copies[2] + 1, torch.zeros(3), copies[5]]
    overwrite(copies, new, stacks)
    assert stack[:, 0, 0].tolist() == [1, 0, 7, 3]
    assert copies[4].tolist() == [0, 0, 0]
    overwrite(copies, [copies[0], *(torch.zeros(2, 4) for _ in range(3)), *copies[4:]], stacks)
    assert stack[:, 0, 0].tolist() == [1, 0, 0, 0]  # the first was written over already


DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("of_constant", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_constants_of_one_number_become_numbers_to_the_same_bits(dtype, of_constant, device):
    def capped(x):
        return torch.tanh(x / 30.0) * torch.tensor(33.3, dtype=of_constant, device=device)

    x = torch.linspace(-200, 200, 999, device=device).to(dtype)
    plain, found = make_fx(capped)(x), _inline_scalars(make_fx(capped)(x))
    assert any(node.op == "get_attr" for node in plain.graph.nodes)
    assert not any(node.op == "get_attr" for node in found.graph.nodes)
    assert found(x).dtype == plain(x).dtype
    assert torch.equal(found(x), plain(x))


def test_tensors_of_no_dimension_that_may_promote_stay():
    count = torch.arange(3)
    found = _inline_scalars(make_fx(lambda n: n * torch.tensor(0.5, dtype=torch.float64))(count))
    assert torch.equal(found(count), count * torch.tensor(0.5, dtype=torch.float64))


@any_family
@pytest.mark.parametrize("with_sequences", [False, True])
@torch.no_grad()
def test_what_is_captured_writes_what_the_loop_writes(family, with_sequences):
    """The part of a graph that is the same on every device: a step that writes over its inputs."""
    model = tiny_causal_lm(family=family)
    cache = model.backbone.get_initial_state(2, max_length=2 * RECENT)
    step, flat = Step(model, cache, False, with_sequences), keras.tree.flatten(cache)
    device = flat[0].device
    sampling = [SamplingParams(temperature=0), SamplingParams(seed=1, frequency_penalty=1.0)]
    sampling = SamplingParams(temperature=0) if family == "griffin" else sampling
    size = model.backbone.vocabulary_size
    sampler, same = (token_sampler(sampling, 2, size, device=device) for _ in range(2))
    token = torch.tensor([[3], [5]], dtype=torch.int32, device=device)
    lengths = np.array([1, 1])
    request = Request(np.ones((2, 1), "int32"), lengths, lengths + [2, 9], (), None)
    sequences = ActiveSequences(request, token) if with_sequences else None
    prepared = step.prepared()

    captured = CapturedStep.__new__(CapturedStep)
    captured.sequences, captured._run = sequences and sequences.copy(), step.traced
    captured._prepared, captured.token = prepared, token.clone()
    captured.cache, captured.stacks = clone_stacked(flat)
    captured.sampler, captured.recent, captured.pool = same.copy(), None, None
    if not with_sequences:
        captured.recent = token.new_zeros(2, RECENT)
    captured.replay = captured._step
    loop = _FunctionDecoder(
        step, lambda t, f: step.traced(*prepared, t, *f), token, flat, sampler, sequences
    )
    replayed = _GraphDecoder(step, captured)
    found, expected = token.new_zeros(2, 2 * RECENT), token.new_zeros(2, 2 * RECENT)
    for start, stop in ((0, RECENT), (RECENT, RECENT + 5)):
        replayed.generate(found, start, stop)
        loop.generate(expected, start, stop)
    assert torch.equal(found, expected)
    assert torch.equal(captured.token, loop._token)
    for found, expected in zip(captured.cache, loop._flat, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("error", "tried"), [(torch.OutOfMemoryError("no room"), 2), (RuntimeError("no capture"), 1)]
)
@torch.no_grad()
def test_a_graph_that_found_no_memory_is_tried_again(error, tried, monkeypatch):
    model, tries = tiny_causal_lm(family="hgrn2", num_layers=1), []

    def captured(*arguments):
        tries.append(arguments)
        raise error

    monkeypatch.setattr(runner, "CapturedStep", captured)
    monkeypatch.setattr(runner.Runner, "_graph_reason", lambda self, device: None)
    model_runner = runner.Runner(model)
    cache = model.backbone.get_initial_state(1)
    token = torch.ones((1, 1), dtype=torch.int32, device=keras.tree.flatten(cache)[0].device)
    for _ in range(2):
        with model_runner.decode(
            token, cache, token_sampler(SamplingParams(temperature=0), 1, device=token.device)
        ) as decoder:
            decoder.next_token()
        assert str(error) in which_generation(model).refused["cuda_graph"]
    assert len(tries) == tried


def test_graphs_of_a_step_are_forgotten_with_it(monkeypatch):
    monkeypatch.setattr(GraphPool, "_bytes", lambda self: 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1)
    )
    graphs, graph = GraphPool(), SimpleNamespace(token=torch.ones(1))
    steps = object(), object()
    for each in steps:
        graphs.release((each, "settings"), graph)
    graphs.drop(steps[0])
    assert graphs.acquire((steps[0], "settings")) is None
    assert graphs.acquire((steps[1], "settings")) is graph


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ({"num_layers": 1}, None),
        pytest.param(HYBRID, None, marks=pytest.mark.nightly),
        pytest.param({}, "triton", marks=pytest.mark.nightly),
    ],
    ids=["one layer", "hybrid", "interpreted"],
)
def test_captured_steps_write_states_every_few_tokens(sizes, name, monkeypatch):
    """Fails if a kept cache lacks recent tokens, or padding counts as one of them."""
    model, lengths = tiny_causal_lm(family="hgrn2", **sizes), (3, 7)
    model.compile(sampler="greedy")
    options = {"return_cache": True, "stop_token_ids": None}
    first, second = prompts(lengths, 13), prompts((1, 1), 4, seed=1)
    expected, cache = model.generate(first, **options)
    next_expected, next_cache = model.generate(second, cache=cache, **options)
    monkeypatch.setattr(hgrn2, "STATE_WRITE_INTERVAL", 3)
    calls, step = [], hgrn2.hgrn2_delayed_step
    monkeypatch.setattr(
        hgrn2, "hgrn2_delayed_step", lambda **given: calls.append(given) or step(**given)
    )
    capture_on_cpu(monkeypatch)
    monkeypatch.setattr(runner, "MIN_DELAYED_ROWS", 2)
    monkeypatch.setattr(dispatch, "decodes_with_kernels", lambda tensor: True)
    with implementation(name):
        found, cache = model.generate(first, **options)
        next_found, cache = model.generate(second, cache=cache, **options)
    assert which_generation(model).name == "cuda_graph"
    assert len(calls) == sum(
        isinstance(b.temporal_block, hgrn2.HGRN2) for b in model.backbone.transformer_layers
    )
    for tokens, wanted in ((found, expected), (next_found, next_expected)):
        np.testing.assert_array_equal(tokens["token_ids"], wanted["token_ids"])
    keras.tree.assert_same_structure(cache.state, next_cache.state)
    for a, b in zip(*map(keras.tree.flatten, (cache.state, next_cache.state)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


# Copy from the device and to it: `tensor[i] = number` calls the second.
WAITING = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.lift_fresh.default}


def operators(function):
    """Counts torch's operators that a function calls."""
    called = collections.Counter()

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            called[function] += 1
            return function(*args, **(kwargs or {}))

    with Operators():
        function()
    return called


def test_slots_change_without_waiting():
    """Fails if an engine that inserts a sequence waits for the step that runs."""
    model = tiny_causal_lm(family="hgrn2", num_layers=1)
    rows = TorchRows(model, model._loops(), 2, 64, num_prompts=1)

    def change():
        rows.insert(1, rows.initial_row, np.int32(3), 9, np.full(4, -1, "int32"))
        rows.stop(1)

    called = operators(change)
    assert called[torch.ops.aten.fill_.Scalar]
    # Of the stop tokens, which are copied from pinned memory on a GPU.
    assert {name: called[name] for name in WAITING & {*called}} == {
        torch.ops.aten.lift_fresh.default: 1
    }
    rows.close()


def test_recent_tokens_are_applied_without_waiting():
    """Fails if an engine that saves a state waits for the step that runs."""
    backbone = tiny_causal_lm(family="hgrn2", num_layers=1).backbone
    cache = backbone.add_recent_tokens(backbone.get_initial_state(2))
    called = operators(lambda: apply_recent_tokens(cache))
    assert called[torch.ops.aten.where.self]
    assert not WAITING & {*called}


def test_a_step_keeps_no_larger_copies_of_weights(monkeypatch):
    """A step of several rows keeps a float32 copy of each int8 kernel, four times its bytes."""
    model = tiny_causal_lm(family="hgrn2", num_layers=1)
    model.quantize("int8", filters=lambda layer: type(layer) is keras.layers.Dense)
    monkeypatch.setattr(step, "MAX_GROWN", 2**8)
    cache = model.backbone.get_initial_state(2)
    prepared = step.Step(model, cache, compiled=False, masked=False).prepared()
    weights = {t.data_ptr() for t in (v.value for v in model.variables)}
    assert max(t.nbytes for t in prepared if t.data_ptr() not in weights) <= step.MAX_GROWN


def test_a_step_does_not_compute_lower_bounds(monkeypatch):
    """Fails if each step recomputes them, since intermediate results are larger than weights."""
    model = tiny_causal_lm(family="hgrn2", num_layers=4)
    logits = model.backbone.lower_bounds.logits.value
    monkeypatch.setattr(step, "MAX_GROWN", 2 * logits.nbytes)
    cache = model.backbone.get_initial_state(2)
    prepared = step.Step(model, cache, compiled=False, masked=False).prepared()
    assert logits.data_ptr() not in {t.data_ptr() for t in prepared}


def test_choice_of_tokens_waits_for_other_tracing():
    """Two threads trace at once, such as an engine and `generate`: torch raises an error."""
    features, logits = features_of([SamplingParams(top_k=3)], 61), keras.ops.zeros((1, 61))
    arguments = {"temperature": keras.ops.ones(1), "top_k": keras.ops.array([3])}
    stops, count = keras.ops.zeros(0, "int32"), keras.ops.zeros(1, "int32")
    inputs = stops, count, keras.ops.zeros(1), None, arguments
    thread = threading.Thread(target=choose_tokens, args=(features, logits, *inputs))
    with tracing:
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
    thread.join(60)
    assert not thread.is_alive()
