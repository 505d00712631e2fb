"""Checks of arguments that several layers share."""


def check_positive_integer(name, value):
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"`{name}` must be an integer, at least 1; got {value!r}.")


def check_width_known(layer, input_shape):
    if input_shape[-1] is None:
        raise ValueError(
            f"`{type(layer).__name__}` needs inputs whose last dimension, the width, is known; got "
            f"the shape {tuple(input_shape)}."
        )


def check_num_blocks(num_blocks, width):
    if width % num_blocks:
        fitting = [n for n in range(1, width + 1) if width % n == 0]
        nearest = min(fitting, key=lambda n: abs(n - num_blocks))
        raise ValueError(
            f"`num_blocks` must divide the width that the gates work on, {width}; got "
            f"{num_blocks}. The nearest that does is {nearest}."
        )
