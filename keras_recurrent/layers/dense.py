"""Linear maps of the tokens of a sequence."""

from keras_recurrent.devices.jax_layouts import flatten_tokens


def apply_to_tokens(dense, inputs):
    """Applies a `Dense` to `[B, T, D]`, as one matrix `[B * T, D]`.

    The gradient of the weight sums over all tokens. If these were two axes, XLA on a CPU would
    first write a transposed copy of the output's gradient.
    """
    tokens, in_rows = flatten_tokens(inputs)
    return in_rows(dense(tokens))
