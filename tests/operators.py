"""Operators of torch that a function calls."""

import collections

from torch.utils._python_dispatch import TorchDispatchMode


def count_operators(function):
    """Calls a function; returns its result and a `Counter` of torch's operators."""
    called = collections.Counter()

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            called[operator] += 1
            return operator(*args, **(kwargs or {}))

    with Operators():
        return function(), called


def operator_names(function):
    """Calls a function; returns its result and the set of the names of torch's operators."""
    result, called = count_operators(function)
    return result, {operator.overloadpacket.__name__ for operator in called}
