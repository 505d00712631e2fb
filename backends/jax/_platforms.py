"""The choice between kernels and plain JAX that is made when a program is lowered.

JAX traces a program before it is known where it runs. All implementations that may serve are
traced, and the one for the platform is compiled.
"""

import functools

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from ..constants import LOWEST_CAPABILITY
from . import _gpu

PLATFORMS = {"pallas": "tpu", "triton": "cuda"}  # where an implementation runs; others everywhere


@functools.cache
def lowered(plain, **kernels):
    """An operation that runs the kernel of the platform that it is lowered for, else plain JAX.

    plain: a module with `forward`, `backward` and `operation`. kernels: {platform: a module that
    has the first two, or whose `kernels` have them}. In a module with `HAS_RESIDUALS`, what
    `forward` returns last is for `backward` alone, and each implementation reads its own. Without a
    `backward`, modules have the operation's function alone, or plain JAX makes it `with_kernels`.
    """
    if hasattr(plain, "with_kernels"):
        return plain.with_kernels(kernels)
    if not hasattr(plain, "backward"):
        name = plain.__name__.rpartition(".")[2]
        return _of_forwards(
            {of: getattr(module, name) for of, module in {**kernels, "default": plain}.items()}
        )
    forwards, backwards = (
        {p: getattr(getattr(of, "kernels", of), name) for p, of in kernels.items()}
        | {"default": getattr(plain, name)}
        for name in ("forward", "backward")
    )
    if getattr(plain, "HAS_RESIDUALS", False):
        return plain.operation(_keeping(forwards), _with_own(backwards))
    return plain.operation(_dependent(forwards), _dependent(backwards))


def _of_forwards(functions):
    """A function of keyword arguments, of which arrays are operands and all others constants."""

    @functools.partial(jax.jit, static_argnums=1)
    def program(arrays, others):
        def run(of, *given):
            return functions[of](**dict(zip(arrays, given, strict=True)), **dict(others))

        return by_platform(
            {of: functools.partial(run, of) for of in functions}, tuple(arrays.values())
        )

    def function(**arguments):
        arrays = {name: x for name, x in arguments.items() if hasattr(x, "dtype")}
        others = {name: x for name, x in arguments.items() if name not in arrays}
        return program(arrays, tuple(others.items()))

    return function


def _dependent(functions):
    def function(*arguments, **options):
        return by_platform(
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

        return by_platform({of: functools.partial(run, of) for of in given}, arguments)

    return function


def _with_own(functions):
    """The same of what reads what was kept, the one dict among its arguments."""

    def function(*arguments, **options):
        def run(of, *arguments):
            own = (x[of] if isinstance(x, dict) else x for x in arguments)
            return functions[of](*own, **options)

        return by_platform({of: functools.partial(run, of) for of in functions}, arguments)

    return function


def by_platform(functions, arguments):
    """What the function for the platform returns; {platform: function}, "default" for others.

    `jax.lax.platform_dependent` would do for one platform. A program that is exported for several
    has all of its branches lowered for each of them, which a kernel cannot be.
    """
    branches = []
    for of, function in functions.items():
        jaxpr, results = jax.make_jaxpr(function, return_shape=True)(*arguments)
        branches.append((of, jaxpr))
    found = _chosen.bind(*jax.tree.leaves(arguments), branches=tuple(branches))
    return jax.tree.unflatten(jax.tree.structure(results), found)


_chosen = Primitive("keras_recurrent_by_platform")
_chosen.multiple_results = True


@_chosen.def_abstract_eval
def _(*_, branches):
    return dict(branches)["default"].out_avals


def _batched(arrays, axes, *, branches):
    functions = {of: jax.vmap(jaxpr_as_fun(jaxpr), tuple(axes)) for of, jaxpr in branches}
    found = by_platform(functions, arrays)
    return found, [0] * len(found)


batching.primitive_batchers[_chosen] = _batched


def _differentiated(primals, tangents, *, branches):
    """Kernels have no derivatives of their own: those of a pass itself are plain JAX's."""
    plain = jaxpr_as_fun(dict(branches)["default"])
    return jax.jvp(plain, tuple(primals), tuple(map(ad.instantiate_zeros, tangents)))


ad.primitive_jvps[_chosen] = _differentiated


def _lower(platform, ctx, *operands, branches):
    branches = dict(branches)
    if platform == "cuda" and not _gpu.suffices():
        platform = "default"
    chosen = branches.get(platform, branches["default"])
    return mlir.lower_fun(jaxpr_as_fun(chosen), multiple_results=True)(ctx, *operands)


mlir.register_lowering(_chosen, functools.partial(_lower, "default"))
for _platform in PLATFORMS.values():
    mlir.register_lowering(_chosen, functools.partial(_lower, _platform), platform=_platform)


def is_traced(arguments):
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arguments))


def elsewhere(arguments, platform):
    """Why a kernel for a platform cannot run on these tensors; None if it can, or if it is unknown.

    It is unknown of the tensors in a program that is being traced: they are on no device yet, and
    arrays beside them become constants of the program.
    """
    if is_traced(arguments):
        return None
    for tensor in jax.tree.leaves(arguments):
        if isinstance(tensor, jax.Array) and not isinstance(tensor, jax.core.Tracer):
            device = next(iter(tensor.devices()))
            on = {"gpu": "cuda"}.get(device.platform, device.platform)
            if on == platform == "cuda":
                capability = tuple(map(int, device.compute_capability.split(".")))
                if capability < LOWEST_CAPABILITY:
                    lowest = ".".join(map(str, LOWEST_CAPABILITY))
                    return f"needs compute capability {lowest}, got {device.compute_capability}"
            if on != platform:
                name = platform.upper()
                return f"runs where a program is lowered for {name}; these tensors are on {on}"
    return None
