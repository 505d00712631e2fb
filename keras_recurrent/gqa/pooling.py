"""Pooling of H key and value heads into G.  Ainslie et al. 2023, arXiv:2305.13245, §2.1.

Groups are consecutive: the new head g replaces heads g·H/G to (g+1)·H/G − 1.
"""

import numpy as np
from keras import ops

from keras_recurrent.checks.dtypes import bytes_of
from keras_recurrent.progress import progress

POOLINGS = ("mean", "first", "random")


class Pooling:
    """Pooling method: the mean of each group, its first head, or newly drawn heads.

    Args:
        name: "mean", "first" or "random".
        num_key_value_heads: int, G.
        seed: int, for "random", which draws heads by the layer's initializer.
    """

    def __init__(self, name, num_key_value_heads, seed):
        self.name = name
        self.groups = num_key_value_heads
        self._seeds = np.random.default_rng(seed)

    def pool(self, values, axis, size):
        """Reduces `axis` of `values`, which has the heads, to `size`: G heads of `size` / G."""
        values = np.moveaxis(np.asarray(values), axis, 0)
        repeats = values.shape[0] // size
        grouped = values.reshape(self.groups, repeats, size // self.groups, *values.shape[1:])
        pooled = grouped[:, 0] if self.name == "first" else grouped.mean(axis=1)
        return np.moveaxis(pooled.reshape(size, *values.shape[1:]), 0, axis)

    def draw(self, variable, initializer):
        """Draws values for a variable by its initializer, with our seed if it takes one."""
        config = initializer.get_config()
        if "seed" in config:
            config["seed"] = int(self._seeds.integers(2**31))
        return type(initializer).from_config(config)(variable.shape, dtype="float32")


def transfer(old, new, pooling):
    """Assigns all weights of `old` to `new`, which is built alike but has fewer heads.

    The layers of both models are visited in parallel. Weights of different shapes differ along one
    axis, the axis of heads, and are pooled along it.
    """
    size = sum(map(bytes_of, old.variables))
    with progress(f"Converting {old.name}", "weights", size) as done:
        _transfer(old, new, pooling, set(), done)


def _transfer(old, new, pooling, seen, done):
    if old is new or id(old) in seen:
        return
    seen.add(id(old))
    if old.trainable != new.trainable:
        new.trainable = old.trainable
    if hasattr(new, "split_fused") and not hasattr(old, "split_fused"):
        _transfer_fused(old, new, pooling)
        done(sum(map(bytes_of, old.variables)))
        return
    variables = zip(_direct_variables(old), _direct_variables(new), strict=True)
    for before, after in variables:
        _assign(before, after, pooling, new)
        done(bytes_of(before))
    for before, after in zip(old._layers, new._layers, strict=True):
        _transfer(before, after, pooling, seen, done)


def _direct_variables(layer):
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def _assign(before, after, pooling, owner):
    if before.shape == after.shape:
        # JAX would share the array, and training one model would delete it for the other.
        after.assign(ops.copy(before))
        return
    _assign_pooled(_float32(before), after, pooling, owner)


def _assign_pooled(values, after, pooling, owner):
    axes = [i for i, n in enumerate(after.shape) if n != values.shape[i]]
    if not axes:
        after.assign(values)
    elif pooling.name == "random":
        after.assign(pooling.draw(after, getattr(owner, f"{after.name}_initializer")))
    else:
        after.assign(pooling.pool(values, axes[0], after.shape[axes[0]]))


def _transfer_fused(old, new, pooling):
    """Splits a kernel for queries, keys and values into one for queries and one for the rest."""
    for name in ("kernel", "bias"):
        query, key_value = new.split_fused(_float32(getattr(old._qkv_dense, name)))
        getattr(new._query_dense, name).assign(query)
        owner = new._key_value_dense
        _assign_pooled(key_value, getattr(owner, name), pooling, owner)
        getattr(new._output_dense, name).assign(ops.copy(getattr(old._output_dense, name)))


def _float32(variable):
    return ops.convert_to_numpy(ops.cast(variable, "float32"))
