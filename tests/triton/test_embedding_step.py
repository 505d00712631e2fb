"""The embeddings of a step's tokens, as Keras's layer makes them."""

import keras
import numpy as np
import pytest

if keras.config.backend() != "torch":
    pytest.skip("runs on torch", allow_module_level=True)

import torch

from keras_recurrent import dispatch, implementation
from keras_recurrent.backends.torch._states import inplace_states
from keras_recurrent.backends.triton import embedding_step as _embedding
from keras_recurrent.backends.triton._device.common import INTERPRETED
from keras_recurrent.layers.decoding import decoding_scope
from keras_recurrent.layers.tokens import find_tokens
from tests.models.tiny import tiny_causal_lm

if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs an NVIDIA GPU or Triton's interpreter", allow_module_level=True)

DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.mark.parametrize("of_table", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("width", "scale"), [(6, 1.0), (512, 1.0), (700, 50.596)])
def test_embedding_step_matches_embedding_layer(width, scale, dtype, of_table):
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(11, width, generator=generator).to(DEVICE, of_table)
    tokens = torch.tensor([0, 10, 3, -1], dtype=torch.int32, device=DEVICE)
    found, *places = _embedding.embedding_step(table, tokens, scale=scale, dtype=dtype)
    assert places == [None] * 4
    as_given = getattr(torch, dtype)
    expected = table[tokens.long()].to(as_given)
    # Of a number in the dtype of x, torch rounds on a CPU as on a GPU.
    assert_equal(found, expected * torch.tensor(scale, dtype=as_given).item())


def assert_equal(found, expected):
    """Asserts equal bits; the interpreter truncates to bfloat16 instead of rounding."""
    cut = 2**-6 if INTERPRETED and found.dtype == torch.bfloat16 else 0
    torch.testing.assert_close(found, expected, rtol=cut, atol=0)


@pytest.mark.parametrize("uses_position", [False, True])
def test_embedding_step_positions_match_tokens_of_layers(uses_position):
    token_ids, segment, position = (
        torch.tensor(n, dtype=torch.int32, device=DEVICE)
        for n in ([[1]] * 3, [-1, 0, 4], [0, 7, 2])
    )
    state = {"segment": segment, **({"position": position} if uses_position else {})}
    expected, places = find_tokens(
        token_ids, state=state, uses_position=uses_position, return_state=True
    )
    table = torch.ones(2, 600, device=DEVICE)
    _, kind, here, *after = _embedding.embedding_step(
        table, token_ids[:, 0], segment, state.get("position")
    )
    assert_equal(kind[:, None], expected.kind)
    assert here is None or torch.equal(here, position)
    for found, name in zip(after, ("segment", "position"), strict=True):
        assert (found is None) == (name not in places)
        if found is not None:
            assert_equal(found, places[name])


@pytest.mark.parametrize("uses_position", [False, True])
def test_embedding_step_updates_state_in_place_where_allowed(uses_position):
    segment = torch.tensor([-1, 4], dtype=torch.int32, device=DEVICE)
    position = torch.tensor([0, 7], dtype=torch.int32, device=DEVICE)
    given = segment, position if uses_position else None
    table, tokens = torch.ones(3, 600, device=DEVICE), torch.tensor([2, 0], device=DEVICE)
    expected = _embedding.embedding_step(table, tokens, *given)
    assert segment.tolist() == [-1, 4]
    with inplace_states():
        found = _embedding.embedding_step(table, tokens, *given)
    for a, b in zip(found, expected, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    assert found[3] is segment
    assert segment.tolist() == [0, 4]
    assert found[4] is given[1]
    assert position.tolist() == ([1, 8] if uses_position else [0, 7])


@pytest.fixture
def launches(monkeypatch):
    found, embedding = [], _embedding.embedding_step
    recorded = embedding._replace(function=lambda **a: found.append(a) or embedding(**a))
    monkeypatch.setitem(dispatch.IMPLEMENTATIONS["embedding_step"], "triton", recorded)
    return found


def embedded(model, token_ids):
    token_ids = keras.ops.convert_to_tensor(np.array(token_ids, "int32"))
    with implementation("triton"), torch.no_grad():
        return model.backbone.embed(token_ids)


@pytest.mark.parametrize("family", ["hgrn2", "griffin"])
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_decoding_step_uses_embedding_step(family, dtype, launches):
    scale = {"embedding_scale": 2.0} if family == "griffin" else {}
    model = tiny_causal_lm(family=family, num_layers=1, dtype=dtype, **scale)
    plain = embedded(model, [[3], [0]])
    assert not launches  # this is no step of generation
    with decoding_scope():
        found = embedded(model, [[3], [0]])
        embedded(model, [[3, 4]])
    assert len(launches) == 1
    assert_equal(found, plain)


@pytest.mark.parametrize("change", ["lora", "call", "quantized"])
def test_decoding_step_without_embedding_step(change, launches):
    model = tiny_causal_lm(family="hgrn2", num_layers=1)
    layer = model.backbone.token_embedding
    if change == "lora":
        layer.enable_lora(2)
    elif change == "call":
        layer.call = layer.call
    else:
        layer.quantize("int8")
    plain = embedded(model, [[3]])
    with decoding_scope():
        assert torch.equal(embedded(model, [[3]]), plain)
    assert not launches
