"""A launch of a kernel, as a value: which kernel, on what, and what it writes.

It names no framework. `torch_operators.py` allocates what a kernel writes and runs it at once;
`jax_functions.py` makes it a part of the program that is being traced.
"""

from typing import Any, NamedTuple

import triton


class Array(NamedTuple):
    """An array that a launch makes: its shape, the name of its dtype, and what it holds before."""

    shape: tuple
    dtype: str
    zeros: bool = False  # else anything

    def with_dtype(self, dtype):
        return self._replace(dtype=dtype)


def like(x):
    """An `Array` of the shape and dtype of an array of a framework."""
    return Array(tuple(x.shape), dtype_name(x))


def dtype_name(x):
    """The name of an array's dtype, "float32", in every framework."""
    return str(x.dtype).removeprefix("torch.")


class Launch(NamedTuple):
    """A kernel's arguments, in their order, and its grid, which has one dimension.

    JAX hands over inputs before outputs, so every kernel takes them in this order.
    """

    kernel: triton.runtime.jit.KernelInterface
    programs: int
    inputs: tuple  # arrays of a framework, contiguous; None for one that is absent
    outputs: tuple  # `Array`s; None for one that is not wanted
    numbers: tuple  # sizes, strides and other scalars
    options: dict[str, Any]  # constants by name, and how many warps and registers a program has
    # The places of inputs and of their new values among the outputs: such an output holds what the
    # input does before the kernel writes to it, and may take its memory.
    updates: tuple[tuple[int, int], ...] = ()
    in_place: bool = False  # nothing else reads the inputs that it updates: no copy is needed
