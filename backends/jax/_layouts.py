"""Operations over time on the shards of a mesh: each shard computes its rows and channels or heads.

XLA would choose by itself what to split, also inside the loops over time. Here the batch is split
along one axis of the mesh, time along the one named "sequence", and channels or heads along all
others; of batch, channels and heads, what these do not divide stays whole. Nothing is exchanged but
what `_sequence` says of shards of time, and the gradients of what all shards share, such as the
weights of a filter, once.
"""

import functools
import math
from typing import Any, NamedTuple

import jax

from ..constants import SEQUENCE_AXIS
from . import _sequence, linear_crossentropy
from ._shards import over


class _Dimensions(NamedTuple):
    """Names of the dimensions: "b" is the batch, those in `split` are channels or heads."""

    tensors: dict[str, Any]
    output: str
    state: Any
    split: tuple[str, ...] = ("d",)


_OF_ATTENTION = {"key": "b c g k", "value": "b c g v", "position": "b"}
_BY_HEADS = {"q": "b t h k", "k": "b t h k", "v": "b t h v"}
_DIMENSIONS = {
    "linear_scan": _Dimensions({"x": "b t d", "log_a": "b t d"}, "b t d", "b d"),
    # The real parts of all channels come before the imaginary ones.
    "complex_linear_scan": _Dimensions(
        {"x": "b t c", "log_a": "b t d", "phase": "b t d"}, "b t c", "b c", ()
    ),
    "rg_lru": _Dimensions(
        {"x": "b t d", "gate_a": "b t d", "gate_x": "b t d", "a_logit": "d"}, "b t d", "b d"
    ),
    "causal_conv1d": _Dimensions({"x": "b t d", "kernel": "w d", "bias": "d"}, "b t d", "b w d"),
    "gated_linear_attention": _Dimensions(
        {**_BY_HEADS, "log_f": "b t h k"}, "b t h v", "b h k v", ("h",)
    ),
    "lightning_attention": _Dimensions(
        {**_BY_HEADS, "log_decay": "h"}, "b t h v", "b h k v", ("h",)
    ),
    "sliding_window_attention": _Dimensions(
        {"q": "b t h k", "k": "b t g k", "v": "b t g v"}, "b t h v", _OF_ATTENTION, ("h", "g")
    ),
}


def run(operation, function, arguments, mesh, batch_axis):
    """What `function(**arguments)` returns, computed on every shard by itself.

    Args:
        operation: string, the operation's name.
        function: an implementation of it.
        arguments: its keyword arguments.
        mesh: a `jax.sharding.Mesh`.
        batch_axis: string, the axis of the mesh that splits the batch.
    """
    is_free = not jax.sharding.get_abstract_mesh().manual_axes
    if operation == "linear_crossentropy" and is_free:
        return linear_crossentropy.on_shards(mesh, batch_axis, **arguments)
    if operation not in _DIMENSIONS or not is_free:
        with over(mesh):
            return function(**arguments)
    if batch_axis == SEQUENCE_AXIS:
        raise ValueError(
            f"The mesh axis {SEQUENCE_AXIS!r} splits the time axis, so it cannot split the batch: "
            "give the distribution another `batch_dim_name`, or the axis another name."
        )
    of = _DIMENSIONS[operation]
    names = (*of.tensors, "initial_state", "token_kind")
    given = {name: arguments[name] for name in names if arguments.get(name) is not None}
    context = ("initial_state", "token_kind")
    options = {name: x for name, x in arguments.items() if name not in (*given, *context)}
    return _on_shards(given, operation, function, tuple(options.items()), mesh, batch_axis)


# Compiled, as an eager call would otherwise be traced each time.
@functools.partial(jax.jit, static_argnums=range(1, 6))
def _on_shards(given, operation, function, options, mesh, batch_axis):
    of, options, sizes = _DIMENSIONS[operation], dict(options), {}
    names = {**of.tensors, "initial_state": of.state, "token_kind": "b t"}
    names = {name: names[name] for name in given}
    jax.tree.map(
        lambda dims, x: sizes.update(zip(dims.split(), x.shape, strict=True)), names, given
    )
    split = _split(of, sizes, options, mesh, batch_axis)

    def spec(dims):
        return jax.P(*(split.get(name) for name in dims.split()))

    def local(shard):
        if "t" in split:
            return _sequence.run(
                operation, function, shard, options, SEQUENCE_AXIS, mesh.shape[SEQUENCE_AXIS]
            )
        return function(**shard, **options)

    state, bounds = of.state, (options.get("sliding_window"), options.get("capacity"))
    if state is _OF_ATTENTION and "initial_state" not in given and bounds == (None, None):
        state = {}
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(jax.tree.map(spec, names),),
        out_specs=(spec(of.output), jax.tree.map(spec, state)),
        check_vma=False,
    )(given)


def _split(of, sizes, options, mesh, batch_axis):
    """The axes of the mesh, by the names of the dimensions that they split."""
    others = tuple(name for name in mesh.axis_names if name not in (batch_axis, SEQUENCE_AXIS))
    count = math.prod(mesh.shape[name] for name in others)
    split = {"b": batch_axis} if sizes["b"] % mesh.shape[batch_axis] == 0 else {}
    if of.split and sizes[of.split[0]] % count == 0:
        split |= {name: others for name in of.split if sizes[name] % count == 0}
        if "g" not in split and sizes.get("g", 1) > 1:
            del split["h"]  # a shard's heads of queries would not share the keys equally
    parts = mesh.shape.get(SEQUENCE_AXIS, 1)
    # One token, a step of generation, is seen by all.
    if parts > 1 and sizes["t"] > 1 and not _is_short(sizes, options):
        if sizes["t"] % parts:
            raise ValueError(
                f"Sequences of {sizes['t']} tokens cannot be split along the mesh axis "
                f"{SEQUENCE_AXIS!r} of size {parts}. Pad sequences to a multiple of it, such as "
                f"{sizes['t'] + -sizes['t'] % parts} tokens."
            )
        split["t"] = SEQUENCE_AXIS
    return split


def _is_short(sizes, options):
    """Whether a state of attention, made for rows shorter than the window, tells that they are."""
    window = options.get("sliding_window")
    return window is not None and sizes.get("c", window) < window - 1


@functools.partial(jax.jit, static_argnums=(1, 2))
def flat_tokens(x, mesh, batch_axis):
    """x [B, T, D] as [B * T, D] in another order, in which no token leaves its device.

    In their own order, tokens of rows that are split along both axes would have to be exchanged.
    """
    return _by_tokens(lambda x: x.reshape(-1, x.shape[-1]), mesh, batch_axis, 3)(x)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def rows_of_tokens(y, shape, mesh, batch_axis):
    """The inverse of `flat_tokens`, for rows of this shape [B, T]."""
    parts = mesh.shape[batch_axis], mesh.shape[SEQUENCE_AXIS]
    local = tuple(size // count for size, count in zip(shape, parts, strict=True))
    return _by_tokens(lambda y: y.reshape(*local, y.shape[-1]), mesh, batch_axis, 2)(y)


def _by_tokens(function, mesh, batch_axis, rank):
    by_rank = {3: jax.P(batch_axis, SEQUENCE_AXIS), 2: jax.P((batch_axis, SEQUENCE_AXIS))}
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=by_rank[rank],
        out_specs=by_rank[5 - rank],
        axis_names={batch_axis, SEQUENCE_AXIS},
        check_vma=False,
    )
