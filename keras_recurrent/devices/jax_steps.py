"""Fused decoding steps on the devices of a mesh, for tensor-parallel generation on JAX.

The first weights are split by columns, so each device computes some heads or channels. The last
weight is split by rows, and the partial outputs are summed over devices: one sum `[B, D]` for the
layer that mixes tokens, and one for the layer that mixes channels. Embeddings take one more sum.
"""

import contextlib
import threading

import keras
from keras import ops

from keras_recurrent.backends.constants import SEQUENCE_AXIS
from keras_recurrent.devices.jax_layouts import active_distribution, axis_size, state_layouts

if keras.config.backend() == "jax":
    import jax
    import jax.numpy as jnp

_scope = threading.local()  # has `axis`: the axis of the mesh that splits weights, or None


def unsupported_reason(block):
    """Reason why the step of a block cannot run on the active distribution, or None."""
    distribution = active_distribution()
    if distribution is None:
        return None
    axes, batch = _weight_axes(block.variables), distribution.batch_dim_name
    of_tokens = distribution.get_tensor_layout("tokens")
    if axes and (of_tokens is None or of_tokens.axes[0] != batch):
        return (
            f"the layout map must be from `get_layout_map`, with {batch!r} as "
            "`data_parallel_dim_name`"
        )
    if axes & {batch, SEQUENCE_AXIS} or len(axes) > 1:
        return (
            f"weights must be split along the model axis only, and are split along {sorted(axes)}"
        )
    return None


def variable_axes(variable):
    """Returns the axis of more than one device that splits each dimension of a variable, or None.

    Returns an empty tuple without a distribution.
    """
    distribution = active_distribution()
    if distribution is None:
        return ()
    mesh = distribution.device_mesh
    axes = distribution.get_variable_layout(variable).axes
    return tuple(axis if axis and axis_size(mesh, axis) > 1 else None for axis in axes)


def _weight_axes(variables):
    return {axis for variable in variables for axis in variable_axes(variable)} - {None}


def take_rows(table, ids):
    """Returns rows of a table whose rows are split among devices, or None if they are not.

    Each device reads the rows that it has, and one sum over devices completes the result. XLA would
    gather the whole table on each device for a single id, in each decoding step.

    Args:
        table: a variable `[V, D]`.
        ids: integers `[B, T]`, from 0 to V - 1.

    Returns:
        `[B, T, D]` in the dtype of the table, or None.
    """
    axis, *further = variable_axes(table) or (None,)
    if axis is None or any(further):
        return None
    distribution = active_distribution()
    batch = _sequence_spec(distribution)

    def take_on_device(rows, ids):
        local = ids.astype("int32") - jax.lax.axis_index(axis) * rows.shape[0]
        is_local = jnp.logical_and(local >= 0, local < rows.shape[0])
        found = jnp.take(rows, local, axis=0, mode="clip")
        return jax.lax.psum(jnp.where(is_local[..., None], found, 0), axis)

    return jax.shard_map(
        take_on_device,
        mesh=distribution.device_mesh.backend_mesh,
        in_specs=(jax.P(axis), batch(ids)),
        out_specs=batch(ids),
        check_vma=False,
    )(table.value, ids)


def _sequence_spec(distribution):
    """Returns a function of an array `[B, ...]` that returns how devices split it."""
    axis = distribution.batch_dim_name
    parts = axis_size(distribution.device_mesh, axis)
    return lambda array: jax.P(axis if array.shape[0] % parts == 0 else None)


def run(block, x, tokens, state, **kwargs):
    """Calls `block.array_step` with these arguments on each device, with its part of the weights.

    Args:
        block: a layer for which `unsupported_reason` is None. Its `array_step` returns an output
            like x and a state like `state`.
        x: `[B, D]`, which no axis for the model splits, like the output.
        tokens: the `Tokens` of the step.
        state: a dict of arrays, split as by `apply_state_layout`.
        **kwargs: further arrays, whole on each device.
    """
    distribution = active_distribution()
    if distribution is None:
        return block.array_step(x, tokens, state, **kwargs)
    variables, sequence_spec = block.variables, _sequence_spec(distribution)

    def step_on_device(values, x, tokens, state, kwargs):
        (axis,) = _weight_axes(variables) or (None,)
        with keras.StatelessScope() as scope, _split_along(axis):
            for variable, value in zip(variables, values, strict=True):
                scope.add_update((variable, value))
            return block.array_step(x, tokens, state, **kwargs)

    layouts = state_layouts({"temporal_block": state})["temporal_block"]
    state_specs = keras.tree.map_structure(lambda layout: jax.P(*layout.axes), layouts)
    return jax.shard_map(
        step_on_device,
        mesh=distribution.device_mesh.backend_mesh,
        in_specs=(
            [jax.P(*variable_axes(variable)) for variable in variables],
            sequence_spec(x),
            jax.tree.map(sequence_spec, tokens),
            state_specs,
            jax.P(),
        ),
        out_specs=(sequence_spec(x), state_specs),
        check_vma=False,
    )([variable.value for variable in variables], x, tokens, state, kwargs)


@contextlib.contextmanager
def _split_along(axis):
    before, _scope.axis = _axis(), axis
    try:
        yield
    finally:
        _scope.axis = before


def _axis():
    return getattr(_scope, "axis", None)


def has_part(variable, dimension):
    """Returns True inside `run` if a device has a part of this dimension of a variable."""
    if _axis() is None:
        return False
    return ops.convert_to_tensor(variable).shape[dimension] != variable.shape[dimension]


def local_part(x, size):
    """Returns this device's `size` channels of the last axis of x.

    Returns x unchanged outside `run`, or if x already has `size` channels.
    """
    if _axis() is None or x is None:
        return x
    x = ops.convert_to_tensor(x)
    if x.shape[-1] == size:
        return x
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(_axis()) * size, size, -1)


def sum_over_devices(x):
    """Returns the sum of x over the devices that have parts of the weights, inside `run`."""
    return jax.lax.psum(x, _axis())
