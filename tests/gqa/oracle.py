"""A multi-head model whose heads share keys and values: what a converted model must equal.

Head by head in NumPy, and with all heads kept: each gets what its group has in common.
"""

import keras
import numpy as np


def numpy(tensor):
    return keras.ops.convert_to_numpy(keras.ops.cast(tensor, "float32"))


def share(values, axis, heads, groups, pooling="mean"):
    """`values`, in which `axis` has the heads one after the other, with those of a group alike."""
    parts = np.split(numpy(values), heads, axis=axis)
    size = heads // groups
    shared = []
    for group in range(groups):
        members = parts[group * size : (group + 1) * size]
        common = members[0] if pooling == "first" else sum(members) / size
        shared += [common] * size
    return np.concatenate(shared, axis=axis)


def share_heads(model, head_axes, heads, groups, pooling="mean"):
    """Changes all weights of a multi-head model of which a part of `head_axes` is in the path.

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
    assert changed  # or the oracle is the model itself


def set_weights(model, seed=0):
    """Values under which no two heads, rows or layers are alike; scales stay near 1."""
    rng = np.random.default_rng(seed)
    for weight in model.weights:
        values = rng.normal(size=weight.shape) * 0.3
        weight.assign(values + 1 if weight.path.endswith(("gamma", "scale")) else values)


def assert_equal(actual, expected):
    """Up to the rounding of float32: sums are taken in another order."""
    np.testing.assert_allclose(numpy(actual), numpy(expected), rtol=1e-4, atol=2e-5)
