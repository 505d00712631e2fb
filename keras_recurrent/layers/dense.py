"""Linear maps of the tokens of a sequence."""

from keras import ops


def apply_to_tokens(dense, inputs):
    """Applies a `Dense` to `[B, T, D]`, as one matrix `[B * T, D]`.

    The gradient of the weight sums over all tokens. If these were two axes, XLA on a CPU would
    first write a transposed copy of the output's gradient.
    """
    outputs = dense(ops.reshape(inputs, (-1, inputs.shape[-1])))
    return ops.reshape(outputs, (*ops.shape(inputs)[:2], outputs.shape[-1]))
