"""One `jax.custom_vjp` for every operation of JAX, whichever folder computes it."""

import jax


def with_gradient(forward, backward, without=(), with_output=True):
    """`forward`, with the gradient that `backward` makes of the arguments and the output alone.

    Two implementations with the same arguments keep the same for the backward. So each of the two
    functions may choose between them when it is lowered, and need not choose as the other did.

    Args:
        forward: a function of positional tensors, some of them None, that returns
            `(output, final_state)`.
        backward: a function of the same tensors, the output and the gradients of both results,
            that returns a gradient for each tensor, None for those that have none.
        without: positions of the arguments that `backward` does without: it gets None for them,
            and nobody has to keep them.
        with_output: whether it needs the output; it gets None for that, too, if not.
    """

    @jax.custom_vjp
    def function(*arguments):
        return forward(*arguments)

    def save(*arguments):
        output, final_state = forward(*arguments)
        kept = tuple(None if i in without else a for i, a in enumerate(arguments))
        return (output, final_state), (kept, output if with_output else None)

    def gradients(saved, d_results):
        kept, output = saved
        return backward(*kept, output, *d_results)

    function.defvjp(save, gradients)
    return function
