"""A Pallas call with a helpful error when it is lowered for another platform than TPU."""

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

from ._common import vmem_bytes
from ._lazy import pl, pltpu

_call = Primitive("keras_recurrent_pallas_call")
_call.multiple_results = True


def pallas_call(kernel, grid, **options):
    """Wraps `jax.experimental.pallas.pallas_call`; `options` must include `out_shape`.

    The first two axes of the grid are parallel, and the others sequential.
    """
    parameters = pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", *["arbitrary"] * (len(grid) - 2)),
        vmem_limit_bytes=vmem_bytes(),
    )
    call = pl.pallas_call(kernel, grid=grid, compiler_params=parameters, **options)

    def checked(*arrays):
        jaxpr = jax.make_jaxpr(call)(*arrays)
        kernels = [e for e in jaxpr.eqns if e.primitive.name == "pallas_call"]
        if any(kernel.params["interpret"] for kernel in kernels):
            return call(*arrays)  # interpreted, on any platform
        found = _call.bind(*jax.tree.leaves(arrays), jaxpr=jaxpr)
        return jax.tree.unflatten(jax.tree.structure(options["out_shape"]), found)

    return checked


@_call.def_abstract_eval
def _(*_, jaxpr):
    return jaxpr.out_avals


def _batch(arrays, axes, *, jaxpr):
    mapped = jax.make_jaxpr(jax.vmap(jaxpr_as_fun(jaxpr), tuple(axes)))(*arrays)
    found = _call.bind(*arrays, jaxpr=mapped)
    return found, [0] * len(found)


batching.primitive_batchers[_call] = _batch


def _lower(ctx, *operands, jaxpr):
    return mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)(ctx, *operands)


def _reject_platform(ctx, *operands, jaxpr):
    raise NotImplementedError(
        "the Pallas kernels need a program lowered for TPU, got one for "
        f"{', '.join(ctx.module_context.platforms)}: leave out `implementation`. For tests, "
        "JAX interprets them on a CPU, slowly, inside `with "
        "jax.experimental.pallas.tpu.force_tpu_interpret_mode():`"
    )


mlir.register_lowering(_call, _reject_platform)
mlir.register_lowering(_call, _lower, platform="tpu")
