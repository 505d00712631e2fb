"""A Pallas call that says what to do where it is lowered for anything but a TPU."""

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

from ._lazy import pl

_call = Primitive("keras_recurrent_pallas_call")
_call.multiple_results = True


def pallas_call(kernel, **options):
    """As `jax.experimental.pallas.pallas_call`, of which `options` has the `out_shape`."""
    call = pl.pallas_call(kernel, **options)

    def checked(*arrays):
        jaxpr = jax.make_jaxpr(call)(*arrays)
        kernels = [e for e in jaxpr.eqns if e.primitive.name == "pallas_call"]
        if any(kernel.params["interpret"] for kernel in kernels):
            return call(*arrays)  # on any platform
        found = _call.bind(*jax.tree.leaves(arrays), jaxpr=jaxpr)
        return jax.tree.unflatten(jax.tree.structure(options["out_shape"]), found)

    return checked


@_call.def_abstract_eval
def _(*_, jaxpr):
    return jaxpr.out_avals


def _batched(arrays, axes, *, jaxpr):
    mapped = jax.make_jaxpr(jax.vmap(jaxpr_as_fun(jaxpr), tuple(axes)))(*arrays)
    found = _call.bind(*arrays, jaxpr=mapped)
    return found, [0] * len(found)


batching.primitive_batchers[_call] = _batched


def _lower(ctx, *operands, jaxpr):
    return mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)(ctx, *operands)


def _refuse(ctx, *operands, jaxpr):
    raise NotImplementedError(
        "the Pallas kernels run where a program is lowered for TPU, got one for "
        f"{', '.join(ctx.module_context.platforms)}: leave `implementation` to choose by itself. "
        "For tests, JAX interprets them on a CPU, slowly, inside `with "
        "jax.experimental.pallas.tpu.force_tpu_interpret_mode():`"
    )


mlir.register_lowering(_call, _refuse)
mlir.register_lowering(_call, _lower, platform="tpu")
