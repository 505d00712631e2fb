"""Steps on torch before they are captured: traced graphs, weights, and waits for the device."""

from types import SimpleNamespace

import keras
import numpy as np
import optree
import pytest

if keras.config.backend() != "torch":
    pytest.skip("steps of torch", allow_module_level=True)

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from keras_recurrent import which_generation
from keras_recurrent.backends.torch import _states
from keras_recurrent.generation import torch_batch, torch_programs
from keras_recurrent.generation.sampling import features_of
from keras_recurrent.generation.sequence import Sequence
from keras_recurrent.generation.torch_batch import TorchBatch, clone_all, overwrite, tracing
from keras_recurrent.generation.torch_graphs import DecoderPool
from keras_recurrent.generation.torch_programs import _inline_scalars
from keras_recurrent.layers import recent_tokens
from keras_recurrent.layers.recent_tokens import apply_recent_tokens
from keras_recurrent.models import SamplingParams
from tests.generation.captures import capture_on_cpu
from tests.generation.tokens import generate
from tests.models.tiny import tiny_causal_lm
from tests.operators import count_operators


def test_overwrite_with_views_of_the_tensors_copies_them_first():
    tensors = clone_all([torch.zeros(3), torch.ones(3), torch.tensor(7)])
    addresses = [t.data_ptr() for t in tensors]
    overwrite(tensors, [tensors[1], tensors[0][:1].expand(3), tensors[2]])
    assert [t.tolist() for t in tensors] == [[1, 1, 1], [0, 0, 0], 7]
    assert [t.data_ptr() for t in tensors] == addresses


DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("constant_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_inline_scalars_is_bit_identical(dtype, constant_dtype, device):
    def cap(x):
        return torch.tanh(x / 30.0) * torch.tensor(33.3, dtype=constant_dtype, device=device)

    x = torch.linspace(-200, 200, 999, device=device).to(dtype)
    plain, found = make_fx(cap)(x), _inline_scalars(make_fx(cap)(x))
    assert any(node.op == "get_attr" for node in plain.graph.nodes)
    assert not any(node.op == "get_attr" for node in found.graph.nodes)
    assert found(x).dtype == plain(x).dtype
    assert torch.equal(found(x), plain(x))
    # A constant without dimensions stays if it promotes the result.
    count = torch.arange(3)
    found = _inline_scalars(make_fx(lambda n: n * torch.tensor(0.5, dtype=torch.float64))(count))
    assert torch.equal(found(count), count * torch.tensor(0.5, dtype=torch.float64))


@pytest.mark.parametrize("num_columns", [96, 33])
def test_single_bfloat16_row_is_multiplied_without_rearranging_weights(num_columns):
    """A step in bfloat16 takes longer on a CPU than one in float32."""
    rng = np.random.default_rng(0)
    a, b = (torch.tensor(rng.normal(size=s)).bfloat16() for s in ((1, 64), (64, num_columns)))
    traced = make_fx(torch.mm, torch_programs._SINGLE_BFLOAT16_ROW)(a, b)
    assert torch.ops.aten.mm.default not in {node.target for node in traced.graph.nodes}
    exact = a.double() @ b.double()
    plain, found = (f(a, b) for f in (torch.mm, traced))
    assert found.dtype == plain.dtype
    # Both round once, after a sum in float32.
    assert (found - exact).abs().max() <= 1.01 * (plain - exact).abs().max()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a step on a CPU")
def test_step_in_bfloat16_on_a_cpu_reads_weights_as_stored():
    """The library's product would rearrange the weights at each token."""
    model = tiny_causal_lm(family="hgrn2", dtype="bfloat16")  # no transposed weights
    cache = model.backbone.get_initial_state(1)
    step = torch_programs.Step(model, cache, 1, compiled=False, masked=False)
    assert torch.ops.aten.mm.default not in {node.target for node in step.traced.graph.nodes}


def test_decoder_pool_after_drop_has_only_decoders_of_other_steps(monkeypatch):
    """Unused decoders keep memory of the device after their step was dropped."""
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1)
    )
    pool, steps = DecoderPool(), (object(), object())
    for each in steps:
        unused = SimpleNamespace(key=(each, "weights"), tensors={"token": torch.ones(1)}, bytes=0)
        pool.release(unused)
    pool.drop(steps[0])
    assert pool.acquire((steps[0], "weights"), 0, "cuda") is None
    assert pool.acquire((steps[1], "weights"), 0, "cuda") is unused


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operators create; `peak` is their largest sum."""

    def __init__(self):
        super().__init__()
        self._storages, self.peak = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for tensor in optree.tree_leaves(found):
            if type(tensor) is torch.Tensor:
                storage = tensor.untyped_storage()
                self._storages[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        live = {k: v for k, v in self._storages.items() if not v[0].expired()}
        self._storages, self.peak = live, max(self.peak, sum(size for _, size in live.values()))
        return found


@pytest.mark.parametrize("captures", [False, True])
def test_states_of_many_sequences_exist_once(captures, monkeypatch):
    """Memory runs out, because prompts, decoder and step each have a copy of all states."""
    monkeypatch.setattr("keras_recurrent.generation.prompts.TOKENS_PER_CHUNK", 8)
    monkeypatch.setattr(_states, "MIN_STORED_BYTES", 2**12)
    if captures:
        capture_on_cpu(monkeypatch)
    sizes = {"num_layers": 8, "num_heads": 2, "head_dim": 64, "hidden_dim": 16}
    model = tiny_causal_lm(family="transnormer", **sizes)
    states = keras.tree.flatten(model.backbone.get_initial_state(64))
    num_bytes = sum(t.nbytes for t in states)
    largest = max(t.nbytes for t in states)
    for _ in range(2):  # the second call traces nothing
        with LiveBytes() as live:
            generate(model, (2,) * 64, 6)
        # The states of 8 sequences, and temporary tensors of a block.
        assert num_bytes <= live.peak <= num_bytes * 9 / 8 + 3 * largest


# Operators that wait for the device: `tensor[i] = number` calls the second.
WAITING = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.lift_fresh.default}


def test_insert_and_remove_do_not_wait_for_the_device(hgrn2):
    """An engine that inserts a sequence waits for the step that runs."""
    batch = TorchBatch(hgrn2._programs(), 2, keep=True)
    batch.prepare_slots(64, num_prompts=1)
    sequence = Sequence(np.array([3]), SamplingParams(temperature=0), None, 9)

    def change():
        batch.insert(sequence, batch.initial_state)
        batch.remove(sequence)

    _, called = count_operators(change)
    assert called[torch.ops.aten.fill_.Scalar]
    # Stop tokens, which are copied from pinned memory on a GPU.
    assert {n: called[n] for n in WAITING & {*called}} == {torch.ops.aten.lift_fresh.default: 1}
    batch.close()


def test_state_of_a_slot_is_copied_at_once():
    """The host of an engine launches a copy for each layer whenever a request ends."""
    counts = []
    for num_layers in (2, 4):
        blocks = ("recurrent", "local_attention")
        model = tiny_causal_lm(num_layers=num_layers, block_types=blocks)
        batch = TorchBatch(model._programs(), 2, keep=True)
        batch.prepare_slots(64, num_prompts=1)
        _, called = count_operators(lambda batch=batch: batch.slot_state(0))
        counts.append({name: n for name, n in called.items() if not name.is_view})
        batch.close()
    assert counts[0] == counts[1]


def test_apply_recent_tokens_does_not_wait_for_the_device(hgrn2):
    """An engine that saves a state waits for the step that runs."""
    cache = hgrn2.backbone.add_recent_tokens(hgrn2.backbone.get_initial_state(2))
    _, called = count_operators(lambda: apply_recent_tokens(cache))
    assert called[torch.ops.aten.where.self]
    assert not WAITING & {*called}


def test_recent_tokens_of_several_layers_are_applied_to_their_own_states(monkeypatch):
    """A state that is saved has the recent tokens of another layer."""
    backbone = tiny_causal_lm(family="hgrn2", num_layers=3).backbone
    rng = np.random.default_rng(0)
    cache = keras.tree.map_structure(
        lambda x: (
            torch.asarray(rng.uniform(0.1, 1, x.shape), dtype=x.dtype, device=x.device)
            if x.is_floating_point()
            else x
        ),
        backbone.add_recent_tokens(backbone.get_initial_state(2)),
    )
    found = keras.tree.flatten(apply_recent_tokens(cache))
    monkeypatch.setattr(recent_tokens, "_MAX_ROWS", 1)  # one layer at a time
    torch.testing.assert_close(found, keras.tree.flatten(apply_recent_tokens(cache)))


def test_prepared_tensors_are_not_larger_than_their_weights(hgrn2, monkeypatch):
    """A step of several sequences keeps a float32 copy of each int8 kernel."""
    hgrn2.quantize("int8", filters=lambda layer: type(layer) is keras.layers.Dense)
    monkeypatch.setattr(torch_programs, "MAX_STORED_GROWTH", 2**8)
    weights = {t.data_ptr() for t in (v.value for v in hgrn2.variables)}
    found = [t.nbytes for t in prepare_tensors(hgrn2) if t.data_ptr() not in weights]
    assert max(found) <= torch_programs.MAX_STORED_GROWTH


def test_lower_bounds_are_prepared_once(monkeypatch):
    """Each step recomputes lower bounds, since intermediate results are larger than weights."""
    model = tiny_causal_lm(family="hgrn2", num_layers=4)
    logits = model.backbone.lower_bounds.logits.value
    monkeypatch.setattr(torch_programs, "MAX_STORED_GROWTH", 2 * logits.nbytes)
    assert logits.data_ptr() not in {t.data_ptr() for t in prepare_tensors(model)}


def prepare_tensors(model):
    """Returns the tensors that a step computes from weights only."""
    cache = model.backbone.get_initial_state(2)
    return torch_programs.Step(model, cache, 2, compiled=False, masked=False).prepared()


def test_make_choice_holds_the_lock_of_tracing(monkeypatch):
    """Two threads trace at once, such as an engine and `generate`, and torch raises an error."""
    features, logits = features_of([SamplingParams(top_k=3)], 61), keras.ops.zeros((1, 61))
    number, ids = keras.ops.ones(1), keras.ops.ones((1, 1), "int32")
    state = {"token": ids, "active": ids > 0, "remaining_tokens": ids[0], "count": ids[0]}
    state |= {"stops": ids, "has_grammar": ids < 0}
    options = {"temperature": number, "top_k": 3 * ids[0], "uniform": number[None]}
    owned = []
    monkeypatch.setattr(
        torch_batch, "make_fx", lambda choose: owned.append(tracing._is_owned()) or make_fx(choose)
    )
    torch_batch._traced.cache_clear()
    torch_batch.make_choice(features, True, logits, state | options)
    assert owned == [True]


# === Hooks of torch and replaced methods, with which a step is not traced ===


def test_hook_of_gradients_leaves_steps_traced(hgrn2):
    """Samples during training are generated layer by layer because a hook reads gradients."""
    hgrn2.backbone.token_embedding.register_full_backward_hook(lambda *_: None)
    generate(hgrn2, (4,), 8)
    assert which_generation(hgrn2).name != "eager"


def add_hook_for_all_modules(layer):
    def flip(module, given, output):
        return output.flip(-1) if module is layer else output

    return torch.nn.modules.module.register_module_forward_hook(flip).remove


def replace_method(name):
    """Returns a function that replaces a method of a layer, and returns one that restores it."""

    def replace(layer):
        before = getattr(layer, name)
        setattr(layer, name, lambda *args, **kwargs: before(*args, **kwargs).flip(-1))
        return lambda: delattr(layer, name)

    return replace


# {change: a function that makes it, and returns a function that undoes it}
CHANGES = {
    "hook": lambda layer: layer.register_forward_hook(lambda _, x, y: y.flip(-1)).remove,
    "pre-hook": lambda layer: layer.register_forward_pre_hook(lambda _, x: (x[0].flip(-1),)).remove,
    "hook for all modules": add_hook_for_all_modules,
    "forward": replace_method("forward"),
    "call": replace_method("call"),
}


@pytest.mark.parametrize(
    ("sampler", "changes"), [("greedy", CHANGES), ("beam", ["hook"])], ids=["greedy", "beam"]
)
def test_hook_acts_at_each_token_until_its_removal(sampler, changes):
    """A traced step ignores a hook or a replaced method, or keeps its effect."""
    model, eager = (tiny_causal_lm(family="hgrn2") for _ in range(2))
    model.compile(sampler=sampler)
    eager.compile(sampler=sampler, run_eagerly=True)
    plain = generate(model, (4, 4), 12)["token_ids"]
    layers = [m.backbone.transformer_layers[1].mlp.down_proj for m in (model, eager)]
    for name in changes:
        undo = [CHANGES[name](layer) for layer in layers]
        found, expected = (generate(m, (4, 4), 12)["token_ids"] for m in (model, eager))
        mode = which_generation(model)
        for each in undo:
            each()
        np.testing.assert_array_equal(found, expected)
        assert not np.array_equal(found, plain)
        reason = "`down_proj` has a hook, or an instance attribute `call` or `forward`"
        if "all modules" in name:
            reason = "torch has a hook for all modules"
        assert (mode.name, mode.refused["traced"]) == ("eager", reason)
        np.testing.assert_array_equal(generate(model, (4, 4), 12)["token_ids"], plain)
        assert which_generation(model).name != "eager"
