"""Memory of a model, of its cache during generation, and of training."""

import contextlib
import functools
import math
from typing import NamedTuple

import keras
from keras import tree

from keras_recurrent import compat
from keras_recurrent.checkpoints import loading, names
from keras_recurrent.checks.arguments import check_positive_integers
from keras_recurrent.checks.dtypes import item_size
from keras_recurrent.devices.jax_layouts import axis_size, drop_uneven_axes
from keras_recurrent.layers.tokens import initial_token_state
from keras_recurrent.models.recurrent_backbone import RecurrentBackbone

# {name of an array in the cache: field of `MemorySizes`}; all other arrays are recurrent states.
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
        """Bytes of the cache."""
        return sum(self[1:])

    @property
    def total(self):
        """Bytes of parameters and cache."""
        return sum(self)


class TrainingSizes(NamedTuple):
    """Bytes of a model, its gradients and its optimizer slots; see `training_sizes`."""

    parameters: int
    gradients: int
    slots: int

    @property
    def total(self):
        """Bytes of all three."""
        return sum(self)


def memory_sizes(model, batch_size, length, *, dtype=None, layout_map=None):
    """Returns the memory of a model during generation in bytes, without activations.

    A decoding step reads all of it once, which determines its time on memory-bound hardware. De et
    al. 2024 (arXiv:2402.19427, appendix F) count, for each sequence of a batch:

    ```
    recurrent block      D_rnn + (W - 1) D_rnn                    at any length
    local attention      2 G head_dim min(length, window - 1)     without the current token
    global attention     2 G head_dim length
    ```

    numbers, with W the taps of the convolution and G the number of key and value heads. Recurrent
    states and inputs of convolutions are float32, keys and values have the compute dtype.

    Args:
        model: a language model or a backbone; or the name of a preset, whose weights are not
            allocated.
        batch_size: integer, number of sequences.
        length: integer, tokens of a sequence, including prompt and answer.
        dtype: string, only for the name of a preset: the name of a Keras dtype policy, as in
            `from_preset`. `"bfloat16"` halves weights, keys and values, `"mixed_bfloat16"` only
            keys and values. None: the default of `from_preset`.
        layout_map: the result of `get_layout_map` of the backbone's class for a device mesh; sizes
            are then those on each device. None: one device. The devices of the mesh need not exist,
            on any backend: sizes are only computed.

    Returns:
        A `MemorySizes` of bytes: `parameters`, `recurrent_state`, `convolution_state`,
        `keys_and_values`, and `places`, the integers with the position and segment of each
        sequence; with their sums `cache` and `total`. Sizes are those of the arrays.

    Raises:
        ValueError: `batch_size` or `length` is not an integer of at least 1, the model is not one
            of these, a name is unknown, `dtype` is not a policy of floating-point weights or given
            with a model, `layout_map` has another type, or its mesh does not divide a weight that
            it splits.

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
    >>> memory_sizes("griffin_7b", batch_size=1, length=1_000, dtype="bfloat16").parameters
    13843996672

    On each of eight devices, of which pairs share the same sequences:

    >>> import keras
    >>> devices = [f"gpu:{i}" for i in range(8)]
    >>> mesh = keras.distribution.DeviceMesh((4, 2), ("batch", "model"), devices)
    >>> layout_map = GriffinBackbone.get_layout_map(mesh)
    >>> memory_sizes("griffin_7b", 64, 1_000, layout_map=layout_map).parameters
    3601600512
    """
    check_positive_integers(batch_size=batch_size, length=length)
    _check_layout_map(layout_map)
    backbone = get_backbone(model, dtype)
    sizes = dict.fromkeys(MemorySizes._fields, 0)
    sizes["parameters"] = _weight_bytes(backbone.weights, layout_map)
    for path, array in _iterate_arrays(backbone, length):
        shape = (batch_size, *array.shape[1:])
        part = _shard_shape(_state_layout(layout_map, path, shape), shape)
        sizes[PARTS.get(path[-1], "recurrent_state")] += math.prod(part) * item_size(array)
    return MemorySizes(**sizes)


def training_sizes(model, *, num_slots=2, dtype=None, layout_map=None):
    """Returns the memory of a model during training in bytes, without activations.

    Gradients and optimizer slots have the shape, the dtype and the device of their weight: with
    Adam, 16 bytes per parameter in float32 or `"mixed_bfloat16"`, and 8 in `"bfloat16"`, which
    torch's Adam trains, but not Keras's. For 16-bit weights, the result is too small for
    `keras_recurrent.optimizers`, whose slots are float32 (12 bytes). A layout map that splits
    weights over the data axis (FSDP) splits gradients and slots, too. Temporary arrays, such as the
    gathered weights of a block, are not counted; the result does not depend on the batch.

    Args:
        model: a language model, a backbone or the name of a preset, as in `memory_sizes`.
        num_slots: integer, optimizer slots per weight: 2 for Adam, 1 for SGD with momentum or Lion,
            0 for plain SGD.
        dtype, layout_map: as in `memory_sizes`.

    Returns:
        A `TrainingSizes` of bytes: `parameters`, `gradients` and `slots`, with their sum `total`.

    Raises:
        ValueError: `num_slots` is not an integer of at least 0; or as in `memory_sizes`.

    Example:

    >>> from keras_recurrent.models import training_sizes
    >>> training_sizes("hgrn2_7b").total / 2**30  # GiB
    100.4...
    """
    if not isinstance(num_slots, int) or num_slots < 0:
        raise ValueError(f"`num_slots` must be an integer, at least 0. Received: {num_slots!r}")
    _check_layout_map(layout_map)
    backbone = get_backbone(model, dtype)
    trainable = _weight_bytes(backbone.trainable_weights, layout_map)
    return TrainingSizes(
        _weight_bytes(backbone.weights, layout_map), trainable, num_slots * trainable
    )


def _check_layout_map(layout_map):
    if layout_map is None:
        return
    if not isinstance(layout_map, keras.distribution.LayoutMap) or layout_map["tokens"] is None:
        raise ValueError(
            "`layout_map` must be the result of `get_layout_map` of the backbone's class for a "
            f"`keras.distribution.DeviceMesh`; got a `{type(layout_map).__name__}`."
        )


def _weight_bytes(weights, layout_map):
    total = 0
    for weight in weights:
        layout = layout_map and layout_map[weight.path]
        if layout and drop_uneven_axes(layout, weight.shape).axes != tuple(layout.axes):
            raise ValueError(
                f"`layout_map` splits the weight `{weight.path}` of shape {tuple(weight.shape)} by "
                f"{tuple(layout.axes)} over a mesh of {layout.device_mesh.shape}, which does not "
                "divide it. Use a mesh with fewer devices along this axis."
            )
        total += math.prod(_shard_shape(layout, weight.shape)) * item_size(weight)
    return total


def _state_layout(layout_map, path, shape):
    """Returns the layout that `keras_recurrent.devices.jax_layouts.apply_state_layout` uses."""
    if layout_map is None:
        return None
    layout = layout_map["/".join(("state", *map(str, path)))]
    if layout is None:  # split along the batch
        batch_axis, _ = layout_map["tokens"].axes
        axes = (batch_axis, *[None] * (len(shape) - 1))
        layout = keras.distribution.TensorLayout(axes, layout_map.device_mesh)
    return drop_uneven_axes(layout, shape)


def _shard_shape(layout, shape):
    """Returns the shape of a device's shard; all shards have equal sizes."""
    axes = layout.axes if layout else [None] * len(shape)
    return [
        size // axis_size(layout.device_mesh, axis) if axis else size
        for size, axis in zip(shape, axes, strict=True)
    ]


def get_backbone(model, dtype=None):
    """Returns the network of a language model, a backbone or the name of a preset."""
    if dtype is not None:
        _check_dtype(model, dtype)
    if isinstance(model, str):
        model = _build_without_weights(model, dtype)
    backbone = getattr(model, "backbone", model)
    if not isinstance(backbone, RecurrentBackbone):
        raise ValueError(
            "`model` must be a language model of `keras_recurrent.models`, its backbone, or the "
            f"name of a preset of one; got a `{type(backbone).__name__}`, which has no state."
        )
    return backbone


def _check_dtype(model, dtype):
    if not isinstance(model, str):
        raise ValueError(
            f"`dtype` is only supported if `model` is the name of a preset. A "
            f"`{type(model).__name__}` has its own dtype; got {dtype!r}. Leave it out."
        )
    try:
        policy = keras.dtype_policies.get(dtype if isinstance(dtype, str) else "")
        is_valid = keras.backend.is_float_dtype(policy.variable_dtype)
    except ValueError:
        is_valid = False
    if not is_valid or policy.quantization_mode is not None:
        raise ValueError(
            "`dtype` must be the name of a Keras dtype policy of floating-point weights, such as "
            f"'bfloat16' or 'mixed_bfloat16'; got {dtype!r}. For quantized weights, pass the "
            "quantized model."
        )


def _build_without_weights(preset, dtype):
    """Builds the network of a preset, with weights that have shapes but no values."""
    loader = loading.get_loader(preset)
    cls = loader.check_backbone_class()
    if isinstance(loader, loading.NamedPresetLoader):
        return _build_named_preset(preset, dtype or keras.config.dtype_policy().name)
    with _abstract_weights():
        overrides = {} if dtype is None else {"dtype": dtype}
        return loader.load_backbone(cls, load_weights=False, **overrides)


@functools.lru_cache(maxsize=4)
def _build_named_preset(name, dtype):
    """Builds and caches a network: building takes seconds, and planners query many meshes."""
    cls, row = names.PRESETS[name]
    with _abstract_weights():
        return cls(**row.backbone_arguments, dtype=dtype)


@contextlib.contextmanager
def _abstract_weights():
    """Context manager in which weights get shapes but no values."""
    # Keras lists uninitialized variables and initializes them at the end of the next scope.
    waiting = compat.global_state.get_global_attribute("uninitialized_variables", [], True)
    before = len(waiting)
    with keras.StatelessScope(initialize_variables=False):
        yield
    del waiting[before:]


def _iterate_arrays(backbone, length):
    """Yields the paths and arrays of a cache for one sequence; all at once may need much memory."""
    yield from tree.flatten_with_path(initial_token_state(1, backbone.uses_position))
    for i, block in enumerate(backbone.transformer_layers):
        for path, array in tree.flatten_with_path(block.own_initial_state(1, length)):
            yield ("blocks", i, *path), array
