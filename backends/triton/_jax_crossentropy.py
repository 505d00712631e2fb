"""`linear_crossentropy` on JAX: plain JAX serves."""


def refusal(x, embedding, tokens, sample_weight):
    return "has no kernel for JAX yet"
