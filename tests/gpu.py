"""What the running backend's NVIDIA GPU is, and can."""

import functools

import keras
import numpy as np
import pytest


def has_gpu():
    if keras.config.backend() == "torch":
        import torch

        return torch.cuda.is_available()
    if keras.config.backend() == "jax":
        import jax

        return jax.default_backend() == "gpu"
    return False


@functools.cache
def _int8_products_are_right():
    a, b = np.full((8, 10), 100, "int8"), np.full((10, 12), 100, "int8")
    return (keras.ops.convert_to_numpy(keras.ops.matmul(a, b)) == 100_000).all()


def needs_int8_products():
    """Skips where int8 products are wrong: XLA's on CUDA are, by widths not divisible by 4."""
    if not _int8_products_are_right():
        pytest.skip("the backend multiplies int8 matrices of 10 channels wrongly")
