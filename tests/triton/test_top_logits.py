"""The kernels of `top_logits` return what its definition does, also for ties, -inf and NaN."""

import keras
import numpy as np
import pytest

if keras.config.backend() != "torch":
    pytest.skip("runs on torch", allow_module_level=True)

import torch

from keras_recurrent.backends.reference.top_logits import top_logits as definition
from keras_recurrent.backends.triton import top_logits as _top_logits
from keras_recurrent.backends.triton._device.common import INTERPRETED

if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs an NVIDIA GPU or Triton's interpreter", allow_module_level=True)

DEVICE = "cpu" if INTERPRETED else "cuda"
NAN, INF = float("nan"), float("inf")


def check(x, count, dtype=torch.float32):
    x = torch.as_tensor(x).to(DEVICE, dtype)
    assert _top_logits.unsupported(x, count) is None
    found = [t.cpu().numpy() for t in _top_logits.top_logits(x, count)]
    values, indices, log_sum = definition(x.cpu().float().numpy(), count)
    np.testing.assert_array_equal(found[0], values)
    np.testing.assert_array_equal(found[1], indices)
    np.testing.assert_allclose(found[2], log_sum, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "count"), [((1, 1), 1), ((3, 17), 16), ((2, 4100), 8)])
def test_top_logits_of_random_logits_match_torch(shape, count, dtype):
    """In bfloat16, many logits of a row are equal."""
    check(10 * torch.randn(shape, generator=torch.Generator().manual_seed(0)), count, dtype)


def test_top_logits_with_parts_of_minus_infinity():
    x = torch.full((2, 5000), -INF)
    x[0, [4999, 3000]] = torch.tensor([1.0, 2.0])
    x[1] = -3.0
    check(x, 4)


def test_top_logits_with_nan():
    x = torch.tensor([[0.0, NAN, 1.0, NAN]], device=DEVICE)
    values, indices, log_sum = _top_logits.top_logits(x, 3)
    assert indices.tolist() == [[1, 3, 2]]
    assert values[0, :2].isnan().all()
    assert values[0, 2] == 1
    assert log_sum.isnan().all()


def test_top_logits_rejects_counts_and_lengths():
    x = torch.zeros(1, 10, device=DEVICE)
    assert "got 17" in _top_logits.unsupported(torch.zeros(1, 20, device=DEVICE), 17)
    assert "got 10" in _top_logits.unsupported(x, 12)
    assert "got 600000" in _top_logits.unsupported(torch.zeros(1, 600_000, device=DEVICE), 16)
