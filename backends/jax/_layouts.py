"""Operations over time on the shards of a mesh.

Each shard computes its sequences and channels or heads. XLA would choose the split itself, also
inside the loops over time. Here the batch is split along one axis of the mesh, time along the one
named "sequence", and channels or heads along all others; batch, channels and heads that are not
divisible stay whole. Communication is limited to that of `_sequence` between shards of time, and
one sum of the gradients of tensors that all shards share, such as the weights of a filter.
"""

import functools
import math

import jax
import jax.numpy as jnp

from ..constants import SEQUENCE_AXIS
from ..signatures import SIGNATURES, TOKENS
from . import _sequence, linear_crossentropy
from ._shards import over


def run(operation, function, arguments, mesh, batch_axis):
    """Calls `function(**arguments)` on every shard independently.

    Args:
        operation: string, the operation's name.
        function: an implementation of it.
        arguments: its keyword arguments.
        mesh: a `jax.sharding.Mesh`.
        batch_axis: string, the axis of the mesh that splits the batch.
    """
    manual_axes = jax.sharding.get_abstract_mesh().manual_axes
    if {*mesh.axis_names} <= {*manual_axes}:
        return function(**arguments)  # on one device: the arguments are its shards
    is_free = not manual_axes
    if operation == "linear_crossentropy" and is_free:
        return linear_crossentropy.run_sharded(mesh, batch_axis, **arguments)
    if operation == "top_logits" and is_free:
        return _top_logits(function, mesh, batch_axis, **arguments)
    signature = SIGNATURES.get(operation)
    if signature is None or not signature.is_over_time or not is_free:
        with over(mesh):
            return function(**arguments)
    if batch_axis == SEQUENCE_AXIS:
        raise ValueError(
            f"The mesh axis {SEQUENCE_AXIS!r} splits the time axis, so it cannot split the batch: "
            "give the distribution another `batch_dim_name`, or the axis another name."
        )
    names = (*signature.tensors, "initial_state", "token_kind")
    given = {name: arguments[name] for name in names if arguments.get(name) is not None}
    context = ("initial_state", "token_kind")
    options = {name: x for name, x in arguments.items() if name not in (*given, *context)}
    return _run_sharded(given, operation, function, tuple(options.items()), mesh, batch_axis)


# Compiled: otherwise every eager call would be traced.
@functools.partial(jax.jit, static_argnums=range(1, 6))
def _run_sharded(given, operation, function, options, mesh, batch_axis):
    signature, options, sizes = SIGNATURES[operation], dict(options), {}
    state = signature.state
    names = {**signature.tensors, "initial_state": state, "token_kind": TOKENS}
    names = {name: names[name] for name in given}
    jax.tree.map(
        lambda dims, x: sizes.update(zip(dims.split(), x.shape, strict=True)), names, given
    )
    split = _split(signature.channels, sizes, options, mesh, batch_axis)

    def spec(dims):
        return jax.P(*(split.get(name) for name in dims.split()))

    def local(shard):
        if "T" in split:
            return _sequence.run(
                operation, function, shard, options, SEQUENCE_AXIS, mesh.shape[SEQUENCE_AXIS]
            )
        return function(**shard, **options)

    bounds = options.get("sliding_window"), options.get("capacity")
    if isinstance(state, dict) and "initial_state" not in given and bounds == (None, None):
        state = {}
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(jax.tree.map(spec, names),),
        out_specs=(spec(signature.output), jax.tree.map(spec, state)),
        check_vma=False,
    )(given)


def _top_logits(function, mesh, batch_axis, x, count):
    """Computes `top_logits` of a vocabulary that devices share, each of which sends its largest."""
    axes = _model_axes(mesh, batch_axis)
    num_devices = math.prod(mesh.shape[name] for name in axes)
    size = x.shape[-1] // num_devices
    if x.shape[-1] % num_devices or count > size:
        return function(x=x, count=count)

    def local(x):
        values, ids, log_sum = function(x=x, count=count)
        if num_devices == 1:
            return values, ids, log_sum
        parts = values, ids + jax.lax.axis_index(axes) * size, log_sum[:, None]
        # One message, of integers with the bits of the floats.
        bits = [jax.lax.bitcast_convert_type(part, jnp.int32) for part in parts]
        found = jax.lax.all_gather(jnp.concatenate(bits, axis=1), axes, axis=1)
        values, ids, log_sums = jnp.split(found, (count, 2 * count), axis=2)
        values, log_sums = (
            jax.lax.bitcast_convert_type(array, jnp.float32) for array in (values, log_sums)
        )
        best, order = jax.lax.top_k(values.reshape(x.shape[0], -1), count)
        ids = jnp.take_along_axis(ids.reshape(x.shape[0], -1), order, axis=1)
        return best, ids, jax.nn.logsumexp(log_sums[..., 0], axis=1)

    batch = batch_axis if x.shape[0] % mesh.shape[batch_axis] == 0 else None
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=jax.P(batch, axes),
        out_specs=(jax.P(batch),) * 3,
        check_vma=False,
    )(x)


def _model_axes(mesh, batch_axis):
    return tuple(name for name in mesh.axis_names if name not in (batch_axis, SEQUENCE_AXIS))


def _split(channels, sizes, options, mesh, batch_axis):
    """Returns {dimension: axes of the mesh that split it}."""
    other_axes = _model_axes(mesh, batch_axis)
    count = math.prod(mesh.shape[name] for name in other_axes)
    split = {"B": batch_axis} if sizes["B"] % mesh.shape[batch_axis] == 0 else {}
    if channels and sizes[channels[0]] % count == 0:
        split |= {name: other_axes for name in channels if sizes[name] % count == 0}
        if "G" not in split and sizes.get("G", 1) > 1:
            del split["H"]  # query heads of a shard would share keys unevenly
    parts = mesh.shape.get(SEQUENCE_AXIS, 1)
    # A single token, as in decoding, is not split.
    if parts > 1 and sizes["T"] > 1 and not _is_short(sizes, options):
        if sizes["T"] % parts:
            raise ValueError(
                f"Sequences of {sizes['T']} tokens cannot be split along the mesh axis "
                f"{SEQUENCE_AXIS!r} of size {parts}. Pad sequences to a multiple of it, such as "
                f"{sizes['T'] + -sizes['T'] % parts} tokens."
            )
        split["T"] = SEQUENCE_AXIS
    return split


def _is_short(sizes, options):
    """Returns True if the KV cache shows that sequences are shorter than the window."""
    window = options.get("sliding_window")
    return window is not None and sizes.get("C", window) < window - 1


@functools.partial(jax.jit, static_argnums=(1, 2))
def flatten_tokens(x, mesh, batch_axis):
    """Reshapes x [B, T, D] to [B * T, D], in an order in which no token leaves its device.

    In row-major order, devices would have to exchange the tokens of sequences that are split along
    both axes.
    """
    return _map_tokens(lambda x: x.reshape(-1, x.shape[-1]), mesh, batch_axis, 3)(x)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def unflatten_tokens(y, shape, mesh, batch_axis):
    """The inverse of `flatten_tokens`, for sequences of shape [B, T]."""
    parts = mesh.shape[batch_axis], mesh.shape[SEQUENCE_AXIS]
    local = tuple(size // count for size, count in zip(shape, parts, strict=True))
    return _map_tokens(lambda y: y.reshape(*local, y.shape[-1]), mesh, batch_axis, 2)(y)


def _map_tokens(function, mesh, batch_axis, rank):
    specs = {3: jax.P(batch_axis, SEQUENCE_AXIS), 2: jax.P((batch_axis, SEQUENCE_AXIS))}
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=specs[rank],
        out_specs=specs[5 - rank],
        axis_names={batch_axis, SEQUENCE_AXIS},
        check_vma=False,
    )
