"""The argmax kernels return the same index as `torch.argmax`."""

from types import SimpleNamespace

import keras
import pytest

if keras.config.backend() != "torch":
    pytest.skip("runs on torch", allow_module_level=True)

import torch

from keras_recurrent import implementation
from keras_recurrent.backends.triton import argmax as _argmax
from keras_recurrent.backends.triton._device.common import INTERPRETED
from keras_recurrent.generation.sampling import features_of
from keras_recurrent.generation.torch.decoder import Decoder
from keras_recurrent.models import SamplingParams

if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs an NVIDIA GPU or Triton's interpreter", allow_module_level=True)

DEVICE = "cpu" if INTERPRETED else "cuda"
NAN, INF = float("nan"), float("inf")


def found(rows, dtype=torch.float32):
    x = torch.as_tensor(rows, dtype=dtype, device=DEVICE)
    assert _argmax.unsupported(x) is None
    index = _argmax.argmax(x)
    assert index.dtype == torch.int32
    expected = x.argmax(dim=-1)
    assert index.tolist() == expected.tolist()
    return index.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (2, 2048), (2, 2049), (1, 9001)])
def test_argmax_of_random_logits_matches_torch(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    found(torch.randn(shape, generator=generator), dtype)


def test_argmax_of_equal_logits_is_the_first_index():
    many = torch.zeros(2, 5000)
    many[0, [4999, 2047, 2050]] = 1.0  # in three parts of a row
    assert found(many, torch.bfloat16) == [2047, 0]
    assert found(-many - 1.0) == [0, 0]


def test_argmax_with_nan_is_the_first_nan():
    rows = [[-INF, -INF, -INF], [0.0, NAN, INF], [-NAN, 1.0, NAN], [-INF, INF, INF]]
    assert found(rows) == [0, 1, 0, 1]
    assert found([[-1.0, -0.0, 0.0]]) == [1]


def test_argmax_rejects_empty_and_too_long_rows():
    assert "got 0" in _argmax.unsupported(torch.zeros(1, 0, device=DEVICE))
    assert "got 3000000" in _argmax.unsupported(torch.zeros(1, 3_000_000, device=DEVICE))


def decode(logits, params, recent):
    """Returns the `Decoder` after steps with the given logits and `SamplingParams`."""
    logits, size = [t.to(DEVICE) for t in logits], len(recent)
    step = SimpleNamespace(masked=False, count=0, vocabulary_size=5000)
    tensors = {
        "token": recent[:, -1:].clone(),
        "active": torch.ones(size, 1, dtype=torch.bool, device=DEVICE),
        "remaining_tokens": torch.full((size,), 9, device=DEVICE),
        "count": torch.zeros(size, dtype=torch.int32, device=DEVICE),
        "stops": torch.full((size, 1), -1, device=DEVICE),
        "temperature": torch.ones(size, device=DEVICE),
        "recent": recent.clone(),
    }
    decoder = Decoder(step, lambda token: (logits.pop(0),), (), (), tensors, recent.shape[1])
    features = features_of([params], 5000)
    advance = decoder.prepare(features)
    while logits:
        advance()
    return decoder.tensors


def random_logits(count, size):
    return [
        torch.randn(size, 5000, generator=torch.Generator().manual_seed(seed))
        for seed in range(count)
    ]


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams()])
def test_kernel_of_decoding_steps_chooses_only_greedy_tokens(params, monkeypatch):
    """The kernel leaves out a token, or overwrites those of sampling."""
    calls, write = [], _argmax.write_argmax
    monkeypatch.setattr(_argmax, "write_argmax", lambda *x: calls.append(x) or write(*x))
    recent = torch.arange(8, dtype=torch.int32, device=DEVICE).reshape(2, 4)
    found = []
    for name in ("triton", "torch"):
        with implementation(name):
            found.append(decode(random_logits(3, 2), params, recent))
    assert len(calls) == (3 if params.is_greedy else 0)
    for name in ("token", "recent"):
        assert found[0][name].tolist() == found[1][name].tolist()
    assert found[0]["recent"][:, -1:].tolist() == found[0]["token"].tolist()
    if params.is_greedy:
        expected = torch.stack([t.argmax(dim=-1) for t in random_logits(3, 2)], dim=1)
        assert found[0]["recent"].tolist() == torch.cat((recent[:, 3:].cpu(), expected), 1).tolist()
