"""`autotune` refuses backends and devices without tunable kernels; its search: tests/triton."""

import keras
import pytest

import keras_recurrent
from keras_recurrent import dispatch


def autotune_error():
    with pytest.raises(NotImplementedError) as error, keras_recurrent.autotune():
        pass
    return str(error.value)


@pytest.mark.skipif(keras.config.backend() == "torch", reason="torch has kernels to search")
def test_autotune_on_another_backend_raises():
    assert f"here Keras runs on {keras.config.backend()!r}" in autotune_error()


@pytest.mark.skipif(keras.config.backend() != "torch", reason="runs on torch")
def test_autotune_without_a_gpu_raises(monkeypatch):
    import torch

    from keras_recurrent.backends.triton._runtime import torch_operators

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch_operators, "INTERPRETED", True)
    assert "here TRITON_INTERPRET=1 runs" in autotune_error()
    monkeypatch.setattr(torch_operators, "INTERPRETED", False)
    assert "here torch finds no NVIDIA GPU" in autotune_error()
    missing = "the package `triton` is not installed"
    monkeypatch.setitem(dispatch.IMPLEMENTATIONS["linear_scan"], "triton", missing)
    assert f"here {missing}" in autotune_error()
