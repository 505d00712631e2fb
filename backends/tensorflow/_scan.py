"""The recurrence out_t = a_t * out_{t-1} + x_t and its adjoint, for all recurrent kernels here."""

import tensorflow as tf

from keras_recurrent.backends.tensorflow._common import chunked, following, length_of, previous

# XLA fuses a chunk into one kernel, and from 16 positions on recomputes more than it saves.
_CHUNK = 8
# Enough for most lengths; a loop over T / 8**3 steps ends the tree where T is unknown.
_LEVELS_OF_UNKNOWN_LENGTH = 3


def scan(a, x, state, reverse=False, levels=_LEVELS_OF_UNKNOWN_LENGTH):
    """out_t = a_t * out_{t-1} + x_t (t+1 for t-1 if `reverse`), starting from `state`.

    a, x: [B, T, D], state [B, D], all of one dtype. All chunks of eight tokens advance together:
    first to find where each would end had it begun at zero, and the product of its decays; the
    same recurrence over these totals gives the state that enters each chunk; then for good.
    """
    if a.shape[1] is not None and a.shape[1] <= _CHUNK:
        return tf.stack(
            _steps(tf.unstack(a, axis=1), tf.unstack(x, axis=1), state, reverse), axis=1
        )
    if a.shape[1] is None and levels == 0:
        return _loop(a, x, state, reverse)

    a_chunks = tf.unstack(chunked(a, _CHUNK, 1), axis=2)
    x_chunks = tf.unstack(chunked(x, _CHUNK, 0), axis=2)
    totals = _steps(a_chunks, x_chunks, tf.zeros_like(x_chunks[0]), reverse)[0 if reverse else -1]
    decays = a_chunks[0]
    for a_c in a_chunks[1:]:
        decays *= a_c
    ends = scan(decays, totals, state, reverse, levels - 1)
    entering = following(ends, state) if reverse else previous(ends, state)
    out = tf.stack(_steps(a_chunks, x_chunks, entering, reverse), axis=2)
    return tf.reshape(out, [tf.shape(out)[0], -1, x.shape[2]])[:, : length_of(x)]


def _steps(a, x, state, reverse):
    """The recurrence over lists, in the order of time."""
    steps = list(zip(a, x, strict=True))
    out = []
    for a_t, x_t in reversed(steps) if reverse else steps:
        state = a_t * state + x_t
        out.append(state)
    return out[::-1] if reverse else out


def _loop(a, x, state, reverse):
    """The recurrence token by token."""
    length = length_of(a)

    def step(i, state, out):
        t = length - 1 - i if reverse else i
        state = a[:, t] * state + x[:, t]
        return i + 1, state, out.write(t, state)

    out = tf.TensorArray(x.dtype, length, element_shape=state.shape)
    *_, out = tf.while_loop(lambda i, *_: i < length, step, (0, state, out))
    return tf.transpose(out.stack(), [1, 0, 2])


def adjoint_scan(a, d_out, d_state):
    """(g, e): the gradients g_t = d_out_t + e_{t+1} of x_t and e_t = a_t g_t of out_{t-1}.

    e_{T+1} is the gradient of the final state.
    """
    e = scan(a, a * d_out, d_state, reverse=True)
    return d_out + following(e, d_state), e
