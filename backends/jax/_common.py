"""Helpers shared by the operations in plain JAX."""

import functools

import jax
import jax.numpy as jnp

from ..constants import PADDING, STARTS


def accumulation_dtype(*tensors):
    """The dtype of states and sums: float64 if any tensor is float64, else float32."""
    given = [t for t in tensors if t is not None]
    return jnp.float64 if any(t.dtype == jnp.float64 for t in given) else jnp.float32


def size_reason(*tensors):
    """Reason kernels do not support the sizes of these tensors (or None each), or None."""
    for tensor in tensors:
        if tensor is None:
            continue
        if not all(isinstance(size, int) for size in tensor.shape):
            return f"needs static sizes, known when a program is traced, got {tensor.shape}"
        if 0 in tensor.shape:
            return f"needs tensors that are not empty, got {tensor.shape}"
    return None


def cast_state(initial_state, *tensors):
    """Casts the initial state to the accumulation dtype of these tensors; None stays None."""
    if initial_state is None:
        return None
    return initial_state.astype(accumulation_dtype(*tensors, initial_state))


def default_zero_state(state_shape):
    """Decorates a forward pass: replaces an initial state of None by zeros.

    state_shape: a function of the tensors before the state. The operation itself does not make
    these zeros, since some kernels do not need them.
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


def default_zero_state_gradient(backward):
    """Decorates the backward pass of `default_zero_state`: a state of None has no gradient."""

    @functools.wraps(backward)
    def function(*arguments, **options):
        *tensors, state, token_kind, output, d_output, d_final = arguments
        given = jnp.zeros_like(d_final) if state is None else state
        rest = token_kind, output, d_output, d_final
        *gradients, d_initial, _ = backward(*tensors, given, *rest, **options)
        return *gradients, None if state is None else d_initial, None

    return function


def kind_masks(token_kind):
    """Boolean masks (starts, padding) [B, T]; both None if all tokens continue a document."""
    if token_kind is None:
        return None, None
    return token_kind == STARTS, token_kind == PADDING


def filled(tensor, mask, value):
    """`tensor` [B, T, ...] with `value` where `mask` [B, T] is set; mask None changes nothing."""
    if mask is None:
        return tensor
    return jnp.where(jnp.expand_dims(mask, range(mask.ndim, tensor.ndim)), value, tensor)


def applied_decay(a, starts, padding):
    """The decay applied to the state: 0 at a start, 1 at padding, else a."""
    return filled(filled(a, starts, 0), padding, 1)


def to_complex(x):
    """Complex numbers [..., D] of x [..., 2D], real parts followed by imaginary parts."""
    return jax.lax.complex(*jnp.split(x, 2, axis=-1))


def to_real(x):
    """The inverse of `to_complex`."""
    return jnp.concatenate([x.real, x.imag], axis=-1)


def take(x, index, valid):
    """x[b, index[b, i]] where `valid`, else 0; x: [B, T, ...]; index, valid: [B, I]."""
    return filled(jax.vmap(lambda sequence, i: sequence[i])(x, index), ~valid, 0)


def sum_over_tokens(x):
    """The sum [D] of x [B, T, D].

    Long sequences are first added by halves, which XLA fuses with the computation of x. In short
    ones, it would compute x element by element.
    """
    while x.shape[1] % 2 == 0 and x.shape[1] > 32:
        x = x[:, : x.shape[1] // 2] + x[:, x.shape[1] // 2 :]
    return jnp.sum(x, axis=(0, 1))


@jax.custom_jvp
def sigmoid(z):
    return jax.nn.sigmoid(z)


# JAX would compute σ(-z) as 1 - σ(z), which loses the digits of a nearly open gate.
sigmoid.defjvps(lambda d_z, s, z: d_z * s * jax.nn.sigmoid(-z))


@jax.custom_vjp
def scaled(row, x):
    """Returns row [D] times x [B, T, D]; the gradient of row is computed by `sum_over_tokens`."""
    return row * x


scaled.defvjp(
    lambda row, x: (row * x, (row, x)),
    lambda saved, d: (sum_over_tokens(d * saved[1]), d * saved[0]),
)
