"""The argmax kernels return the same index as `torch.argmax`."""

import keras
import pytest

if keras.config.backend() != "torch":
    pytest.skip("runs on torch", allow_module_level=True)

import torch

from keras_recurrent import implementation
from keras_recurrent.backends.triton import argmax as _argmax
from keras_recurrent.backends.triton._device.common import INTERPRETED
from keras_recurrent.models import SamplingParams
from tests.generation.token_samplers import token_sampler

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
def test_random_numbers(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    found(torch.randn(shape, generator=generator), dtype)


def test_the_first_of_several():
    many = torch.zeros(2, 5000)
    many[0, [4999, 2047, 2050]] = 1.0  # in three parts of a row
    assert found(many, torch.bfloat16) == [2047, 0]
    assert found(-many - 1.0) == [0, 0]


def test_numbers_that_are_none():
    rows = [[-INF, -INF, -INF], [0.0, NAN, INF], [-NAN, 1.0, NAN], [-INF, INF, INF]]
    assert found(rows) == [0, 1, 0, 1]
    assert found([[-1.0, -0.0, 0.0]]) == [1]


def test_rows_that_it_refuses():
    assert "got 0" in _argmax.unsupported(torch.zeros(1, 0, device=DEVICE))
    assert "got 3000000" in _argmax.unsupported(torch.zeros(1, 3_000_000, device=DEVICE))


def test_greedy_choices_are_made_by_it(monkeypatch):
    calls = []
    argmax = _argmax.argmax
    monkeypatch.setattr(_argmax, "argmax", lambda x: calls.append(x) or argmax(x))
    logits = torch.randn(2, 50, device=DEVICE)
    choice = token_sampler(SamplingParams(temperature=0), device=DEVICE)
    with implementation("triton"):
        chosen = choice(logits)
    assert len(calls) == 1
    with implementation("torch"):
        assert choice(logits).tolist() == chosen.tolist()
    assert len(calls) == 1


def test_greedy_choices_are_written_behind_others():
    recent = torch.arange(8, dtype=torch.int32, device=DEVICE).reshape(2, 4)
    expected, token = recent.clone(), recent[:, -1:].clone()
    choice = token_sampler(SamplingParams(temperature=0), device=DEVICE)
    for seed in range(3):
        logits = torch.randn(2, 5000, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        with implementation("triton"):
            assert choice.store_argmax(logits, token, recent)
        expected = torch.cat((expected[:, 1:], logits.argmax(dim=-1)[:, None]), dim=1)
        assert recent.tolist() == expected.tolist()
        assert token.tolist() == expected[:, -1:].tolist()


def test_others_are_not_written_by_it():
    token = torch.tensor([[3]], device=DEVICE)
    choice = token_sampler(SamplingParams(), 1, 5, device=DEVICE)
    with implementation("triton"):
        assert not choice.store_argmax(torch.zeros(1, 5, device=DEVICE), token, token.clone())
    assert token.item() == 3
