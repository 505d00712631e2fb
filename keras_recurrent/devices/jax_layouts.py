"""Layouts of weights, activations and states for `keras.distribution` on JAX.

Sequence parallelism, for sequences that do not fit on one device: an axis of the mesh named
"sequence" splits each sequence, and each device along it computes one shard. The code that makes
and trains a model does not change:

```python
import keras
from keras_recurrent.models import HGRN2Backbone, HGRN2CausalLM

devices = keras.distribution.list_devices()
names = ("batch", "sequence", "model")
mesh = keras.distribution.DeviceMesh((1, len(devices), 1), names, devices)
layout_map = HGRN2Backbone.get_layout_map(mesh)
with keras.distribution.ModelParallel(layout_map=layout_map).scope():
    model = HGRN2CausalLM.from_preset("hgrn2_tiny")
```

Outputs, states and gradients equal those of whole sequences, at any position of document starts and
padding. Data and labels are whole sequences. Communication does not grow with the sequence length:
a device sends to those after it

- for a recurrence, the product of decays over its shard and the final state of the shard, which
  takes two passes over each shard;
- for a convolution and for attention with a window, the last inputs, keys and values of a document.

Operations of `keras_recurrent.ops` communicate likewise under any `keras.distribution.LayoutMap` of
such a mesh. For scans from the right, such as with `reverse=True`, tokens are first sent to the
device at the mirrored position.

Attention to all tokens, a number of tokens that the axis does not divide, and an axis "sequence"
that splits the batch or the model raise an error. With several processes, each passes the whole
sequences of its part of the batch, with `auto_shard_dataset=False`.
"""

import math

import keras
from keras import ops

from keras_recurrent.backends.constants import SEQUENCE_AXIS
from keras_recurrent.checks.shapes import reshape

if keras.config.backend() == "jax":
    from keras_recurrent.backends.jax import _layouts

# Keras has distributions on JAX only. Read once, so that compilers see a constant.
ON_JAX = keras.config.backend() == "jax"


def make_layout_map(device_mesh, model_parallel_dim_name, data_parallel_dim_name):
    """Returns the `keras.distribution.LayoutMap` entries that all families share.

    In addition to paths of weights, it has names that networks pass to `apply_layout`:
    `hidden_states`, the residual stream `[B, T, hidden_dim]`; `groups`, keys and queries
    `[B, T, num_groups, 2 * state_dim]` that heads of Mamba-2 share; `logits`; `sampled_logits`,
    those of a token that is drawn from all `[B, vocabulary_size]`; `tokens`, the kinds and
    positions of tokens `[B, T]`; and `state/...`, the arrays of a state. An axis "sequence" of the
    mesh splits each sequence.

    Raises:
        ValueError: `device_mesh` is not a mesh, lacks one of the axes, or one of them is
            "sequence".
    """
    if not isinstance(device_mesh, keras.distribution.DeviceMesh):
        raise ValueError(
            "`device_mesh` must be a `keras.distribution.DeviceMesh`. Received: "
            f"{type(device_mesh).__name__}"
        )
    data, model = data_parallel_dim_name, model_parallel_dim_name
    for argument, name in (("data_parallel_dim_name", data), ("model_parallel_dim_name", model)):
        if name not in device_mesh.axis_names:
            raise ValueError(
                f"`{argument}` must be an axis of `device_mesh`, one of "
                f"{device_mesh.axis_names}. Received: {name!r}. An axis of size 1 splits nothing."
            )
        if name == SEQUENCE_AXIS:
            raise ValueError(
                f"`{argument}` must be another axis than {SEQUENCE_AXIS!r}, which splits "
                "sequences. Rename the axis of the mesh, or pass another axis."
            )
    layout_map = keras.distribution.LayoutMap(device_mesh)
    layout_map["token_embedding/embeddings"] = (model, get_weight_axis(device_mesh, data))
    time = SEQUENCE_AXIS if SEQUENCE_AXIS in device_mesh.axis_names else None
    layout_map["hidden_states"] = (data, time, None)
    layout_map["groups"] = (data, time, model, None)
    layout_map["logits"] = (data, time, model)
    layout_map["sampled_logits"] = (data, None)
    layout_map["tokens"] = (data, None)
    layout_map["state/(position|segment)"] = (data,)
    layout_map["state/.*/rg_lru/hidden"] = (data, model)
    layout_map["state/.*/cg_lru/hidden"] = (data, None)
    layout_map["state/.*/inputs"] = (data, None, model)
    layout_map["state/.*/memory"] = (data, model, None, None)
    layout_map["state/.*/(key|value)"] = (data, None, model, None)
    return layout_map


def check_layout(path, **sizes):
    """Raises an error if the active distribution cannot split a weight evenly.

    Args:
        path: string, the path of a weight.
        **sizes: the number of units along each dimension, in order, between which it can be split,
            such as `num_heads=8` for the channels of heads. Names are those of arguments.

    Raises:
        ValueError: the number of devices does not divide the number of units.
    """
    layout = _layout(path)
    if layout is None:
        return
    for axis, (name, size) in zip(layout.axes, sizes.items(), strict=False):
        if axis is None or size % (count := axis_size(layout.device_mesh, axis)) == 0:
            continue
        padded = size + -size % count
        pad = f"Pad the vocabulary, `{name}={padded}`, or take" if "vocabulary" in name else "Take"
        raise ValueError(
            f"The weight `{path}` is split along the axis {axis!r} of the device mesh, whose size, "
            f"{count}, does not divide `{name}`, {size}. {pad} a mesh with fewer devices along "
            f"this axis, such as {math.gcd(size, count)}."
        )


def check_whole_sequences(what):
    """Raises an error if the active distribution splits sequences.

    Args:
        what: string, the feature that needs whole sequences, for the error message.

    Raises:
        NotImplementedError: the mesh has an axis "sequence" of more than one device.
    """
    distribution = active_distribution()
    mesh = distribution and distribution.device_mesh
    if mesh and SEQUENCE_AXIS in mesh.axis_names and axis_size(mesh, SEQUENCE_AXIS) > 1:
        raise NotImplementedError(
            f"{what} needs all tokens of a sequence, which the axis {SEQUENCE_AXIS!r} of the mesh "
            "splits. Leave this axis out of the mesh, or give attention a `sliding_window`."
        )


def apply_layout(tensor, name):
    """Distributes a tensor by the entry `name` of the active distribution's layout map.

    A dimension that the devices do not divide, such as a batch of one sequence, stays whole.
    """
    layout = _layout(name) if ON_JAX else None
    if layout is None or isinstance(tensor, keras.KerasTensor):
        return tensor
    return keras.distribution.distribute_tensor(tensor, drop_uneven_axes(layout, tensor.shape))


def drop_uneven_axes(layout, shape):
    """Returns the `TensorLayout` without the axes whose size does not divide the dimension."""
    mesh = layout.device_mesh
    axes = [
        axis if axis and size % axis_size(mesh, axis) == 0 else None
        for axis, size in zip(layout.axes, shape, strict=True)
    ]
    return keras.distribution.TensorLayout(axes, mesh)


def apply_state_layout(state):
    """Distributes the arrays of a state by their paths, or else splits them along the batch."""
    if active_distribution() is None:
        return state
    return keras.tree.map_structure(
        keras.distribution.distribute_tensor, state, state_layouts(state)
    )


def state_layouts(state):
    """Returns the `TensorLayout` of each array of a state on the active distribution."""
    distribution, layouts = active_distribution(), []
    for path, array in keras.tree.flatten_with_path(state):
        layout = distribution.get_tensor_layout("/".join(("state", *map(str, path))))
        layout = layout or distribution.get_data_layout(array.shape)
        layouts.append(drop_uneven_axes(layout, array.shape))
    return keras.tree.pack_sequence_as(state, layouts)


def flatten_tokens(x):
    """Returns x `[B, T, D]` as `[B * T, D]`, and the function that restores `[B, T, D]`.

    If devices have shards of sequences, tokens are reordered so that each stays on its device.
    """
    batch, length = ops.shape(x)[:2]
    distribution = active_distribution()
    if distribution is None or not _splits_sequences(distribution, x):
        return reshape(x, (-1, x.shape[-1])), lambda y: reshape(y, (batch, length, y.shape[-1]))
    mesh_and_axis = distribution.device_mesh.backend_mesh, distribution.batch_dim_name
    flat = _layouts.flatten_tokens(x, *mesh_and_axis)
    return flat, lambda y: _layouts.unflatten_tokens(y, (batch, length), *mesh_and_axis)


def _splits_sequences(distribution, x):
    mesh = distribution.device_mesh
    if isinstance(x, keras.KerasTensor) or SEQUENCE_AXIS not in mesh.axis_names:
        return False
    sizes = axis_size(mesh, distribution.batch_dim_name), axis_size(mesh, SEQUENCE_AXIS)
    return all(size % count == 0 for size, count in zip(x.shape, sizes, strict=False))


def get_weight_axis(device_mesh, data):
    """Returns the axis that shards weights: `data`, or "sequence" if `data` has one device."""
    spread = SEQUENCE_AXIS in device_mesh.axis_names and axis_size(device_mesh, data) == 1
    return SEQUENCE_AXIS if spread else data


def axis_size(device_mesh, axis):
    """Returns the number of devices of a mesh along an axis."""
    return device_mesh.shape[device_mesh.axis_names.index(axis)]


def active_distribution():
    """Returns the active `keras.distribution` on JAX, or None."""
    return keras.distribution.distribution() if ON_JAX else None


def _layout(name):
    distribution = active_distribution()
    return distribution and distribution.get_tensor_layout(name)
