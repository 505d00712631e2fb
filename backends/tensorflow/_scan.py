"""The recurrence out_t = a_t * out_{t-1} + x_t and its adjoint, computed as a tree over time."""

import tensorflow as tf

from ._common import (
    accumulation_dtype,
    applied_decay,
    as_tensors,
    dense_gradient,
    differentiate,
    filled,
    kind_masks,
    length_of,
    split_chunks,
    state_or_zeros,
)

# Tokens that one node of the tree combines. XLA fuses the steps of a node and recomputes its
# first ones for each output: with 16 this costs more than it saves.
RADIX = 8
# Levels of the tree if T is unknown. A loop over the T / 8**3 nodes of the last one follows.
LEVELS_OF_UNKNOWN_LENGTH = 3


def recurrence(elements, tensors, initial_state, token_kind, is_complex=False):
    """h_t = exp(e_t) h_{t-1} + u_t. Returns (h in the dtype of x, the last h).

    The gradient computes e and u once more and differentiates them.

    Args:
        elements: a differentiable function of the tensors in the accumulation dtype, with zeros at
            padding. It returns e and u, [B, T, D].
        tensors: x, [B, T, D], and others.
        initial_state: [B, D], or None.
        token_kind: [B, T], or None.
        is_complex: boolean; if True, e and h are complex, and x, u, the results and the state have
            the real parts of all channels before the imaginary ones.
    """
    *tensors, initial_state = as_tensors(*tensors, initial_state)
    dtype, x = accumulation_dtype(*tensors, initial_state), tensors[0]
    starts, padding = kind_masks(token_kind)

    def elements_of(tensors):
        tensors = [tf.cast(t, dtype) for t in tensors]
        return elements(*(filled(t, padding, 0) if len(t.shape) == 3 else t for t in tensors))

    def decay(exponent):
        return applied_decay(tf.exp(exponent), starts, padding)

    def split(t):
        return tf.complex(*tf.split(t, 2, axis=-1)) if is_complex else t

    def joined(t):
        return tf.concat([tf.math.real(t), tf.math.imag(t)], axis=-1) if is_complex else t

    @tf.custom_gradient
    def run(state, *tensors):
        exponent, u = elements_of(tensors)
        h = scan(decay(exponent), split(u), split(state))
        output, final_state = tf.cast(joined(h), x.dtype), joined(h[:, -1])

        def gradient(dh, d_state):
            with tf.GradientTape() as tape:
                tape.watch(tensors)
                exponent, u = elements_of(tensors)
            dh, d_state = (
                dense_gradient(dh, output, dtype),
                dense_gradient(d_state, final_state, dtype),
            )
            g, e = adjoint_scan(tf.math.conj(decay(exponent)), split(dh), split(d_state))
            before = previous(split(tf.cast(output, dtype)), split(state))
            d_exponent = filled(e * tf.math.conj(before), padding, 0)
            d_tensors = differentiate(tape, (exponent, u), tensors, (d_exponent, joined(g)))
            return joined(e[:, 0]), *d_tensors

        return (output, final_state), gradient

    state = state_or_zeros(initial_state, [tf.shape(x)[0], x.shape[2]], dtype)
    return run(state, *tensors)


def scan(a, x, state, reverse=False, levels=LEVELS_OF_UNKNOWN_LENGTH):
    """out_t = a_t * out_{t-1} + x_t (t+1 for t-1 if `reverse`), starting from `state`.

    a, x: [B, T, D]; state: [B, D], all of one dtype. Decays are only multiplied, never divided by
    one another, so that any decay, 0 included, is safe.

    All chunks of eight tokens are computed together: first from a zero state, which gives the
    contribution of a chunk to the state and the product of its decays. This recurrence over these
    totals gives the state before each chunk, from which all tokens are computed.
    """
    if a.shape[1] is not None and a.shape[1] <= RADIX:
        return tf.stack(
            _steps(tf.unstack(a, axis=1), tf.unstack(x, axis=1), state, reverse), axis=1
        )
    if a.shape[1] is None and levels == 0:
        return _loop(a, x, state, reverse)

    a_chunks = tf.unstack(split_chunks(a, RADIX, 1), axis=2)
    x_chunks = tf.unstack(split_chunks(x, RADIX, 0), axis=2)
    totals = _steps(a_chunks, x_chunks, tf.zeros_like(x_chunks[0]), reverse)[0 if reverse else -1]
    decays = a_chunks[0]
    for a_c in a_chunks[1:]:
        decays *= a_c
    ends = scan(decays, totals, state, reverse, levels - 1)
    entering = following(ends, state) if reverse else previous(ends, state)
    out = tf.stack(_steps(a_chunks, x_chunks, entering, reverse), axis=2)
    out = tf.reshape(out, [tf.shape(out)[0], -1, x.shape[2]])[:, : length_of(x)]
    return tf.ensure_shape(out, x.shape)  # a slice of an unknown length has one


def _steps(a, x, state, reverse):
    """Computes the recurrence over lists of tensors, one for each token."""
    steps = list(zip(a, x, strict=True))
    out = []
    for a_t, x_t in reversed(steps) if reverse else steps:
        state = a_t * state + x_t
        out.append(state)
    return out[::-1] if reverse else out


def _loop(a, x, state, reverse):
    """Computes the recurrence token by token."""
    length = length_of(a)

    def step(i, state, out):
        t = length - 1 - i if reverse else i
        state = a[:, t] * state + x[:, t]
        return i + 1, state, out.write(t, state)

    out = tf.TensorArray(x.dtype, length, element_shape=state.shape)
    *_, out = tf.while_loop(lambda i, *_: i < length, step, (0, state, out))
    return tf.transpose(out.stack(), [1, 0, 2])


def adjoint_scan(a, d_out, d_state):
    """The gradients g_t = d_out_t + a_{t+1} * g_{t+1} of x_t, and a_t * g_t, of out_{t-1}.

    g_T = d_out_T + d_state.
    """
    g = scan(following(a, tf.ones_like(d_state)), d_out, d_state, reverse=True)
    return g, a * g


def previous(tensor, first):
    """tensor_{t-1}, with `first` before the first token."""
    return tf.concat([first[:, None], tensor[:, :-1]], axis=1)


def following(tensor, last):
    """tensor_{t+1}, with `last` after the last token."""
    return tf.concat([tensor[:, 1:], last[:, None]], axis=1)
