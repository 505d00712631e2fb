"""Kernels on the shards of a mesh and under `jax.vmap`, from the names of their dimensions.

XLA can neither partition nor batch a kernel. In the names of a tensor's dimensions, such as
"B T D", `B` is the batch; one other dimension, channels or heads, may be split or merged as well.
All other dimensions stay whole.
"""

import functools
import math

import jax
import jax.numpy as jnp


def over(mesh):
    """A context in which each kernel runs on every shard of a `jax.sharding.Mesh`."""
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def distributed(kernel, arguments, results, channels):
    """Applies `batch_kernel` and `per_shard`, which have the same parameters."""
    kernel = batch_kernel(kernel, arguments, results, channels)
    return per_shard(kernel, arguments, results, channels)


def per_shard(kernel, arguments, results, channels):
    """Returns a function that runs `kernel` on every shard if a mesh is set (see `over`).

    JAX's `custom_partitioning` does not reach the compiler for TPU (jax issue 38196), so the mesh
    must be known. Its first axis splits the batch, as in `keras.distribution`; all other axes
    together split the channels or the heads. A dimension that is not divisible stays whole. A
    result that lacks a split dimension, such as the gradient of a weight, is summed over the
    shards.

    Args:
        kernel: a function of tensors, some of them None, that returns a tuple of tensors.
        arguments: the names of each tensor's dimensions.
        results: the names of each result's dimensions.
        channels: the names of the dimensions other than `B` that may be split.
    """

    def call(*tensors):
        mesh = jax.sharding.get_abstract_mesh()
        free = [name for name in mesh.axis_names if name not in mesh.manual_axes]
        if not free:
            return kernel(*tensors)
        sizes = {}
        for names, tensor in zip(arguments, tensors, strict=True):
            if tensor is not None:
                sizes |= zip(names.split(), tensor.shape, strict=True)
        split = {
            name: axes
            for name, axes in (("B", free[:1]), *((name, free[1:]) for name in channels))
            if axes and name in sizes and sizes[name] % math.prod(map(mesh.shape.get, axes)) == 0
        }

        def spec(names):
            return jax.P(*(tuple(split.get(name, ())) or None for name in names.split()))

        given = [i for i, tensor in enumerate(tensors) if tensor is not None]

        def local(*shards):
            found = dict(zip(given, shards, strict=True))
            outputs = kernel(*map(found.get, range(len(arguments))))
            return tuple(map(total, results, outputs))

        def total(names, output):
            missing = [axis for of in split.keys() - names.split() for axis in split[of]]
            return jax.lax.psum(output, missing) if missing else output

        on_shards = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=tuple(spec(arguments[i]) for i in given),
            out_specs=tuple(map(spec, results)),
            axis_names=set(free),
            check_vma=False,
        )
        return on_shards(*(tensors[i] for i in given))

    return call


def check_axes(operation, arguments):
    """Raises an error if a tensor, or the mesh that is set, has Explicit axes.

    `jax.make_mesh` makes such axes by default: they require each step of a program to specify the
    sharding of its result, which the operations leave to XLA.
    """
    meshes = [jax.sharding.get_abstract_mesh()]
    for tensor in jax.tree.leaves(arguments):
        if hasattr(tensor, "dtype") and isinstance(tensor, jax.Array):
            meshes.append(jax.typeof(tensor).sharding.mesh)
    for mesh in meshes:
        explicit = [
            name
            for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
            if kind == jax.sharding.AxisType.Explicit
        ]
        if explicit:
            raise NotImplementedError(
                f"`{operation}` takes no mesh with Explicit axes, got {explicit}. Make it with "
                f"`jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto,) * "
                f"{len(mesh.axis_names)})`, or call the operation inside `jax.sharding.auto_axes`."
            )


def batch_kernel(kernel, arguments, results, channels):
    """Returns a function that runs `kernel` once for an axis mapped by `jax.vmap`, if possible.

    The axis is merged into the batch if all mapped tensors and all results have one, else into the
    channels or heads if they all have these, as with several seeds of a model. Otherwise the kernel
    runs for one member after another.

    Args: see `per_shard`.
    """

    @jax.custom_batching.custom_vmap
    def call(*tensors):
        return kernel(*tensors)

    @call.def_vmap
    def _(size, mapped, *tensors):
        mapped = [bool(jax.tree.leaves(m)) and m for m in mapped]
        for name in ("B", *channels):
            mapped_names = (names for names, m in zip(arguments, mapped, strict=True) if m)
            if all(name in names.split() for names in (*mapped_names, *results)):
                joined = functools.partial(_merge_axis, name, size)
                given = map(joined, arguments, tensors, mapped)
                found = call(*given)
                found = map(functools.partial(_split_axis, name, size), results, found)
                return tuple(found), (True,) * len(results)
        moving = [x for x, m in zip(tensors, mapped, strict=True) if m]

        def run_member(members):
            members = iter(members)
            given = (next(members) if m else x for x, m in zip(tensors, mapped, strict=True))
            return call(*given)

        return jax.lax.map(run_member, moving), (True,) * len(results)

    return call


def _merge_axis(name, size, names, tensor, is_mapped):
    """Merges the mapped axis, the first, into the dimension `name`, if the tensor has it."""
    if tensor is None or name not in names.split():
        return tensor
    axis = names.split().index(name)
    if is_mapped:
        tensor = jnp.moveaxis(tensor, 0, axis)
    else:
        tensor = jnp.broadcast_to(
            jnp.expand_dims(tensor, axis), (*tensor.shape[:axis], size, *tensor.shape[axis:])
        )
    joined = size * tensor.shape[axis + 1]
    return tensor.reshape(*tensor.shape[:axis], joined, *tensor.shape[axis + 2 :])


def _split_axis(name, size, names, tensor):
    """The inverse of `_merge_axis`."""
    axis = names.split().index(name)
    shape = *tensor.shape[:axis], size, tensor.shape[axis] // size, *tensor.shape[axis + 1 :]
    return jnp.moveaxis(tensor.reshape(shape), axis, 0)
