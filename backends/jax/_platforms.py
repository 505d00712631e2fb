"""Choice between kernels and plain JAX when a program is lowered.

JAX traces a program before the platform is known. All eligible implementations are traced, and the
one for the platform is compiled.
"""

import functools

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from ..constants import LOWEST_CAPABILITY
from . import _gpu

PLATFORMS = {"pallas": "tpu", "triton": "cuda"}  # of implementations that run on one platform only


@functools.cache
def choose_at_lowering(plain, **kernels):
    """Returns an operation that runs the kernel for the platform it is lowered for, else plain JAX.

    Each pass is chosen independently, or the whole operation if plain JAX has no passes.

    Args:
        plain: the `Kernel` of plain JAX.
        kernels: {platform: another `Kernel` of the operation}.
    """
    candidates = {**kernels, "default": plain}
    if plain.build is None:
        return _choose_function({name: kernel.function for name, kernel in candidates.items()})
    choosers: tuple = (_choose_pass,) * len(plain.passes)
    if plain.has_residuals:
        choosers = _collect_residuals, _select_residual
    return plain.build(
        *(
            choose({name: kernel.passes[i] for name, kernel in candidates.items()})
            for i, choose in enumerate(choosers)
        )
    )


def _choose_function(functions):
    """Function of keyword arguments for each platform; all but arrays and lists are constants."""

    @functools.partial(jax.jit, static_argnums=1)
    def program(arrays, others):
        def run(platform, *given):
            return functions[platform](**dict(zip(arrays, given, strict=True)), **dict(others))

        return switch_platform(
            {platform: functools.partial(run, platform) for platform in functions},
            tuple(arrays.values()),
        )

    def function(**arguments):
        arrays = {n: x for n, x in arguments.items() if hasattr(x, "dtype") or isinstance(x, list)}
        others = {name: x for name, x in arguments.items() if name not in arrays}
        return program(arrays, tuple(others.items()))

    return function


def _choose_pass(functions):
    def function(*arguments, **options):
        return switch_platform(
            {platform: functools.partial(f, **options) for platform, f in functions.items()},
            arguments,
        )

    return function


def _collect_residuals(functions):
    """Forward pass that also returns {platform: residuals}, zeros for those that do not run."""

    def function(*arguments, **options):
        given = {platform: functools.partial(f, **options) for platform, f in functions.items()}
        shapes = {platform: jax.eval_shape(f, *arguments)[1] for platform, f in given.items()}

        def zeros(platform):
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[platform])

        def run(platform, *arguments):
            results, residuals = given[platform](*arguments)
            return results, {o: residuals if o == platform else zeros(o) for o in given}

        return switch_platform(
            {platform: functools.partial(run, platform) for platform in given}, arguments
        )

    return function


def _select_residual(functions):
    """Backward counterpart of `_collect_residuals`: passes on the residuals of its platform."""

    def function(*arguments, **options):
        def run(platform, *arguments):
            residuals = (x[platform] if isinstance(x, dict) else x for x in arguments)
            return functions[platform](*residuals, **options)

        return switch_platform(
            {platform: functools.partial(run, platform) for platform in functions}, arguments
        )

    return function


def switch_platform(functions, arguments):
    """Calls the function for the platform; functions: {platform: function}, "default" for others.

    `jax.lax.platform_dependent` suffices for one platform only: in a program exported for several,
    it lowers all branches for each platform, and kernels cannot be lowered for others.
    """
    branches = {}
    for platform, function in functions.items():
        branches[platform], results = jax.make_jaxpr(function, return_shape=True)(*arguments)
    return switch_jaxprs(branches, results, arguments)


def switch_jaxprs(branches, results, arguments):
    """Variant of `switch_platform` for jaxprs.

    Without a "default" branch, lowering for a platform without a branch raises an error.
    results: a tree with the structure of the results.
    """
    found = _switch.bind(*jax.tree.leaves(arguments), branches=tuple(branches.items()))
    return jax.tree.unflatten(jax.tree.structure(results), found)


_switch = Primitive("keras_recurrent_by_platform")
_switch.multiple_results = True


@_switch.def_abstract_eval
def _(*_, branches):
    return branches[0][1].out_avals


def _batch(arrays, axes, *, branches):
    functions = {
        platform: jax.vmap(jaxpr_as_fun(jaxpr), tuple(axes)) for platform, jaxpr in branches
    }
    found = switch_platform(functions, arrays)
    return found, [0] * len(found)


batching.primitive_batchers[_switch] = _batch


def _differentiate(primals, tangents, *, branches):
    """Differentiates plain JAX in place of a kernel, which has no derivative."""
    plain = dict(branches).get("default")
    if plain is None:
        raise NotImplementedError("the Pallas kernels support first derivatives only")
    return jax.jvp(jaxpr_as_fun(plain), tuple(primals), tuple(map(ad.instantiate_zeros, tangents)))


ad.primitive_jvps[_switch] = _differentiate


def _lower(platform, ctx, *operands, branches):
    branches = dict(branches)
    if platform == "cuda" and _gpu.capability() < _gpu.MIN_CAPABILITY:
        platform = "default"
    chosen = branches.get(platform, branches.get("default"))
    if chosen is None:
        raise NotImplementedError(
            "the Pallas kernels need a program lowered for TPU, got one for "
            f"{', '.join(ctx.module_context.platforms)}: leave out `implementation`. For tests, "
            "JAX interprets them on a CPU, slowly, inside `with "
            "jax.experimental.pallas.tpu.force_tpu_interpret_mode():`"
        )
    return mlir.lower_fun(jaxpr_as_fun(chosen), multiple_results=True)(ctx, *operands)


mlir.register_lowering(_switch, functools.partial(_lower, "default"))
for _platform in PLATFORMS.values():
    mlir.register_lowering(_switch, functools.partial(_lower, _platform), platform=_platform)


def is_traced(arguments):
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arguments))


def platform_reason(arguments, platform):
    """Reason a kernel for `platform` cannot run on these tensors, or None; None while tracing.

    The platform of tensors in a program that is being traced is unknown: they are not on a device
    yet, and arrays next to them become constants of the program.
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
