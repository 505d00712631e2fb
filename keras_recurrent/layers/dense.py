"""Linear maps of the tokens of a sequence."""

from keras import ops


def apply_to_tokens(dense, inputs):
    """`[B, T, D]` through a `Dense`, as one matrix of tokens.

    The gradient of a kernel sums over the tokens. Over two axes of them, batch and time, XLA on a
    CPU would first write down a transposed copy of the output's gradient.
    """
    outputs = dense(ops.reshape(inputs, (-1, inputs.shape[-1])))
    return ops.reshape(outputs, (*ops.shape(inputs)[:2], outputs.shape[-1]))
