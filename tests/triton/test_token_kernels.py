"""Kernels for the tokens of a decoding step: argmax, largest logits, soft cap and embeddings."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest

if keras.config.backend() != "torch":
    pytest.skip("runs on torch", allow_module_level=True)

import torch

from keras_recurrent import dispatch, implementation
from keras_recurrent.backends.torch._states import inplace_states
from keras_recurrent.backends.triton._device.common import INTERPRETED
from keras_recurrent.backends.triton.argmax import write_argmax
from keras_recurrent.generation.sampling import features_of
from keras_recurrent.generation.torch_batch import Decoder
from keras_recurrent.layers.decoding import decoding_scope
from keras_recurrent.layers.reversible_embedding import reversible_embedding
from keras_recurrent.layers.tokens import compute_tokens
from keras_recurrent.models import SamplingParams
from tests.models.tiny import tiny_causal_lm
from tests.ops import judge, native
from tests.ops.native import DEVICE, tensor

if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs an NVIDIA GPU or Triton's interpreter", allow_module_level=True)

NAN, INF = float("nan"), float("inf")
DTYPES = ("float32", "bfloat16", "float16")
TIES, TILES_OF_INF = np.zeros((2, 5000)), np.full((2, 5000), -INF)
TIES[0, [4999, 2047, 2050]] = 1  # in three parts of a row
TILES_OF_INF[0, [4999, 3000]], TILES_OF_INF[1] = (1, 2), -3
EVEN = np.full((2, 628), 0x55, "uint8")  # masks, with padding, of even tokens
EVEN[1] = 0
NONFINITE = [[-INF, -INF, -INF], [0, NAN, INF], [-NAN, 1, NAN], [-INF, INF, INF], [-1, -0.0, 0]]


def random_logits(*shape, seed=0):
    return 10 * np.random.default_rng(seed).normal(size=shape)


# {name: operation, logits, options, dtype}; in 16 bits, many random logits of a row are equal.
CHOICES = {
    "argmax, ties": ("argmax", TIES, {}, "bfloat16"),
    "argmax, equal logits": ("argmax", -TIES - 1, {}, "float32"),
    "argmax, NaN": ("argmax", NONFINITE, {}, "float32"),
    "argmax, masks": ("argmax", TIES, {"masks": EVEN}, "bfloat16"),
    "top_logits, tiles of -inf": ("top_logits", TILES_OF_INF, {"count": 4}, "float32"),
    "top_logits, NaN": ("top_logits", [[0, NAN, 1, NAN]], {"count": 3}, "float32"),
    **{
        f"argmax, {shape}, {dtype}": ("argmax", random_logits(*shape), {}, dtype)
        for shape in ((1, 1), (3, 17), (2, 2048), (2, 2049), (1, 9001))
        for dtype in DTYPES
    },
    **{
        f"top_logits, {shape}, {dtype}": (
            *("top_logits", random_logits(*shape), {"count": count}, dtype),
        )
        for shape, count in (((1, 1), 1), ((3, 17), 16), ((2, 4100), 8))
        for dtype in DTYPES[:2]
    },
}


@pytest.mark.parametrize("name", CHOICES)
def test_kernel_of_logits_matches_definition(name):
    """A token is chosen wrongly among ties, tiles, infinities or NaN."""
    operation, logits, options, dtype = CHOICES[name]
    x = tensor(logits, dtype)
    given = {n: tensor(o, "uint8") if n == "masks" else o for n, o in options.items()}
    results = keras.tree.flatten(dispatch.run(operation, {"x": x, **given}, "triton"))
    definition = getattr(judge.module_of(operation, "reference"), operation)
    expected = keras.tree.flatten(definition(native.to_numpy(x), **options))
    for i, (result, array) in enumerate(zip(results, expected, strict=True)):
        assert native.dtype(result) == ("int32" if array.dtype == "int32" else "float32")
        tolerance = 1e-6 if i == 2 else 0  # of the logarithm of a sum
        np.testing.assert_allclose(result.cpu(), array, rtol=tolerance, atol=tolerance)


# {name: operation, float arrays, options, dtype of the arrays}
ROUNDED = {
    f"soft_cap of {cap}, {dtype}": (
        *("soft_cap", {"x": np.linspace(-200, 200, 6003).reshape(3, 2001)}, {"cap": cap}, dtype),
    )
    for cap in (30.0, 0.7)
    for dtype in DTYPES[:2]
} | {
    f"embedding_step of {width}, {table_dtype}, {dtype}": (
        "embedding_step",
        {"table": random_logits(11, width)},
        {"token_ids": tensor([0, 10, 3, -1], "int32"), "scale": scale, "dtype": dtype},
        table_dtype,
    )
    for width, scale in ((6, 1.0), (512, 1.0), (700, 50.596))
    for dtype in DTYPES[:2]
    for table_dtype in DTYPES[:2]
}


@pytest.mark.parametrize("name", ROUNDED)
def test_elementwise_kernel_equals_torch(name):
    """A kernel rounds elsewhere than plain torch, so that decoding differs from a forward pass."""
    operation, arrays, options, dtype = ROUNDED[name]
    arguments = {n: tensor(array, dtype) for n, array in arrays.items()} | options
    results, expected = (
        keras.tree.flatten(dispatch.run(operation, arguments, name)) for name in ("triton", "torch")
    )
    for result, wanted in zip(results, expected, strict=True):
        assert_equal(result, wanted, is_tanh=operation == "soft_cap")


def assert_equal(result, expected, is_tanh=False):
    """Asserts equal bits on a GPU. The interpreter truncates bfloat16, and has another tanh."""
    if expected is None:
        assert result is None
        return
    tolerance = 0
    if INTERPRETED and expected.dtype == torch.bfloat16:
        tolerance = 2**-5 if is_tanh else 2**-6
    elif INTERPRETED and is_tanh:
        tolerance = 1e-6
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance * 1e-3 * is_tanh)


@pytest.fixture
def launches(monkeypatch):
    """The arguments of the calls of a Triton kernel: `launches(operation)` is a list of them."""

    def record(operation):
        calls, kernel = [], dispatch.IMPLEMENTATIONS[operation]["triton"]
        recorded = kernel._replace(function=lambda **a: calls.append(a) or kernel(**a))
        monkeypatch.setitem(dispatch.IMPLEMENTATIONS[operation], "triton", recorded)
        return calls

    return record


def decode(logits, params, recent):
    """Returns the `Decoder` after steps with the given logits and `SamplingParams`."""
    logits, size = [tensor(t, "float32") for t in logits], len(recent)
    step = SimpleNamespace(masked=False, count=0, vocabulary_size=5000)
    tensors = {
        "token": recent[:, -1:].clone(),
        "active": torch.ones(size, 1, dtype=torch.bool, device=DEVICE),
        "remaining_tokens": torch.full((size,), 9, device=DEVICE),
        "count": torch.zeros(size, dtype=torch.int32, device=DEVICE),
        "stops": torch.full((size, 1), -1, device=DEVICE),
        "has_grammar": torch.zeros(size, 1, dtype=torch.bool, device=DEVICE),
        "temperature": torch.ones(size, device=DEVICE),
        "recent": recent.clone(),
    }
    decoder = Decoder(step, lambda token: (logits.pop(0),), (), tensors, recent.shape[1])
    decoder.cache = []
    advance = decoder.prepare(features_of([params], 5000))
    while logits:
        advance()
    return decoder.tensors


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams()])
def test_kernel_of_decoding_steps_chooses_only_greedy_tokens(params, monkeypatch):
    """The kernel leaves out a token, or overwrites those of sampling."""
    calls = []
    monkeypatch.setattr(
        "keras_recurrent.backends.triton.argmax.write_argmax",
        lambda *arguments: calls.append(arguments) or write_argmax(*arguments),
    )
    recent = torch.arange(8, dtype=torch.int32, device=DEVICE).reshape(2, 4)
    logits, found = [random_logits(2, 5000, seed=seed) for seed in range(3)], []
    for name in ("triton", "torch"):
        with implementation(name):
            found.append(decode(logits, params, recent))
    assert len(calls) == (3 if params.is_greedy else 0)
    for name in ("token", "recent"):
        assert found[0][name].tolist() == found[1][name].tolist()
    assert found[0]["recent"][:, -1:].tolist() == found[0]["token"].tolist()
    if params.is_greedy:
        expected = np.stack([t.argmax(-1) for t in logits], axis=1)
        assert found[0]["recent"][:, 1:].tolist() == expected.tolist()


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("tie_weights", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_decoding_step_uses_soft_cap(dtype, tie_weights, cap, launches):
    calls = launches("soft_cap")
    layer = reversible_embedding(61, 16, tie_weights, cap, dtype)
    layer.build()
    hidden_states = keras.random.normal((2, 1, 16), dtype=layer.compute_dtype, seed=0)
    with torch.no_grad(), implementation("triton"):
        expected = layer(hidden_states, reverse=True)
        assert not calls  # A call outside of generation is no decoding step.
        with decoding_scope():
            found = layer(hidden_states, reverse=True)
    assert len(calls) == (cap is not None)
    tolerance = 2**-5 if dtype == "mixed_bfloat16" else 1e-6
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("uses_position", [False, True])
def test_embedding_step_positions_match_tokens_of_layers(uses_position):
    token_ids, segment, position = (
        tensor(array, "int32") for array in ([[1]] * 3, [-1, 0, 4], [0, 7, 2])
    )
    state = {"segment": segment, **({"position": position} if uses_position else {})}
    expected, token_state = compute_tokens(
        token_ids, state=state, uses_position=uses_position, return_state=True
    )
    arguments = {"table": torch.ones(2, 600, device=DEVICE), "token_ids": token_ids[:, 0], **state}
    _, kind, here, *after = dispatch.run("embedding_step", arguments, "triton")
    assert torch.equal(kind[:, None], expected.kind)
    assert here is None or torch.equal(here, position)
    for found, name in zip(after, ("segment", "position"), strict=True):
        assert_equal(found, token_state.get(name))


@pytest.mark.parametrize("uses_position", [False, True])
def test_embedding_step_updates_state_in_place_where_allowed(uses_position):
    state = {"segment": tensor([-1, 4], "int32"), "position": tensor([0, 7], "int32")}
    before = {name: array.tolist() for name, array in state.items()}
    given = state if uses_position else {"segment": state["segment"]}
    table = torch.ones(3, 600, device=DEVICE)
    arguments = {"table": table, "token_ids": tensor([2, 0], "int64"), **given}
    expected = dispatch.run("embedding_step", arguments, "triton")
    assert {name: array.tolist() for name, array in state.items()} == before
    with inplace_states():
        found = dispatch.run("embedding_step", arguments, "triton")
    for result, wanted in zip(found, expected, strict=True):
        assert_equal(result, wanted)
    assert found[3] is state["segment"]
    assert found[4] is given.get("position")
    after = {"segment": [0, 4], "position": [1, 8] if uses_position else [0, 7]}
    assert {name: array.tolist() for name, array in state.items()} == after


def embed(model, token_ids):
    with implementation("triton"), torch.no_grad():
        return model.backbone.embed(tensor(token_ids, "int32"))


@pytest.mark.parametrize("family", ["hgrn2", "griffin"])
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_decoding_step_uses_embedding_step(family, dtype, launches):
    calls = launches("embedding_step")
    scale = {"embedding_scale": 2.0} if family == "griffin" else {}
    model = tiny_causal_lm(family=family, num_layers=1, dtype=dtype, **scale)
    plain = embed(model, [[3], [0]])
    assert not calls  # A call outside of generation is no decoding step.
    with decoding_scope():
        found = embed(model, [[3], [0]])
        embed(model, [[3, 4]])
    assert len(calls) == 1
    assert_equal(found, plain)


@pytest.mark.parametrize("change", ["lora", "call", "quantized"])
def test_decoding_step_without_embedding_step(change, launches):
    calls = launches("embedding_step")
    model = tiny_causal_lm(family="hgrn2", num_layers=1)
    layer = model.backbone.token_embedding
    if change == "lora":
        layer.enable_lora(2)
    elif change == "call":
        layer.call = layer.call
    else:
        layer.quantize("int8")
    plain = embed(model, [[3]])
    with decoding_scope():
        assert torch.equal(embed(model, [[3]]), plain)
    assert not calls
