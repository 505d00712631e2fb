"""Models with Triton kernels on an NVIDIA GPU, compared with models without kernels."""

import contextlib
import hashlib
import json
import sys

import keras
import numpy as np
import pytest

import keras_recurrent
from tests.gpu import has_gpu
from tests.models import plain_generation
from tests.models.test_generation import MARGIN, ragged
from tests.models.tiny import VOCABULARY, any_family, tiny_causal_lm
from tests.processes import fresh_process

BACKEND = keras.config.backend()


if not has_gpu():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

BATCH, LENGTH, STEPS = 4, 70, 3


def train(family, dtype, rematerialized=False):
    """Returns the losses of a few steps of `fit`, and the weights."""
    scope = keras.RematScope("full") if rematerialized else contextlib.nullcontext()
    with scope:
        model = tiny_causal_lm(family=family, dtype=dtype)
    model.compile(keras.optimizers.SGD(0.02), model.loss)
    rng = np.random.default_rng(0)
    token_ids = rng.integers(1, VOCABULARY, (BATCH, LENGTH)).astype("int32")
    mask = np.arange(LENGTH) < np.array([[LENGTH], [LENGTH - 1], [33], [5]])
    x, y = {"token_ids": token_ids, "padding_mask": mask}, np.roll(token_ids, -1, 1)
    weights = mask.astype("float32")
    # Shuffled sequences would be added in another order.
    history = model.fit(
        x, y, sample_weight=weights, batch_size=BATCH, epochs=STEPS, shuffle=False, verbose=0
    )
    return history.history["loss"], [keras.ops.convert_to_numpy(w) for w in model.weights]


@any_family
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_fit_with_kernels_has_the_losses_without_kernels(family, dtype):
    found, _ = train(family, dtype)
    with keras_recurrent.implementation(BACKEND):
        expected, _ = train(family, dtype)
    assert expected[-1] < expected[0]
    np.testing.assert_allclose(found, expected, rtol={"float32": 1e-4}.get(dtype, 1e-2))


@any_family
def test_fit_with_rematerialization_has_the_losses_without_it(family):
    found, _ = train(family, "mixed_bfloat16", rematerialized=True)
    expected, _ = train(family, "mixed_bfloat16")
    np.testing.assert_allclose(found, expected, rtol=1e-3)


@any_family
def test_generate_with_kernels_has_the_tokens_of_forward_passes(family):
    model = tiny_causal_lm(family=family)
    model.compile(sampler="greedy")
    prompt, given = ragged(5, 9, 6)
    found = model.generate({"token_ids": prompt, "padding_mask": given}, stop_token_ids=None)
    with keras_recurrent.implementation(BACKEND):
        plain = tiny_causal_lm(family=family)
        plain.compile(sampler="greedy")
        expected, margin = plain_generation.sample(plain, plain.sampler, prompt, given)
    assert margin > MARGIN
    np.testing.assert_array_equal(found["token_ids"], expected)


@any_family
def test_fit_is_bit_identical_in_two_processes(family, tmp_path):
    """A kernel is non-deterministic, or depends on empty caches of the first process.

    By default, XLA adds gradients of embeddings in any order, and chooses matrix products by their
    measured times.
    """
    environment = {
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax"),
        "XLA_FLAGS": "--xla_gpu_deterministic_ops=true",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    empty, full = (fresh_process("-m", __name__, family, **environment) for _ in range(2))
    assert empty[0] == empty[1] == full[0] == full[1]


def digest(family):
    losses, weights = train(family, "mixed_bfloat16")
    bits = hashlib.sha256(b"".join(w.astype("float32").tobytes() for w in weights))
    return [*losses, bits.hexdigest()]


if __name__ == "__main__":
    if BACKEND == "torch":
        import torch

        torch.use_deterministic_algorithms(True)
    print(json.dumps([digest(sys.argv[1]) for _ in range(2)]))
