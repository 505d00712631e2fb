"""Where weights, activations and states lie on several devices, for `keras.distribution` on JAX.

Rows longer than a device (sequence parallelism): an axis named "sequence" of the mesh splits the
tokens of rows, and each device along it computes its part of each row. A model is made and trained
as ever:

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

Outputs, states and gradients are those of whole rows, wherever documents start and padding stands;
data and labels are whole rows, too. Of a recurrence, devices send the product of decays over a part
and the state that it leaves behind, to those on the right; of a convolution and of attention with a
window, the last inputs, keys and values of a document; both do not grow with the rows. A recurrence
takes two passes over each part. Operations of `keras_recurrent.ops` do the same under any
`keras.distribution.LayoutMap` of such a mesh. Where something runs over time from the right, such
as with `reverse=True`, tokens are sent to the device that mirrors theirs.

Refused by name: attention to all tokens, a number of tokens that the axis does not divide, and an
axis "sequence" that splits the batch or the model. Several processes each give the whole rows of
their part of the batch, with `auto_shard_dataset=False`.
"""

import contextlib
import math

import keras
from keras import ops

from keras_recurrent.backends.constants import SEQUENCE_AXIS

if keras.config.backend() == "jax":
    from keras_recurrent.backends.jax import _layouts

ON_JAX = keras.config.backend() == "jax"  # where Keras has distributions; read once, for compilers


def layout_map_with_axes(device_mesh, model_parallel_dim_name, data_parallel_dim_name):
    """A `keras.distribution.LayoutMap` of what all families share, once the mesh has these axes.

    Beside those of weights it has names that the networks ask for, by `laid_out`: `hidden_states`,
    the residual stream `[B, T, hidden_dim]`; `logits`; `tokens`, the kinds and positions of tokens
    `[B, T]`; and `state/...`, the arrays of a state. Where the mesh has an axis "sequence", it
    splits the tokens of rows.

    Raises:
        ValueError: `device_mesh` is no mesh, lacks one of the axes, or one of them is "sequence".
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
                f"{device_mesh.axis_names}. Received: {name!r}. An axis that is to split nothing "
                "has the size 1."
            )
        if name == SEQUENCE_AXIS:
            raise ValueError(
                f"`{argument}` must be another axis than {SEQUENCE_AXIS!r}, which splits the "
                "tokens of rows. Give the axis of the mesh another name, or name another axis."
            )
    layout_map = keras.distribution.LayoutMap(device_mesh)
    layout_map["token_embedding/embeddings"] = (model, axis_of_weights(device_mesh, data))
    time = SEQUENCE_AXIS if SEQUENCE_AXIS in device_mesh.axis_names else None
    layout_map["hidden_states"] = (data, time, None)
    layout_map["logits"] = (data, time, model)
    layout_map["tokens"] = (data, None)
    layout_map["state/(position|segment)"] = (data,)
    layout_map["state/.*/rg_lru/hidden"] = (data, model)
    layout_map["state/.*/cg_lru/hidden"] = (data, None)
    layout_map["state/.*/inputs"] = (data, None, model)
    layout_map["state/.*/memory"] = (data, model, None, None)
    layout_map["state/.*/(key|value)"] = (data, None, model, None)
    return layout_map


def check_layout(path, **sizes):
    """Raises where the active distribution would cut what must stay whole, before it does.

    Args:
        path: string, that of a weight.
        **sizes: what its dimensions are made of, in their order, such as `num_heads=8` for the
            channels of heads, between which they can be cut; names are those of arguments.

    Raises:
        ValueError: the layout splits a dimension over devices that do not divide it.
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
            f"The weight `{path}` is to be split along the axis {axis!r} of the mesh of devices, "
            f"whose size, {count}, does not divide `{name}`, {size}. {pad} a mesh with fewer "
            f"devices along this axis, such as {math.gcd(size, count)}."
        )


def check_whole_rows(what):
    """Raises where the active distribution splits the tokens of rows.

    Args:
        what: string, what needs all of them.

    Raises:
        NotImplementedError: there is an axis "sequence" of more than one device.
    """
    distribution = _distribution()
    mesh = distribution and distribution.device_mesh
    if mesh and SEQUENCE_AXIS in mesh.axis_names and axis_size(mesh, SEQUENCE_AXIS) > 1:
        raise NotImplementedError(
            f"{what} needs all tokens of a row, which the axis {SEQUENCE_AXIS!r} of the mesh "
            "splits. Leave this axis out of the mesh, or give attention a `sliding_window`."
        )


def laid_out(tensor, name):
    """A tensor as the layout map of the active distribution wants what has this name.

    A dimension that the devices do not divide, such as a single row, stays whole.
    """
    layout = _layout(name)
    if layout is None or isinstance(tensor, keras.KerasTensor):
        return tensor
    return keras.distribution.distribute_tensor(tensor, where_divided(layout, tensor.shape))


def where_divided(layout, shape):
    """The `keras.distribution.TensorLayout` without the axes that do not divide their dimension."""
    mesh = layout.device_mesh
    axes = [
        axis if axis and size % axis_size(mesh, axis) == 0 else None
        for axis, size in zip(layout.axes, shape, strict=True)
    ]
    return keras.distribution.TensorLayout(axes, mesh)


@contextlib.contextmanager
def any_number_of_rows():
    """Has the active distribution lay out data whose rows its devices do not divide, as whole."""
    distribution = _distribution()
    if distribution is None:
        yield
        return
    get = distribution.get_data_layout
    distribution.get_data_layout = lambda shape: where_divided(get(shape), shape)
    try:
        yield
    finally:
        del distribution.get_data_layout


def state_laid_out(state):
    """The arrays of a state, each as `laid_out` by its path, else split by rows."""
    distribution = _distribution()
    if distribution is None:
        return state
    arrays = []
    for path, array in keras.tree.flatten_with_path(state):
        layout = distribution.get_tensor_layout("/".join(("state", *map(str, path))))
        layout = where_divided(layout or distribution.get_data_layout(array.shape), array.shape)
        arrays.append(keras.distribution.distribute_tensor(array, layout))
    return keras.tree.pack_sequence_as(state, arrays)


def flat_tokens(x):
    """x `[B, T, D]` as `[B * T, D]`, and a function that makes such a tensor `[B, T, D]` again.

    Where devices have parts of rows, tokens are in another order, in which each stays on its own.
    """
    batch, length = ops.shape(x)[:2]
    distribution = _distribution()
    if distribution is None or not _parts_of_rows(distribution, x):
        flat = ops.reshape(x, (-1, x.shape[-1]))
        return flat, lambda y: ops.reshape(y, (batch, length, y.shape[-1]))
    where = distribution.device_mesh.backend_mesh, distribution.batch_dim_name
    flat = _layouts.flatten_tokens(x, *where)
    return flat, lambda y: _layouts.unflatten_tokens(y, (batch, length), *where)


def _parts_of_rows(distribution, x):
    mesh = distribution.device_mesh
    if isinstance(x, keras.KerasTensor) or SEQUENCE_AXIS not in mesh.axis_names:
        return False
    sizes = axis_size(mesh, distribution.batch_dim_name), axis_size(mesh, SEQUENCE_AXIS)
    return all(size % count == 0 for size, count in zip(x.shape, sizes, strict=False))


def axis_of_weights(device_mesh, data):
    """The axis over which weights are spread: of the data, or of the sequence where that is one."""
    spread = SEQUENCE_AXIS in device_mesh.axis_names and axis_size(device_mesh, data) == 1
    return SEQUENCE_AXIS if spread else data


def axis_size(device_mesh, axis):
    """How many devices a mesh has along an axis."""
    return device_mesh.shape[device_mesh.axis_names.index(axis)]


def _distribution():
    return keras.distribution.distribution() if ON_JAX else None


def _layout(name):
    distribution = _distribution()
    return distribution and distribution.get_tensor_layout(name)
