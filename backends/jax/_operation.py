"""Makes the forward and backward passes of an operation a `Kernel`.

The residuals of an operation are its arguments and its output, unless its forward pass
`has_residuals`. So two implementations whose passes have the same parameters can share one
function: each pass is chosen when it is lowered for a platform, independently of the other pass.
"""

import functools

import jax

from ..kernel import make_kernel
from ..signatures import SIGNATURES
from ._common import cast_state


def kernel_over_time(
    operation, forward, backward, options=(), keep_output=True, dropped=(), has_residuals=False
):
    """Returns the `Kernel` of an operation over time, differentiable by `jax.custom_vjp`.

    Args:
        operation: string, its name.
        forward: a function of positional tensors, some of them None, that returns
            `(output, final_state)`, and takes options by keyword.
        backward: a function of the same tensors, the output and the gradients of both results. It
            returns a gradient for each tensor, or None.
        options: names of the arguments that are not tensors.
        keep_output: boolean; if False, `backward` gets None in place of the output.
        dropped: positions of arguments that are not saved; `backward` gets None in their place.
        has_residuals: boolean; if True, `forward` returns the pair above and residuals, which
            `backward` gets in place of the output.
    """
    names = tuple(SIGNATURES[operation].tensors)

    def build(forward, backward):
        def function(initial_state=None, token_kind=None, **arguments):
            tensors = [arguments.pop(name, None) for name in names]
            run = _define_gradient(
                functools.partial(forward, **arguments),
                functools.partial(backward, **arguments),
                *(keep_output, dropped, has_residuals),
            )
            return run(*tensors, cast_state(initial_state, *tensors), token_kind)

        return _compiled(function, operation, options)

    return make_kernel(build, forward, backward, has_residuals)


def _define_gradient(forward, backward, keep_output, dropped, has_residuals):
    def run(*arguments):
        found = forward(*arguments)
        return found if has_residuals else (found, found[0] if keep_output else None)

    @jax.custom_vjp
    def function(*arguments):
        return run(*arguments)[0]

    def save(*arguments):
        results, residuals = run(*arguments)
        given = tuple(None if i in dropped else a for i, a in enumerate(arguments))
        return results, (given, residuals)

    def gradients(saved, d_results):
        given, residuals = saved
        return backward(*given, residuals, *d_results)

    function.defvjp(save, gradients)
    return function


def token_wise_kernel(operation, forward, backward):
    """Returns the `Kernel` of an operation without a state, differentiable by `jax.custom_vjp`.

    Args:
        operation: string, its name.
        forward: a function of positional tensors that returns a tuple, the output and residuals.
        backward: a function of the same tensors, None, the residuals and the gradient of the
            output. It returns a gradient for each tensor, or None.
    """
    names = tuple(SIGNATURES[operation].tensors)

    def build(forward, backward):
        @jax.custom_vjp
        def run(*tensors):
            return forward(*tensors)[0]

        def save(*tensors):
            output, *residuals = forward(*tensors)
            return output, (tensors, residuals)

        def gradients(saved, d_output):
            # Without the barrier XLA would share and save what both passes compute, such as the
            # exponentials of logits.
            tensors, residuals = jax.lax.optimization_barrier(saved)
            return backward(*tensors, None, *residuals, d_output)

        run.defvjp(save, gradients)

        def function(**arguments):
            if "tokens" in arguments:
                arguments["tokens"] = arguments["tokens"].astype(int)
            return run(*map(arguments.get, names))

        return _compiled(function, operation)

    return make_kernel(build, forward, backward)


def _compiled(function, name, options=()):
    """Compiles a function of keyword arguments, under a name that profiles show."""
    function.__name__ = name
    return jax.jit(function, static_argnames=options)
