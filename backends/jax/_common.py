"""What the operations of this folder share."""

import functools

import jax
import jax.numpy as jnp

from ..constants import PADDING, STARTS


def accumulation_dtype(*tensors):
    """The dtype of states and sums: float64 if any tensor is float64, else float32."""
    given = [t for t in tensors if t is not None]
    return jnp.float64 if any(t.dtype == jnp.float64 for t in given) else jnp.float32


def size_reason(*tensors):
    """Why no kernel takes tensors of these sizes, some of them None; None if they do."""
    for tensor in tensors:
        if tensor is None:
            continue
        if not all(isinstance(size, int) for size in tensor.shape):
            return f"needs sizes that are known when a program is traced, got {tensor.shape}"
        if 0 in tensor.shape:
            return f"needs tensors that are not empty, got {tensor.shape}"
    return None


def in_dtype_of_sums(initial_state, *tensors):
    """The initial state in the dtype of sums with these tensors; None stays None."""
    if initial_state is None:
        return None
    return initial_state.astype(accumulation_dtype(*tensors, initial_state))


def from_zeros(state_shape):
    """A decorator of a forward pass: an initial state that is None stands for zeros.

    state_shape: a function of the tensors before the state. Kernels that start from nothing do not
    need these zeros, so it is not the operation that makes them.
    """

    def decorate(forward):
        @functools.wraps(forward)
        def function(*arguments, **options):
            *tensors, state, token_kind = arguments
            if state is None:
                state = jnp.zeros(state_shape(*tensors), accumulation_dtype(*tensors))
            return forward(*tensors, state, token_kind, **options)

        return function

    return decorate


def back_to_zeros(backward):
    """A decorator of a backward pass, to go with `from_zeros`: such a state has no gradient."""

    @functools.wraps(backward)
    def function(*arguments, **options):
        *tensors, state, token_kind, output, d_output, d_final = arguments
        given = jnp.zeros_like(d_final) if state is None else state
        rest = token_kind, output, d_output, d_final
        *gradients, d_initial, _ = backward(*tensors, given, *rest, **options)
        return *gradients, None if state is None else d_initial, None

    return function


def kind_masks(token_kind):
    """(starts, padding), boolean [B, T]: which tokens are of that kind; both None if all go on."""
    if token_kind is None:
        return None, None
    return token_kind == STARTS, token_kind == PADDING


def filled(tensor, mask, value):
    """`tensor` [B, T, ...] with `value` where `mask` [B, T] is set; mask None changes nothing."""
    if mask is None:
        return tensor
    return jnp.where(jnp.expand_dims(mask, range(mask.ndim, tensor.ndim)), value, tensor)


def applied_decay(a, starts, padding):
    """a as a token applies it to the state: 0 at a start, 1 at padding."""
    return filled(filled(a, starts, 0), padding, 1)


def sum_over_tokens(x):
    """The sum [D] of x [B, T, D], first by halves: XLA fuses those with what computes x."""
    while x.shape[1] % 2 == 0 and x.shape[1] > 8:
        x = x[:, : x.shape[1] // 2] + x[:, x.shape[1] // 2 :]
    return jnp.sum(x, axis=(0, 1))


def with_gradient(forward, backward, keep_output=True, without=(), keeps=False):
    """A `jax.custom_vjp` of `forward` whose gradient is `backward`.

    For the backward pass only arguments and the output are kept, nothing that `forward` computed on
    the way, unless it `keeps` that. So two implementations with the same parameters can share one
    function: each pass chooses between them when it is lowered for a platform, independently of the
    other pass.

    Args:
        forward: a function of positional tensors, some of them None, that returns
            `(output, final_state)`.
        backward: a function of the same tensors, the output and the gradients of both results. It
            returns a gradient for each tensor, None for one that has none.
        keep_output: whether the output is kept; if not, `backward` gets None in its place.
        without: positions of arguments that are not kept; `backward` gets None in their place.
        keeps: whether `forward` returns that pair, and what `backward` gets in the output's place.
    """

    def run(*arguments):
        found = forward(*arguments)
        return found if keeps else (found, found[0] if keep_output else None)

    @jax.custom_vjp
    def function(*arguments):
        return run(*arguments)[0]

    def save(*arguments):
        results, kept = run(*arguments)
        given = tuple(None if i in without else a for i, a in enumerate(arguments))
        return results, (given, kept)

    def gradients(saved, d_results):
        given, kept = saved
        return backward(*given, kept, *d_results)

    function.defvjp(save, gradients)
    return function
