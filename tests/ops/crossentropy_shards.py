"""The loss of hidden states on eight simulated devices, in several pieces. Prints JSON.

For each case by how much results and gradients, relative to their largest, differ from those of one
device, and whether the best tokens are the same.
"""

import json

import jax
import keras
import numpy as np

from keras_recurrent import ops
from keras_recurrent.backends.jax import linear_crossentropy as plain

ROWS, LENGTH, WIDTH = 8, 22, 8
MESHES = {"all": (2, 2, 2), "rows": (8, 1, 1), "vocabulary": (1, 1, 8)}
VOCABULARIES = {"divided": 48, "whole": 47}


def draw(vocabulary):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, LENGTH, WIDTH)).astype("float32")
    embedding = rng.normal(size=(vocabulary, WIDTH)).astype("float32")
    weights = rng.random((ROWS, LENGTH)) * (rng.random((ROWS, LENGTH)) < 0.7)
    tokens = np.where(weights == 0, -100, rng.integers(0, vocabulary, (ROWS, LENGTH)))
    return x, embedding, weights.astype("float32"), tokens.astype("int32")


def found(x, embedding, weights, tokens, reduction):
    """The loss, its gradients and the best tokens."""

    def loss(x, embedding, weights):
        losses, best = ops.linear_crossentropy(
            x, embedding, tokens, weights, soft_cap=2.0, reduction=reduction
        )
        return (losses * np.float32(0.5)).sum(), (losses, best)

    function = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
    (_, (losses, best)), gradients = jax.jit(function)(x, embedding, weights)
    return [np.asarray(a) for a in (losses, *gradients)], np.asarray(best)


def main():
    plain.CROSSENTROPY_CHUNK = 8
    devices, reports = keras.distribution.list_devices(), {}
    for reduction in ("sum", None):
        for name, vocabulary in VOCABULARIES.items():
            given = draw(vocabulary)
            expected, best = found(*given, reduction)
            for split, sizes in MESHES.items():
                mesh = keras.distribution.DeviceMesh(sizes, ("batch", "sequence", "model"), devices)
                keras.distribution.set_distribution(
                    keras.distribution.ModelParallel(layout_map=keras.distribution.LayoutMap(mesh))
                )
                results, also = found(*given, reduction)
                keras.distribution.set_distribution(None)
                errors = [
                    float(np.abs(a - b).max() / np.abs(b).max())
                    for a, b in zip(results, expected, strict=True)
                ]
                same = bool((also == best).all())
                reports[f"{reduction} {name} {split}"] = {"error": max(errors), "same": same}
    print(json.dumps(reports))


if __name__ == "__main__":
    main()
