"""Where the kernels run: with a JAX that has what they use, on TPU, on each shard by itself.

`keras_recurrent/dispatch.py` imports this file whatever JAX has: it reads nothing of Pallas.
"""

import functools
import importlib

import jax

# All that the files of this folder read of `jax.experimental.pallas`; a test keeps it complete.
PALLAS_NAMES = (
    "BlockSpec",
    "cdiv",
    "ds",
    "multiple_of",
    "pallas_call",
    "program_id",
    "tpu.CompilerParams",
    "tpu.SMEM",
    "tpu.VMEM",
    "tpu.get_tpu_info",
    "tpu.is_tpu_device",
    "tpu.roll",
    "when",
)


@functools.cache
def unavailable():
    """Why no kernel of this folder can be built with the installed JAX; None if they can."""
    for name in PALLAS_NAMES:
        module, _, attribute = f"jax.experimental.pallas.{name}".rpartition(".")
        try:
            found = hasattr(importlib.import_module(module), attribute)
        except ImportError as error:
            return f"JAX {jax.__version__} cannot import `{module}`: {error}"
        if not found:
            return f"needs `{module}.{attribute}`, which JAX {jax.__version__} does not have"
    return None


@functools.cache
def either(pallas, plain):
    """An operation that runs `pallas` where it is lowered for TPU and `plain` elsewhere.

    Both are modules with `forward` and `backward`.
    """
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
    """Why a kernel for TPU cannot run on these tensors; None if it can or if that is unknown.

    It is unknown of the tensors in a program that is being traced: they are on no device yet.
    """
    for tensor in jax.tree.leaves(arguments):
        if isinstance(tensor, jax.Array) and not isinstance(tensor, jax.core.Tracer):
            platform = next(iter(tensor.devices())).platform
            if platform != "tpu":
                return f"runs where a program is lowered for TPU; these tensors are on {platform}"
    return None


def over(mesh):
    """A context in which each kernel runs on every shard of a `jax.sharding.Mesh`."""
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def per_shard(kernel, arguments, results, channels="d"):
    """`kernel`, run on every shard by itself where a mesh is set (see `over`).

    XLA cannot partition a kernel, and JAX's `custom_partitioning` does not reach the compiler for
    TPU (jax issue 38196), so the mesh has to be known. Its first axis splits the batch, as in
    `keras.distribution`; all other axes together split the channels or the heads. A dimension
    that its axes do not divide stays whole.

    Args:
        kernel: a function of tensors, some of them None, that returns a tuple of tensors.
        arguments: a name for each dimension of each tensor, such as `"b t d"`.
        results: the same for each result.
        channels: the name of the dimension, other than `b`, that may be split.
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
