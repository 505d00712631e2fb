"""A loop over a length that is not known, for `torch.export`.

Sums over the sizes of blocks would there become conditions on the length, or expressions that take
minutes to simplify. torch has a loop for graphs instead, which becomes ONNX's `Scan`.
"""

import keras


def is_needed(x):
    """Whether the time of x [B, T, ...] is unknown, and torch traces."""
    return keras.backend.backend() == "torch" and not isinstance(x.shape[1], int)


def loop(step, state, tensors):
    """Goes through time by `state = step(state, *tensors at t)`.

    Args:
        step: a function of a state and of the tensors of one token, that returns the next state
            and an output.
        state: a tensor.
        tensors: tensors [B, T, ...].

    Returns:
        The outputs [B, T, ...] and the last state.
    """
    import torch
    from torch._higher_order_ops.scan import scan

    def body(state, now):
        state, output = step(state, *now)
        return state, output.clone() if output is state else output  # outputs share no memory

    tensors = [torch.as_tensor(t) for t in tensors]
    state, outputs = scan(body, state, tuple(tensors), dim=1)
    return outputs, state
