"""The memory of a model, of its cache during generation and of its training."""

import contextlib
import functools
import math
from typing import NamedTuple

import keras
import numpy as np
from keras import backend, tree

from keras_recurrent import compat
from keras_recurrent.checkpoints import loading
from keras_recurrent.checks.arguments import check_positive_integer
from keras_recurrent.devices.jax_layouts import axis_size, drop_uneven_axes
from keras_recurrent.layers.tokens import initial_places
from keras_recurrent.models.recurrent_backbone import RecurrentBackbone

# Which field of `MemorySizes` counts an array, by its name in the cache; the others are recurrent.
PARTS = {
    "key": "keys_and_values",
    "value": "keys_and_values",
    "inputs": "convolution_state",
    "position": "places",
    "segment": "places",
}


class MemorySizes(NamedTuple):
    """Bytes of a model and of its generation cache; see `memory_sizes`."""

    parameters: int
    recurrent_state: int
    convolution_state: int
    keys_and_values: int
    places: int

    @property
    def cache(self):
        """Bytes of the whole cache."""
        return sum(self[1:])

    @property
    def total(self):
        """Bytes of parameters and cache."""
        return sum(self)


class TrainingSizes(NamedTuple):
    """Bytes of a model and of what training keeps beside each weight; see `training_sizes`."""

    parameters: int
    gradients: int
    slots: int

    @property
    def total(self):
        """Bytes of all three."""
        return sum(self)


def memory_sizes(model, batch_size, length, layout_map=None):
    """The bytes that a model takes during generation, activations not counted.

    A step of generation reads all of it once, which is what it costs on hardware that is bound by
    its memory. De et al. 2024 (arXiv:2402.19427, appendix F) count, for each row of a batch:

    ```
    recurrent block      D_rnn + (W - 1) D_rnn                    at every length
    local attention      2 G head_dim min(length, window - 1)     the token itself is not kept
    global attention     2 G head_dim length
    ```

    numbers, with W the taps of the convolution and G the heads of keys and values. Recurrences and
    inputs of convolutions are float32, keys and values have the compute dtype.

    Args:
        model: a language model or a backbone; or the name of a preset, which is then sized without
            making its weights, in the dtype of the Keras policy.
        batch_size: integer, rows.
        length: integer, tokens a row, prompt and answer together.
        layout_map: what `get_layout_map` of the backbone's class makes of a mesh of devices, for
            the bytes on each of these; None: one device. The mesh may name devices that are not
            there, on every backend: nothing but arithmetic is done.

    Returns:
        A `MemorySizes` of bytes: `parameters`, `recurrent_state`, `convolution_state`,
        `keys_and_values`, and `places`, the few integers that say where each row is; with their
        sums `cache` and `total`. They are those of the arrays.

    Raises:
        ValueError: `batch_size` or `length` is no integer from 1 on, the model is not one of
            these, a name is unknown, `layout_map` is of another kind, or its mesh does not divide a
            weight that it splits.

    Example:

    >>> from keras_recurrent.models import GriffinBackbone, memory_sizes
    >>> backbone = GriffinBackbone.from_preset("griffin_tiny")
    >>> short, long = (memory_sizes(backbone, batch_size=1, length=n) for n in (1_000, 100_000))
    >>> short.cache == long.cache
    True
    >>> long.recurrent_state == 3 * 176 * 4  # three recurrent blocks
    True
    >>> memory_sizes("griffin_7b", batch_size=1, length=1_000).parameters
    27685019648

    On each of eight devices, two by two of which have the same rows:

    >>> import keras
    >>> devices = [f"gpu:{i}" for i in range(8)]
    >>> mesh = keras.distribution.DeviceMesh((4, 2), ("batch", "model"), devices)
    >>> layout_map = GriffinBackbone.get_layout_map(mesh)
    >>> memory_sizes("griffin_7b", 64, 1_000, layout_map).parameters
    3601600512
    """
    for name, number in (("batch_size", batch_size), ("length", length)):
        check_positive_integer(name, number)
    _check_layout_map(layout_map)
    backbone = backbone_of(model)
    sizes = dict.fromkeys(MemorySizes._fields, 0)
    sizes["parameters"] = _bytes_of_weights(backbone.weights, layout_map)
    for path, array in _arrays_of_one_row(backbone, length):
        shape = (batch_size, *array.shape[1:])
        part = _shape_on_a_device(_layout_of_state(layout_map, path, shape), shape)
        sizes[PARTS.get(path[-1], "recurrent_state")] += math.prod(part) * _item_size(array)
    return MemorySizes(**sizes)


def training_sizes(model, num_slots=2, layout_map=None):
    """The bytes that training keeps of a model, activations not counted.

    A gradient and the slots of the optimizer have the shape, the dtype and the place of their
    weight: with Adam in float32, 16 bytes for each number. A layout map that splits weights over
    the axis of the data (FSDP) splits all of that. What stands beside it for a moment, such as the
    gathered weights of a block, is not counted.

    Args:
        model: a language model, a backbone or the name of a preset, as in `memory_sizes`.
        num_slots: integer, how many numbers the optimizer keeps for each weight: 2 for Adam, 1 for
            SGD with momentum or Lion, 0 for plain SGD.
        layout_map: as in `memory_sizes`: the bytes are then those on each device.

    Returns:
        A `TrainingSizes` of bytes: `parameters`, `gradients` and `slots`, with their sum `total`.

    Raises:
        ValueError: `num_slots` is no integer from 0 on; or as `memory_sizes`.

    Example:

    >>> from keras_recurrent.models import training_sizes
    >>> training_sizes("hgrn2_7b").total / 2**30  # GiB
    100.4...
    """
    if not isinstance(num_slots, int) or num_slots < 0:
        raise ValueError(f"`num_slots` must be an integer, at least 0. Received: {num_slots!r}")
    _check_layout_map(layout_map)
    backbone = backbone_of(model)
    trainable = _bytes_of_weights(backbone.trainable_weights, layout_map)
    return TrainingSizes(
        _bytes_of_weights(backbone.weights, layout_map), trainable, num_slots * trainable
    )


def _check_layout_map(layout_map):
    if layout_map is None:
        return
    if not isinstance(layout_map, keras.distribution.LayoutMap) or layout_map["tokens"] is None:
        raise ValueError(
            "`layout_map` must be what `get_layout_map` of the backbone's class returns for a "
            f"`keras.distribution.DeviceMesh`; got a `{type(layout_map).__name__}`."
        )


def _bytes_of_weights(weights, layout_map):
    total = 0
    for weight in weights:
        layout = layout_map and layout_map[weight.path]
        if layout and drop_uneven_axes(layout, weight.shape).axes != tuple(layout.axes):
            raise ValueError(
                f"`layout_map` splits the weight `{weight.path}` of shape {tuple(weight.shape)} by "
                f"{tuple(layout.axes)} over a mesh of {layout.device_mesh.shape}, which does not "
                "divide it. Take a mesh with fewer devices along this axis."
            )
        total += math.prod(_shape_on_a_device(layout, weight.shape)) * _item_size(weight)
    return total


def _layout_of_state(layout_map, path, shape):
    """As `keras_recurrent.devices.jax_layouts.apply_state_layout` chooses it."""
    if layout_map is None:
        return None
    layout = layout_map["/".join(("state", *map(str, path)))]
    if layout is None:  # split by rows
        rows, _ = layout_map["tokens"].axes
        axes = (rows, *[None] * (len(shape) - 1))
        layout = keras.distribution.TensorLayout(axes, layout_map.device_mesh)
    return drop_uneven_axes(layout, shape)


def _shape_on_a_device(layout, shape):
    """The shape of a device's part, where all parts are of one size."""
    axes = layout.axes if layout else [None] * len(shape)
    return [
        size // axis_size(layout.device_mesh, axis) if axis else size
        for size, axis in zip(shape, axes, strict=True)
    ]


def backbone_of(model):
    """The network of a language model, of itself, or of a preset's name.

    Raises:
        ValueError: the model is none of these.
    """
    if isinstance(model, str):
        model = _without_weights(model)
    backbone = getattr(model, "backbone", model)
    if not isinstance(backbone, RecurrentBackbone):
        raise ValueError(
            "`model` must be a language model of `keras_recurrent.models`, its backbone, or the "
            f"name of a preset of one; got a `{type(backbone).__name__}`, which keeps no state."
        )
    return backbone


def _without_weights(preset):
    """The network of a preset, whose weights have shapes but no values."""
    loader = loading.get_loader(preset)
    cls = loader.check_backbone_class()
    if isinstance(loader, loading.NamedPresetLoader):
        policy = keras.config.dtype_policy().name
        return _of_named_preset(cls, loader.row, policy)
    with _no_values():
        return loader.load_backbone(cls, load_weights=False)


@functools.lru_cache(maxsize=4)
def _of_named_preset(cls, row, _policy):
    """Kept, as plans ask for many meshes of one model, and its layers take seconds to make."""
    with _no_values():
        return cls(**row.backbone_arguments)


@contextlib.contextmanager
def _no_values():
    """Inside, weights get shapes but no values."""
    # Keras lists what has no values yet, and would make them at the end of the next scope.
    waiting = compat.global_state.get_global_attribute("uninitialized_variables", [], True)
    before = len(waiting)
    with keras.StatelessScope(initialize_variables=False):
        yield
    del waiting[before:]


def _arrays_of_one_row(backbone, length):
    """A cache of one row, array by array with its path: a whole cache may not fit into memory."""
    yield from tree.flatten_with_path(initial_places(1, backbone.uses_position))
    for i, block in enumerate(backbone.transformer_layers):
        for path, array in tree.flatten_with_path(block.own_initial_state(1, length)):
            yield ("blocks", i, *path), array


def _item_size(array):
    return np.dtype(backend.standardize_dtype(array.dtype)).itemsize
