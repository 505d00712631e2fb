"""The NVIDIA GPU of the running backend."""

import keras


def has_gpu():
    if keras.config.backend() == "torch":
        import torch

        return torch.cuda.is_available()
    if keras.config.backend() == "jax":
        import jax

        return jax.default_backend() == "gpu"
    return False
