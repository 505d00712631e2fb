"""Operations over time on the shards of a mesh: each shard computes its rows and channels or heads.

XLA would choose by itself what to split, also inside the loops over time. Here the batch is split
along one axis of the mesh, and channels or heads along all others; a dimension that these do not
divide stays whole. Nothing is exchanged but the gradients of what all shards share, such as the
weights of a filter, once.
"""

import math
from typing import Any, NamedTuple

import jax

from keras_recurrent.backends.jax._shards import over


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
    if operation not in _DIMENSIONS or jax.sharding.get_abstract_mesh().manual_axes:
        with over(mesh):
            return function(**arguments)
    of = _DIMENSIONS[operation]
    names = {**of.tensors, "initial_state": of.state, "token_kind": "b t"}
    given = {name: arguments[name] for name in names if arguments.get(name) is not None}
    options = {name: x for name, x in arguments.items() if name not in given}
    sizes = {}
    for name, tensor in given.items():
        jax.tree.map(
            lambda dims, x: sizes.update(zip(dims.split(), x.shape, strict=True)),
            names[name],
            tensor,
        )
    split = _split(of, sizes, mesh, batch_axis)

    def spec(dims):
        return jax.P(*(split.get(name) for name in dims.split()))

    def local(shards):
        return function(**shards, **options)

    state = of.state
    bounds = ("initial_state", "sliding_window", "capacity")
    if state is _OF_ATTENTION and all(arguments.get(name) is None for name in bounds):
        state = {}
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=({name: jax.tree.map(spec, names[name]) for name in given},),
        out_specs=(spec(of.output), jax.tree.map(spec, state)),
        check_vma=False,
    )(given)


def _split(of, sizes, mesh, batch_axis):
    """The axes of the mesh, by the names of the dimensions that they split."""
    others = tuple(name for name in mesh.axis_names if name != batch_axis)
    count = math.prod(mesh.shape[name] for name in others)
    split = {"b": batch_axis} if sizes["b"] % mesh.shape[batch_axis] == 0 else {}
    if of.split and sizes[of.split[0]] % count == 0:
        split |= {name: others for name in of.split if sizes[name] % count == 0}
        if "g" not in split and sizes.get("g", 1) > 1:
            del split["h"]  # a shard's heads of queries would not share the keys equally
    return split
