"""Where the kernels run: programs lowered for TPU, each shard of a tensor by itself."""

import functools

import jax


@functools.cache
def either(pallas, plain):
    """The operation of two modules: Pallas where a program is lowered for TPU, plain elsewhere."""
    return plain.operation(
        _on_tpu(pallas.forward, plain.forward), _on_tpu(pallas.backward, plain.backward)
    )


def _on_tpu(kernel, plain):
    def function(*arguments, **options):
        return jax.lax.platform_dependent(
            *arguments,
            tpu=functools.partial(kernel, **options),
            default=functools.partial(plain, **options),
        )

    return function


def elsewhere(arguments):
    """Why a kernel for TPU cannot run on these tensors; None if it can, or if that is not known.

    A tensor without a value, in a program that is traced, is on no device yet.
    """
    for tensor in jax.tree.leaves(arguments):
        if isinstance(tensor, jax.Array) and not isinstance(tensor, jax.core.Tracer):
            platform = next(iter(tensor.devices())).platform
            if platform != "tpu":
                return f"runs where a program is lowered for TPU; these tensors are on {platform}"
    return None


def over(mesh):
    """A context in which the kernels run on the shards of a `jax.sharding.Mesh`."""
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def per_shard(kernel, arguments, results, channels="d"):
    """`kernel` on every shard by itself, where there is an ambient mesh.

    XLA cannot split a kernel, and JAX's `custom_partitioning` does not reach the compiler for
    TPU (jax issue 38196): so the mesh has to be known. Its first axis splits the batch, as in
    `keras.distribution`, and the others together split channels, or heads; a size that an axis
    does not divide stays whole.

    Args:
        kernel: a function of tensors, some of them None, that returns a tuple of tensors.
        arguments: the letters of each tensor's dimensions, such as `"b t d"`.
        results: those of each result.
        channels: the letter of the dimension that may be split beside `b`.
    """

    def call(*tensors):
        mesh = jax.sharding.get_abstract_mesh()
        free = [name for name in mesh.axis_names if name not in mesh.manual_axes]
        if not free:
            return kernel(*tensors)
        sizes = {}
        for letters, tensor in zip(arguments, tensors, strict=True):
            if tensor is not None:
                sizes |= zip(letters.split(), tensor.shape, strict=True)
        split = {
            letter: axes
            for letter, axes in (("b", free[:1]), (channels, free[1:]))
            if sizes[letter] % _count(mesh, axes) == 0
        }

        def spec(letters):
            return jax.P(*(tuple(split.get(letter, ())) or None for letter in letters.split()))

        given = [i for i, tensor in enumerate(tensors) if tensor is not None]

        def local(*shards):
            found = dict(zip(given, shards, strict=True))
            return tuple(kernel(*map(found.get, range(len(arguments)))))

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


def _count(mesh, axes):
    count = 1
    for name in axes:
        count *= mesh.shape[name]
    return count
