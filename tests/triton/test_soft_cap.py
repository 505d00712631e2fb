"""The soft cap of a step's logits, as Keras's layer makes it."""

import keras
import pytest

if keras.config.backend() != "torch":
    pytest.skip("runs on torch", allow_module_level=True)

import torch

from keras_recurrent import dispatch, implementation
from keras_recurrent.backends.triton import soft_cap as _soft_cap
from keras_recurrent.backends.triton._device.common import INTERPRETED
from keras_recurrent.layers.decoding import decoding_scope
from keras_recurrent.layers.reversible_embedding import reversible_embedding

if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs an NVIDIA GPU or Triton's interpreter", allow_module_level=True)

DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.mark.parametrize("cap", [30.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_soft_cap_matches_torch(dtype, cap):
    """On a GPU the bits of torch; the interpreter has no libdevice and cuts off bfloat16."""
    x = torch.linspace(-200, 200, 6003).reshape(3, 2001).to(DEVICE, dtype)
    found, expected = _soft_cap.soft_cap(x, cap), torch.tanh(x / cap) * cap
    assert found.dtype == dtype
    tolerance = 0 if not INTERPRETED else 1e-6 if dtype == torch.float32 else 2**-5
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * 1e-3)


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("tie_weights", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_decoding_step_uses_soft_cap(dtype, tie_weights, cap, monkeypatch):
    calls, soft_cap = [], _soft_cap.soft_cap
    recorded = soft_cap._replace(function=lambda **a: calls.append(a) or soft_cap(**a))
    monkeypatch.setitem(dispatch.IMPLEMENTATIONS["soft_cap"], "triton", recorded)
    layer = reversible_embedding(61, 16, tie_weights, cap, dtype)
    layer.build()
    hidden_states = keras.random.normal((2, 1, 16), dtype=layer.compute_dtype, seed=0)
    with torch.no_grad(), implementation("triton"):
        expected = layer(hidden_states, reverse=True)
        assert not calls  # this is no step of generation
        with decoding_scope():
            found = layer(hidden_states, reverse=True)
    assert len(calls) == (cap is not None)
    assert found.dtype == expected.dtype
    tolerance = 2**-5 if dtype == "mixed_bfloat16" else 1e-6
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
