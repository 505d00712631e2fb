"""The choice between kernels and plain JAX that is made when a program is lowered.

JAX traces a program before it is known where it runs. All implementations that may serve are
traced, and the one for the platform is compiled.
"""

import functools

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

from keras_recurrent.backends.jax import _gpu

PLATFORMS = {"pallas": "tpu", "triton": "cuda"}  # where an implementation runs; others everywhere


@functools.cache
def lowered(plain, **kernels):
    """An operation that runs the kernel of the platform that it is lowered for, else plain JAX.

    plain: a module with `forward`, `backward` and `operation`. kernels: {platform: a module that
    has the first two, or whose `kernels` have them}. In a module with `KEEPS`, what `forward`
    returns last is for `backward` alone, and each implementation reads its own.
    """
    forwards, backwards = (
        {p: getattr(getattr(of, "kernels", of), name) for p, of in kernels.items()}
        | {"default": getattr(plain, name)}
        for name in ("forward", "backward")
    )
    if getattr(plain, "KEEPS", False):
        return plain.operation(_keeping(forwards), _with_own(backwards))
    return plain.operation(_dependent(forwards), _dependent(backwards))


def _dependent(functions):
    def function(*arguments, **options):
        return _by_platform(
            {of: functools.partial(f, **options) for of, f in functions.items()}, arguments
        )

    return function


def _keeping(functions):
    """The results, and a dict of what each implementation keeps: zeros for all that do not run."""

    def function(*arguments, **options):
        given = {of: functools.partial(f, **options) for of, f in functions.items()}
        kept = {of: jax.eval_shape(f, *arguments)[1] for of, f in given.items()}

        def zeros(of):
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), kept[of])

        def run(of, *arguments):
            results, own = given[of](*arguments)
            return results, {o: own if o == of else zeros(o) for o in given}

        return _by_platform({of: functools.partial(run, of) for of in given}, arguments)

    return function


def _with_own(functions):
    """The same of what reads, last but for the gradient of the output, what was kept."""

    def function(*arguments, **options):
        def run(of, *arguments):
            *arguments, kept, d_output = arguments
            return functions[of](*arguments, kept[of], d_output, **options)

        return _by_platform({of: functools.partial(run, of) for of in functions}, arguments)

    return function


def _by_platform(functions, arguments):
    if "cuda" in functions:
        functions["cuda"] = _where_capable(functions["cuda"], functions["default"])
    return jax.lax.platform_dependent(*arguments, **functions)


def _where_capable(kernel, plain):
    """`kernel` where a program is lowered for a GPU that has what kernels need, else `plain`."""

    def call(*arguments):
        kernel_jaxpr, shapes = jax.make_jaxpr(kernel, return_shape=True)(*arguments)
        plain_jaxpr = jax.make_jaxpr(plain)(*arguments)
        found = _capable.bind(*jax.tree.leaves(arguments), kernel=kernel_jaxpr, plain=plain_jaxpr)
        return jax.tree.unflatten(jax.tree.structure(shapes), found)

    return call


_capable = Primitive("keras_recurrent_where_capable")
_capable.multiple_results = True


@_capable.def_abstract_eval
def _(*_, kernel, plain):
    return kernel.out_avals


def _batched(arrays, axes, *, kernel, plain):
    kernel, plain = (jax.vmap(jaxpr_as_fun(of), tuple(axes)) for of in (kernel, plain))
    found = _where_capable(kernel, plain)(*arrays)
    return found, [0] * len(found)


batching.primitive_batchers[_capable] = _batched


def _lower(ctx, *operands, kernel, plain):
    chosen = kernel if _gpu.suffices() else plain
    return mlir.lower_fun(jaxpr_as_fun(chosen), multiple_results=True)(ctx, *operands)


mlir.register_lowering(_capable, _lower)


def elsewhere(arguments, platform):
    """Why a kernel for a platform cannot run on these tensors; None if it can, or if it is unknown.

    It is unknown of the tensors in a program that is being traced: they are on no device yet.
    """
    for tensor in jax.tree.leaves(arguments):
        if isinstance(tensor, jax.Array) and not isinstance(tensor, jax.core.Tracer):
            device = next(iter(tensor.devices()))
            on = {"gpu": "cuda"}.get(device.platform, device.platform)
            if on == platform == "cuda" and float(device.compute_capability) * 10 < _gpu.LOWEST:
                return f"needs compute capability 8.0, got {device.compute_capability}"
            if on != platform:
                name = platform.upper()
                return f"runs where a program is lowered for {name}; these tensors are on {on}"
    return None
