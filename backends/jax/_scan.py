"""The recurrence out_t = a_t * out_{t-1} + x_t and its adjoint, computed as a tree over time."""

import jax
import jax.numpy as jnp

from ._common import (
    applied_decay,
    default_zero_state,
    default_zero_state_gradient,
    filled,
    kind_masks,
    to_complex,
    to_real,
)
from ._operation import kernel_over_time
from ._time_chunks import elements_before, scan_chunks

# Tokens that one node of the tree combines. More make a flatter tree, but XLA fuses the steps of
# a node and recomputes its first ones for each output, which costs RADIX^2 / 2.
RADIX = 8


def state_shape(x, *_):
    return x.shape[0], x.shape[2]


def recurrence(operation, elements, is_complex=False, dropped=()):
    """Returns the `Kernel` of h_t = exp(e_t) h_{t-1} + u_t, whose output is h in the dtype of x.

    The backward pass computes e and u once more and differentiates them.

    Args:
        operation: string, the name of the operation.
        elements: a differentiable function of a mask of starts and of the tensors in the
            accumulation dtype, with zeros at padding. It returns e and u, [B, T, D]. The tensors
            are x and others, [B, T, D], followed by parameters, [D].
        is_complex: boolean; if True, e and h are complex, and x, u, the results and the state have
            the real parts of all channels before the imaginary ones.
        dropped: as in `kernel_over_time`; `(0,)` if the derivatives of e and u do not depend on x.
    """
    split, joined = (to_complex, to_real) if is_complex else (lambda t: t,) * 2

    def prepare(tensors, dtype):
        """Returns sequences, parameters, and the function that computes e and u of a chunk."""
        sequences = tuple(t for t in tensors if t.ndim == 3)
        parameters = tuple(t.astype(dtype) for t in tensors if t.ndim < 3)

        def elements_of(token_kind, *tensors):
            starts, padding = kind_masks(token_kind)
            given = (filled(t.astype(dtype), padding, 0) for t in tensors[: len(sequences)])
            return elements(starts, *given, *tensors[len(sequences) :])

        return sequences, parameters, elements_of

    def decay(exponent, token_kind):
        return applied_decay(jnp.exp(exponent), *kind_masks(token_kind))

    @default_zero_state(state_shape)
    def forward(x, *others):
        *tensors, initial_state, token_kind = x, *others
        sequences, parameters, elements_of = prepare(tensors, initial_state.dtype)

        def step(state, start, *given):
            *chunk, kind = given
            exponent, u = elements_of(kind, *chunk, *parameters)
            h = joined(scan(decay(exponent, kind), split(u), split(state)))
            return h[:, -1], (h.astype(x.dtype),)

        final_state, (output,) = scan_chunks(step, initial_state, (*sequences, token_kind))
        return output, final_state

    @default_zero_state_gradient
    def backward(x, *given):
        *others, initial_state, token_kind, output, d_output, d_final = given
        dtype, tensors = initial_state.dtype, (output if x is None else x, *others)
        sequences, parameters, elements_of = prepare(tensors, dtype)
        # Without the barrier, XLA on CPUs would repeat the scan of `forward` for earlier states.
        output = jax.lax.platform_dependent(
            output, cpu=jax.lax.optimization_barrier, default=lambda output: output
        )

        def step(carry, start, *given):
            *chunk, kind, h, dh = given
            (d_state, d_parameters), (starts, padding) = carry, kind_masks(kind)
            (exponent, _), pull_back = jax.vjp(
                lambda *tensors: elements_of(kind, *tensors), *chunk, *parameters
            )
            a = decay(exponent, kind)
            g, d_state = adjoint_scan(jnp.conj(a), split(dh.astype(dtype)), split(d_state))
            state = elements_before(output, start, initial_state[:, None])[:, 0]
            before = previous(split(h.astype(dtype)), split(state))
            d_exponent = filled(filled(jnp.conj(g) * a * before, starts, 0), padding, 0)
            found = pull_back((d_exponent, joined(g)))
            d_chunk, added = found[: len(chunk)], found[len(chunk) :]
            d_parameters = tuple(sum(pair) for pair in zip(d_parameters, added, strict=True))
            return (joined(d_state), d_parameters), tuple(filled(d, padding, 0) for d in d_chunk)

        carry = d_final, tuple(map(jnp.zeros_like, parameters))
        chunks = (*sequences, token_kind, output, d_output)
        (d_initial, d_parameters), d_sequences = scan_chunks(step, carry, chunks, reverse=True)
        gradients = zip((*d_sequences, *d_parameters), tensors, strict=True)
        return *(d.astype(t.dtype) for d, t in gradients), d_initial, None

    return kernel_over_time(operation, forward, backward, dropped=dropped)


def scan(a, x, state, reverse=False):
    """out_t = a_t * out_{t-1} + x_t (t+1 for t-1 if `reverse`), starting from `state`.

    a, x: [B, T, D]; state: [B, D], all of one dtype. Decays are only multiplied, never divided by
    one another, so that any decay, 0 included, is safe.
    """
    batch, length, channels = x.shape
    if length <= RADIX:
        return _steps(a, x, state, reverse, axis=1)

    nodes = -(-length // RADIX)
    tail = ((0, 0), (0, nodes * RADIX - length), (0, 0))
    # A tail of a = 1, x = 0 leaves the state unchanged.
    a = jnp.pad(a, tail, constant_values=1).reshape(batch, nodes, RADIX, channels)
    x = jnp.pad(x, tail).reshape(batch, nodes, RADIX, channels)

    decays, totals = jnp.ones_like(a[:, :, 0]), jnp.zeros_like(x[:, :, 0])
    for j in _order(RADIX, reverse):
        decays, totals = a[:, :, j] * decays, a[:, :, j] * totals + x[:, :, j]
    ends = scan(decays, totals, state, reverse)
    entering = following(ends, state) if reverse else previous(ends, state)
    return _steps(a, x, entering, reverse, axis=2).reshape(batch, -1, channels)[:, :length]


def adjoint_scan(a, d_out, d_state):
    """The gradients g_t = d_out_t + a_{t+1} * g_{t+1} of x_t, and that of the initial state.

    g_T = d_out_T + d_state.
    """
    g = scan(following(a, jnp.ones_like(a[:, 0])), d_out, d_state, reverse=True)
    return g, a[:, 0] * g[:, 0]


def previous(tensor, first):
    """tensor_{t-1}, with `first` before the first token."""
    return jnp.concatenate([first[:, None], tensor[:, :-1]], axis=1)


def following(tensor, last):
    """tensor_{t+1}, with `last` after the last token."""
    return jnp.concatenate([tensor[:, 1:], last[:, None]], axis=1)


def _steps(a, x, state, reverse, axis):
    """Computes the recurrence step by step along an axis."""
    out = []
    for j in _order(x.shape[axis], reverse):
        a_j, x_j = (jax.lax.index_in_dim(t, j, axis, False) for t in (a, x))
        state = a_j * state + x_j
        out.append(state)
    return jnp.stack(out[::-1] if reverse else out, axis)


def _order(length, reverse):
    return range(length - 1, -1, -1) if reverse else range(length)
