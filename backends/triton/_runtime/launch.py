"""A kernel launch as a value: the kernel, its inputs and its outputs.

A launch does not depend on a framework. `torch_operators.py` allocates the outputs and runs the
kernel immediately; `jax_functions.py` adds the launch to the program that is being traced.
"""

from typing import Any, NamedTuple

import triton


class Array(NamedTuple):
    """An output of a launch: its shape, the name of its dtype, and its initial contents."""

    shape: tuple
    dtype: str
    zeros: bool = False  # True: zeros before the launch; False: arbitrary numbers

    def astype(self, dtype):
        return self._replace(dtype=dtype)


def candidates_of(kind):
    """Returns a function that makes a tuple of candidates from tuples of their fields.

    Args:
        kind: the class of a candidate, a named tuple.
    """
    return lambda *rows: tuple(kind(*row) for row in rows)


def like(x):
    """An `Array` with the shape and dtype of a framework's array x."""
    return Array(tuple(x.shape), dtype_name(x))


def dtype_name(x):
    """The name of an array's dtype, such as "float32", in any framework."""
    return str(x.dtype).removeprefix("torch.")


def cdiv(number, size):
    """The number of blocks of `size` that hold `number` elements.

    `triton.cdiv` and `triton.next_power_of_2` are wrapped for use inside kernels, which takes
    several microseconds per call.
    """
    return -(-number // size)


def next_power_of_2(number):
    """The smallest power of two that is at least `number`, an integer of at least 0."""
    return 1 << max(0, number - 1).bit_length()


def flat(arguments):
    """The arrays of a launch's inputs or outputs in order, including those in tuples."""
    if tuple not in map(type, arguments):
        return arguments
    return [
        x for argument in arguments for x in (argument if type(argument) is tuple else [argument])
    ]


def map_arrays(function, arguments):
    """Applies a function to all arrays (or Nones) of a launch's inputs or outputs."""
    return tuple(
        tuple(map(function, argument)) if type(argument) is tuple else function(argument)
        for argument in arguments
    )


class Launch(NamedTuple):
    """A kernel, its one-dimensional grid, and its arguments in order.

    JAX passes inputs before outputs, so every kernel takes them in this order. A tuple of arrays is
    one argument of a kernel.
    """

    kernel: triton.runtime.jit.KernelInterface
    programs: int
    inputs: tuple  # arrays of a framework, contiguous; None for one that is absent
    outputs: tuple  # `Array`s; None for one that is not needed
    numbers: tuple  # sizes, strides and other scalars
    options: dict[str, Any]  # constants by name, and the numbers of warps and registers
    # Pairs (index of an input, index of the output with its new value): such an output begins as a
    # copy of the input, and may reuse its memory.
    updates: tuple[tuple[int, int], ...] = ()
    in_place: bool = False  # True: updated inputs are used nowhere else, and need no copy
