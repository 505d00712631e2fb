"""A loop over a length that is not known when a graph is made.

Each framework has a loop that its exporters translate: torch's `scan`, which becomes ONNX's
`Scan`, TensorFlow's, which becomes `Loop`, and JAX's. Blocks, as for a known length, would on torch
add conditions on the length to the graph, and make hundreds of nodes on TensorFlow.
"""

import keras
from keras import ops

BACKEND = keras.backend.backend()


def is_needed(x):
    """Whether the time of x [B, T, ...] is unknown."""
    return not isinstance(x.shape[1], int)


def loop(step, state, tensors):
    """Goes through time by `state, output = step(state, *tensors at t)`.

    Args:
        step: a function of a state and of the tensors of one token, that returns the next state
            and an output.
        state: a tensor.
        tensors: tensors [B, T, ...].

    Returns:
        The outputs [B, T, ...] and the last state.
    """
    if BACKEND == "torch":
        return _in_torch(step, state, tensors)
    in_time = [_batch_behind_time(t) for t in tensors]
    loop = _in_jax if BACKEND == "jax" else _in_tensorflow
    outputs, state = loop(step, state, tuple(in_time))
    return _batch_behind_time(outputs), state


def _in_torch(step, state, tensors):
    from torch._higher_order_ops.scan import scan

    def body(state, now):
        state, output = step(state, *now)
        return state.clone(), output  # which may share no memory

    state, outputs = scan(body, state.contiguous().clone(), tuple(tensors), dim=1)
    return outputs, state


def _in_jax(step, state, tensors):
    import jax

    state, outputs = jax.lax.scan(lambda state, now: step(state, *now), state, tensors)
    return outputs, state


def _in_tensorflow(step, state, tensors):
    import tensorflow as tf

    first = step(state, *(t[0] for t in tensors))[1]
    states, outputs = tf.scan(
        lambda before, now: step(before[0], *now), tensors, (state, tf.zeros_like(first))
    )
    return outputs, states[-1]


def _batch_behind_time(x):
    return ops.transpose(x, (1, 0, *range(2, len(x.shape))))
