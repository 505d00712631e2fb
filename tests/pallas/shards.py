"""Layers' operations under `keras.distribution` on eight simulated devices. Prints JSON.

A process of its own, for it has eight devices. The kernels run in Pallas's general interpreter:
that for TPU makes its devices wait for each other, and has too few threads for it on two cores.
"""

import functools
import json

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


def loss(x, logit, mask, implementation=None):
    gate = 0.5 * x
    h, state = ops.rg_lru(x, gate, gate * 2, logit, mask=mask, implementation=implementation)
    return ((h * mask[:, :, None]) ** 2).sum() + state.sum()


def main():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(B, T, D)).astype("float32")
    logit = rng.normal(size=D).astype("float32")
    mask = rng.random((B, T)) < 0.9
    gradients = jax.grad(loss, (0, 1))
    expected = gradients(x, logit, mask, "jax")
    pl.pallas_call = functools.partial(pl.pallas_call, interpret=True)
    reports = {}
    for name, make in DISTRIBUTIONS.items():
        device_mesh = keras.distribution.DeviceMesh((4, 2), ("batch", "model"))
        distribution = make(device_mesh)
        mesh = distribution.device_mesh.backend_mesh
        channels = "model" if name == "model" else None
        specs = (jax.P("batch", None, channels), jax.P(channels), jax.P("batch"))
        shards = [
            jax.device_put(a, jax.NamedSharding(mesh, spec))
            for a, spec in zip((x, logit, mask), specs, strict=True)
        ]
        keras.distribution.set_distribution(distribution)
        program = jax.jit(lambda *a: gradients(*a, "pallas")).lower(*shards).compile()
        results = program(*shards)
        keras.distribution.set_distribution(None)
        errors = [np.abs(r - e).max() for r, e in zip(results, expected, strict=True)]
        reports[name] = {
            "error": float(max(errors)),
            "gathers": program.as_text().count(" all-gather"),
            "shard": results[0].addressable_shards[0].data.shape,
        }
    print(json.dumps(reports))


if __name__ == "__main__":
    main()
