"""The oracle of conversion: a multi-head model in which all heads of a group have equal weights.

It keeps all heads, and pools their weights head by head in NumPy.
"""

import keras
import numpy as np


def numpy(tensor):
    return keras.ops.convert_to_numpy(keras.ops.cast(tensor, "float32"))


def share(values, axis, heads, groups, pooling="mean"):
    """Returns `values` with equal heads in each group; `axis` has the heads, one after another."""
    parts = np.split(numpy(values), heads, axis=axis)
    size = heads // groups
    shared = []
    for group in range(groups):
        members = parts[group * size : (group + 1) * size]
        common = members[0] if pooling == "first" else sum(members) / size
        shared += [common] * size
    return np.concatenate(shared, axis=axis)


def share_heads(model, head_axes, heads, groups, pooling="mean"):
    """Pools the heads in all weights whose path contains a key of `head_axes`.

    Args:
        model: the model.
        head_axes: `{part of a path: axis}`.
    """
    changed = 0
    for weight in model.weights:
        for part, axis in head_axes.items():
            if part in weight.path:
                weight.assign(share(weight, axis, heads, groups, pooling))
                changed += 1
    assert changed  # otherwise the oracle would be the model itself


def set_weights(model, seed=0):
    """Sets random weights, which differ between heads and layers; scales stay near 1."""
    rng = np.random.default_rng(seed)
    for weight in model.weights:
        values = rng.normal(size=weight.shape) * 0.3
        weight.assign(values + 1 if weight.path.endswith(("gamma", "scale")) else values)


def assert_equal(actual, expected):
    """Asserts equality up to the rounding of float32: sums are in another order."""
    np.testing.assert_allclose(numpy(actual), numpy(expected), rtol=1e-4, atol=2e-5)


def assert_equal_weights(actual, expected, **tolerance):
    for a, b in zip(actual.weights, expected.weights, strict=True):
        np.testing.assert_allclose(numpy(a), numpy(b), **{"rtol": 0, "atol": 0, **tolerance})
