"""What a step on torch becomes before it is captured, on any device."""

from types import SimpleNamespace

import keras
import keras_hub
import pytest

if keras.config.backend() != "torch":
    pytest.skip("steps of torch", allow_module_level=True)

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from keras_recurrent import which_generation
from keras_recurrent.generation.torch import runner
from keras_recurrent.generation.torch.cuda_graph import (
    RECENT,
    Captured,
    Graphs,
    side_by_side,
    write_over,
)
from keras_recurrent.generation.torch.loop import Rows
from keras_recurrent.generation.torch.runner import _Replayed, _Run
from keras_recurrent.generation.torch.sampling import Choice
from keras_recurrent.generation.torch.step import Step, _with_numbers
from tests.models.tiny import any_family, tiny_causal_lm


def test_writing_over_reads_parts_of_the_cache_first():
    a, b, c = torch.arange(4.0), torch.arange(4.0, 8), torch.arange(3)
    kept = torch.ones(2)
    new = b.clone(), a, c + 1, kept  # b becomes a, which is overwritten itself
    expected = [t.clone() for t in new]
    write_over([a, b, c, kept], new)
    for t, value in zip((a, b, c, kept), expected, strict=True):
        assert torch.equal(t, value)


def test_tensors_that_are_alike_are_written_over_together():
    tensors = [torch.full((2, 4), float(i)) for i in range(4)] + [torch.ones(3), torch.ones(3)]
    copies, joined = side_by_side(tensors)
    assert [places for places, _ in joined] == [[0, 1, 2, 3]]  # three numbers are not aligned
    for found, given in zip(copies, tensors, strict=True):
        assert torch.equal(found, given)
        assert found.data_ptr() != given.data_ptr()
    (_, whole) = joined[0]
    new = [copies[1], copies[0], torch.full((2, 4), 7.0), copies[2] + 1, torch.zeros(3), copies[5]]
    write_over(copies, new, joined)
    assert whole[:, 0, 0].tolist() == [1, 0, 7, 3]
    assert copies[4].tolist() == [0, 0, 0]
    write_over(copies, [copies[0], *(torch.zeros(2, 4) for _ in range(3)), *copies[4:]], joined)
    assert whole[:, 0, 0].tolist() == [1, 0, 0, 0]  # the first was written over already


DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("of_constant", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_constants_of_one_number_become_numbers_to_the_same_bits(dtype, of_constant, device):
    def capped(x):
        return torch.tanh(x / 30.0) * torch.tensor(33.3, dtype=of_constant, device=device)

    x = torch.linspace(-200, 200, 999, device=device).to(dtype)
    plain, found = make_fx(capped)(x), _with_numbers(make_fx(capped)(x))
    assert any(node.op == "get_attr" for node in plain.graph.nodes)
    assert not any(node.op == "get_attr" for node in found.graph.nodes)
    assert found(x).dtype == plain(x).dtype
    assert torch.equal(found(x), plain(x))


def test_tensors_of_no_dimension_that_may_promote_stay():
    count = torch.arange(3)
    found = _with_numbers(make_fx(lambda n: n * torch.tensor(0.5, dtype=torch.float64))(count))
    assert torch.equal(found(count), count * torch.tensor(0.5, dtype=torch.float64))


@any_family
@pytest.mark.parametrize("with_rows", [False, True])
@torch.no_grad()
def test_what_is_captured_writes_what_the_loop_writes(family, with_rows):
    """The part of a graph that is the same on every device: a step that writes over its inputs."""
    model = tiny_causal_lm(family=family)
    cache = model.backbone.get_initial_state(2, max_length=2 * RECENT)
    step, flat = Step(model, cache, False, with_rows), keras.tree.flatten(cache)
    device = flat[0].device
    choice = Choice(keras_hub.samplers.GreedySampler())
    token = torch.tensor([[3], [5]], dtype=torch.int32, device=device)
    stops = torch.tensor([], dtype=torch.int32, device=device)
    rows = Rows(torch.tensor([2, 9], device=device), stops) if with_rows else None
    prepared = step.prepared()

    captured = Captured.__new__(Captured)
    captured.rows, captured._run = rows and rows.copy(), step.traced
    captured._prepared, captured.token = prepared, token.clone()
    captured.cache, captured._joined = side_by_side(flat)
    captured.chooses, captured.recent = True, None
    if not with_rows:
        captured.recent = token.new_zeros(2, RECENT)
    captured.replay = lambda: captured._step(choice)
    loop = _Run(step, lambda t, f: step.traced(*prepared, t, *f), token, flat, choice, rows)
    replayed = _Replayed(step, captured, choice)
    found, expected = token.new_zeros(2, 2 * RECENT), token.new_zeros(2, 2 * RECENT)
    for start, stop in ((0, RECENT), (RECENT, RECENT + 5)):
        replayed.write(found, start, stop)
        loop.write(expected, start, stop)
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

    monkeypatch.setattr(runner, "Captured", captured)
    monkeypatch.setattr(runner.Ways, "_refused", lambda self, device: None)
    ways, cache = runner.Ways(model, None), model.backbone.get_initial_state(1)
    token = torch.ones((1, 1), dtype=torch.int32, device=keras.tree.flatten(cache)[0].device)
    for _ in range(2):
        with ways.tokens(token, cache, Choice(keras_hub.samplers.GreedySampler())) as walk:
            walk.next_token()
        assert str(error) in which_generation(model).refused["cuda_graph"]
    assert len(tries) == tried


def test_graphs_of_a_step_are_forgotten_with_it(monkeypatch):
    monkeypatch.setattr(Graphs, "_bytes", lambda self: 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1)
    )
    graphs, graph = Graphs(), SimpleNamespace(token=torch.ones(1))
    steps = object(), object()
    for step in steps:
        graphs.give((step, "settings"), graph)
    graphs.forget(steps[0])
    assert graphs.take((steps[0], "settings")) is None
    assert graphs.take((steps[1], "settings")) is graph
