"""Loop over time for a length that is unknown when a graph is made.

Each framework has a loop that its exporters translate: torch's `scan`, which becomes ONNX's `Scan`,
TensorFlow's, which becomes `Loop`, and JAX's. The blocks of a known length would add conditions on
the length to torch's graph, and hundreds of nodes to TensorFlow's.
"""

import keras
from keras import ops

BACKEND = keras.backend.backend()


def is_needed(x):
    """Returns True if T of x [B, T, ...] is unknown."""
    return not isinstance(x.shape[1], int)


def loop(step, state, tensors):
    """Iterates over time by `state, output = step(state, *tensors at t)`.

    Args:
        step: a function from a state and the tensors of one token to the next state and an output.
        state: a tensor.
        tensors: tensors [B, T, ...].

    Returns:
        The outputs [B, T, ...] and the last state.
    """
    if BACKEND == "torch":
        return _torch_loop(step, state, tensors)
    time_first = [_swap_batch_and_time(t) for t in tensors]
    loop = _jax_loop if BACKEND == "jax" else _tensorflow_loop
    outputs, state = loop(step, state, tuple(time_first))
    return _swap_batch_and_time(outputs), state


def _torch_loop(step, state, tensors):
    from torch._higher_order_ops.scan import scan

    def body(state, token):
        state, output = step(state, *token)
        return state.clone(), output  # `scan` requires that they do not share memory

    state, outputs = scan(body, state.contiguous().clone(), tuple(tensors), dim=1)
    return outputs, state


def _jax_loop(step, state, tensors):
    import jax

    state, outputs = jax.lax.scan(lambda state, token: step(state, *token), state, tensors)
    return outputs, state


def _tensorflow_loop(step, state, tensors):
    import tensorflow as tf

    first = step(state, *(t[0] for t in tensors))[1]
    states, outputs = tf.scan(
        lambda before, token: step(before[0], *token), tensors, (state, tf.zeros_like(first))
    )
    return outputs, states[-1]


def _swap_batch_and_time(x):
    return ops.transpose(x, (1, 0, *range(2, len(x.shape))))
