"""Asserts that operations under `keras.distribution` on eight simulated devices match one device.

Arguments: "linear_crossentropy", or an implementation, "pallas" or "triton", and distributions,
"data" or "model" (default: both). Pallas kernels run in its general interpreter: the one for TPUs
makes devices wait for each other, and has too few threads for eight of them on two cores.
"""

import functools
import sys

import jax
import keras
import numpy as np
from jax.experimental import pallas as pl

from keras_recurrent import ops
from keras_recurrent.backends.jax import linear_crossentropy as plain

B, T, D = 8, 20, 256
DISTRIBUTIONS = {
    "data": lambda mesh: keras.distribution.DataParallel(devices=jax.devices()),
    "model": lambda mesh: keras.distribution.ModelParallel(
        layout_map=keras.distribution.LayoutMap(mesh), batch_dim_name="batch"
    ),
}


def relative_error(results, expected):
    errors = [np.abs(r - e).max() / np.abs(e).max() for r, e in zip(results, expected, strict=True)]
    return float(max(errors))


def rg_lru(x, logit, mask, implementation=None):
    gate = 0.5 * x
    h, state = ops.rg_lru(x, gate, gate * 2, logit, mask=mask, implementation=implementation)
    return ((h * mask[:, :, None]) ** 2).sum() + state.sum()


def attention(x, key, mask, implementation=None):
    """The four heads share one key: heads are split over devices, the key is not."""
    q, k = x.reshape(B, T, 4, -1) / 8, key.reshape(B, T, 1, -1)
    output, _ = ops.sliding_window_attention(
        q, k, 0.5 * k, sliding_window=6, mask=mask, implementation=implementation
    )
    return ((output * mask[:, :, None, None]) ** 2).sum()


def draw():
    """{operation: its loss, its arrays, and how `ModelParallel` splits them}"""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(B, T, D)).astype("float32")
    logit = rng.normal(size=D).astype("float32")
    mask = rng.random((B, T)) < 0.9
    key = rng.normal(size=(B, T, D // 4)).astype("float32")
    x_split, batch_split = jax.P("batch", None, "model"), jax.P("batch")
    return {
        "rg_lru": (rg_lru, (x, logit, mask), (x_split, jax.P("model"), batch_split)),
        "attention": (attention, (x, key, mask), (x_split, batch_split, batch_split)),
    }


# The part of the first tensor that a device has.
SHARDS = {"data": (1, T, D), "model": (2, T, D // 2)}


def check_kernels(implementation, *distributions):
    """Gradients are close, and no shards are gathered."""
    drawn = draw()
    expected = {
        name: jax.grad(loss, (0, 1))(*arrays, "jax") for name, (loss, arrays, _) in drawn.items()
    }
    pl.pallas_call = functools.partial(pl.pallas_call, interpret=True)
    for name in distributions or DISTRIBUTIONS:
        device_mesh = keras.distribution.DeviceMesh((4, 2), ("batch", "model"))
        distribution = DISTRIBUTIONS[name](device_mesh)
        mesh = distribution.device_mesh.backend_mesh
        for operation, (loss, arrays, specs) in drawn.items():
            if name == "data":
                specs = [jax.P(*(axis if axis == "batch" else None for axis in s)) for s in specs]
            shards = [
                jax.device_put(array, jax.NamedSharding(mesh, spec))
                for array, spec in zip(arrays, specs, strict=True)
            ]
            gradients = functools.partial(jax.grad(loss, (0, 1)), implementation=implementation)
            with distribution.scope():
                program = jax.jit(gradients).lower(*shards).compile()
                results = program(*shards)
            error = relative_error(results, expected[operation])
            assert error < (1e-6 if implementation == "triton" else 1e-5), (operation, name, error)
            assert " all-gather" not in program.as_text(), (operation, name)
            assert results[0].addressable_shards[0].data.shape == SHARDS[name]


def draw_loss(vocabulary):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 22, 8)).astype("float32")
    embedding = rng.normal(size=(vocabulary, 8)).astype("float32")
    weights = rng.random((8, 22)) * (rng.random((8, 22)) < 0.7)
    tokens = np.where(weights == 0, -100, rng.integers(0, vocabulary, (8, 22)))
    return x, embedding, weights.astype("float32"), tokens.astype("int32")


def compute_loss(x, embedding, weights, tokens, reduction):
    """The loss and its gradients, and the best tokens."""

    def loss(x, embedding, weights):
        losses, best = ops.linear_crossentropy(
            x, embedding, tokens, weights, soft_cap=2.0, reduction=reduction
        )
        return (losses * np.float32(0.5)).sum(), (losses, best)

    function = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
    (_, (losses, best)), gradients = jax.jit(function)(x, embedding, weights)
    return [np.asarray(a) for a in (losses, *gradients)], np.asarray(best)


def check_linear_crossentropy():
    """The loss, in chunks of 8 tokens, and its gradients are close, and the best tokens equal."""
    plain.CROSSENTROPY_CHUNK = 8
    meshes = {"all": (2, 2, 2), "rows": (8, 1, 1), "vocabulary": (1, 1, 8)}
    devices = keras.distribution.list_devices()
    for reduction in ("sum", None):
        for name, vocabulary in {"divisible": 48, "indivisible": 47}.items():
            arrays = draw_loss(vocabulary)
            expected, best = compute_loss(*arrays, reduction)
            for split, sizes in meshes.items():
                mesh = keras.distribution.DeviceMesh(sizes, ("batch", "sequence", "model"), devices)
                layout_map = keras.distribution.LayoutMap(mesh)
                with keras.distribution.ModelParallel(layout_map=layout_map).scope():
                    results, split_best = compute_loss(*arrays, reduction)
                assert relative_error(results, expected) < 2e-6, (reduction, name, split)
                np.testing.assert_array_equal(split_best, best)


if __name__ == "__main__":
    if sys.argv[1] == "linear_crossentropy":
        check_linear_crossentropy()
    else:
        check_kernels(*sys.argv[1:])
