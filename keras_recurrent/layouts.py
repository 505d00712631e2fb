"""Where weights, activations and states lie on several devices, for `keras.distribution`."""

import math

import keras


def layout_map_with_axes(device_mesh, model_parallel_dim_name, data_parallel_dim_name):
    """A `keras.distribution.LayoutMap` of what all families share, once the mesh has these axes.

    Beside those of weights it has names that the networks ask for, by `laid_out`: `hidden_states`,
    the residual stream `[B, T, hidden_dim]`; `logits`; and `state/...`, the arrays of a state.

    Raises:
        ValueError: `device_mesh` is no mesh or lacks one of the axes.
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
                f"{device_mesh.axis_names}. Received: {name!r}"
            )
    layout_map = keras.distribution.LayoutMap(device_mesh)
    layout_map["token_embedding/embeddings"] = (model, data)
    layout_map["hidden_states"] = (data, None, None)
    layout_map["logits"] = (data, None, model)
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


def state_laid_out(state):
    """The arrays of a state, each as `laid_out` by its path, else split by rows."""
    distribution = keras.distribution.distribution()
    if distribution is None:
        return state
    arrays = []
    for path, array in keras.tree.flatten_with_path(state):
        layout = distribution.get_tensor_layout("/".join(("state", *map(str, path))))
        layout = where_divided(layout or distribution.get_data_layout(array.shape), array.shape)
        arrays.append(keras.distribution.distribute_tensor(array, layout))
    return keras.tree.pack_sequence_as(state, arrays)


def axis_size(device_mesh, axis):
    """How many devices a mesh has along an axis."""
    return device_mesh.shape[device_mesh.axis_names.index(axis)]


def _layout(name):
    distribution = keras.distribution.distribution()
    return distribution and distribution.get_tensor_layout(name)
