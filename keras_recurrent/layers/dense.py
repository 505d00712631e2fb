"""Linear layers applied to each token of a sequence."""

from keras_recurrent.devices.jax_layouts import flatten_tokens


def apply_to_tokens(dense, inputs):
    """Applies a `Dense` to `[B, T, D]`, as one matrix `[B * T, D]`.

    The gradient of the weight is a sum over all tokens. With two axes of tokens, XLA on CPUs would
    first copy the gradient of the output to transpose it.
    """
    tokens, restore_time = flatten_tokens(inputs)
    return restore_time(dense(tokens))
