"""Operations under `keras.distribution` on eight simulated devices. Prints JSON.

A process of its own, for it has eight devices. Its arguments name the implementation, whose kernels
are interpreted, and distributions. Those of Pallas run in its general interpreter: that for TPU
makes its devices wait for each other, and has too few threads for it on two cores.
"""

import functools
import json
import sys

import jax
import keras
import numpy as np
from jax.experimental import pallas as pl

from keras_recurrent import ops

B, T, D = 8, 20, 256
DISTRIBUTIONS = {
    "data": lambda mesh: keras.distribution.DataParallel(devices=jax.devices()),
    "model": lambda mesh: keras.distribution.ModelParallel(
        layout_map=keras.distribution.LayoutMap(mesh), batch_dim_name="batch"
    ),
}


def rg_lru(x, logit, mask, implementation=None):
    gate = 0.5 * x
    h, state = ops.rg_lru(x, gate, gate * 2, logit, mask=mask, implementation=implementation)
    return ((h * mask[:, :, None]) ** 2).sum() + state.sum()


def attention(x, key, mask, implementation=None):
    """Of four heads that share a key: they are split, and it is not."""
    q, k = x.reshape(B, T, 4, -1) / 8, key.reshape(B, T, 1, -1)
    output, _ = ops.sliding_window_attention(
        q, k, 0.5 * k, sliding_window=6, mask=mask, implementation=implementation
    )
    return ((output * mask[:, :, None, None]) ** 2).sum()


def draw():
    """{operation: its loss, tensors, and where `ModelParallel` splits channels}"""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(B, T, D)).astype("float32")
    logit = rng.normal(size=D).astype("float32")
    mask = rng.random((B, T)) < 0.9
    key = rng.normal(size=(B, T, D // 4)).astype("float32")
    of_x, of_mask = jax.P("batch", None, "model"), jax.P("batch")
    return {
        "rg_lru": (rg_lru, (x, logit, mask), (of_x, jax.P("model"), of_mask)),
        "attention": (attention, (x, key, mask), (of_x, jax.P("batch"), of_mask)),
    }


def main(implementation, *distributions):
    drawn = draw()
    expected = {
        name: jax.grad(loss, (0, 1))(*given, "jax") for name, (loss, given, _) in drawn.items()
    }
    pl.pallas_call = functools.partial(pl.pallas_call, interpret=True)
    reports = {}
    for name in distributions or DISTRIBUTIONS:
        device_mesh = keras.distribution.DeviceMesh((4, 2), ("batch", "model"))
        distribution = DISTRIBUTIONS[name](device_mesh)
        mesh = distribution.device_mesh.backend_mesh
        for operation, (loss, given, specs) in drawn.items():
            if name == "data":
                specs = [jax.P(*(axis if axis == "batch" else None for axis in s)) for s in specs]
            shards = [
                jax.device_put(a, jax.NamedSharding(mesh, spec))
                for a, spec in zip(given, specs, strict=True)
            ]
            gradients = functools.partial(jax.grad(loss, (0, 1)), implementation=implementation)
            keras.distribution.set_distribution(distribution)
            program = jax.jit(gradients).lower(*shards).compile()
            results = program(*shards)
            keras.distribution.set_distribution(None)
            errors = [
                np.abs(r - e).max() / np.abs(e).max()
                for r, e in zip(results, expected[operation], strict=True)
            ]
            reports[f"{operation} {name}"] = {
                "error": float(max(errors)),
                "gathers": program.as_text().count(" all-gather"),
                "shard": results[0].addressable_shards[0].data.shape,
            }
    print(json.dumps(reports))


if __name__ == "__main__":
    main(*sys.argv[1:])
