"""The record of an implementation, which its file defines under the name of the operation."""

import importlib
from collections.abc import Callable
from typing import NamedTuple


class Kernel(NamedTuple):
    """Implementation of an operation.

    Attributes:
        function: computes the operation from tensors and options, given by keyword.
        unsupported: function of the same arguments. It returns the reason why `function` does not
            support them, or None. None: all are supported.
        forward, backward: on JAX, the passes from which `build` makes `function`, so that each is
            chosen when a program is lowered for a platform. None: `function` is chosen as a whole.
        build: on JAX, makes the function of an operation from any implementation's passes.
        has_residuals: boolean. True: the last result of `forward` is residuals, which only the
            `backward` of the same implementation reads.
        effect_on_state: on torch, for sequence parallelism: returns the decay and the total by
            which tokens change a state, without computing their outputs. None: there is none.
    """

    function: Callable
    unsupported: Callable | None = None
    forward: Callable | None = None
    backward: Callable | None = None
    build: Callable | None = None
    has_residuals: bool = False
    effect_on_state: Callable | None = None

    def __call__(self, *arguments, **options):
        return self.function(*arguments, **options)

    @property
    def passes(self):
        """The passes that there are, in order, which are the arguments of `build`."""
        return tuple(f for f in (self.forward, self.backward) if f is not None)

    def replace_passes(self, forward, backward=None, unsupported=None):
        """Returns the kernel of the same operation that other passes make."""
        assert self.build is not None
        new = self._replace(forward=forward, backward=backward, unsupported=unsupported)
        return new._replace(function=self.build(*new.passes))


def as_kernel(unsupported):
    """Decorates a function that computes an operation: makes it a `Kernel` with `unsupported`."""
    return lambda function: Kernel(function, unsupported)


def make_kernel(build, forward, backward, has_residuals=False):
    """Returns the `Kernel` of the function `build(forward, backward)`."""
    return Kernel(build(forward, backward), None, forward, backward, build, has_residuals)


def load_kernel(package, operation):
    """Returns the `Kernel` that a file of a package defines, such as `linear_scan.linear_scan`.

    A file may also define a function, which supports all arguments.
    """
    defined = getattr(importlib.import_module(f"{package}.{operation}"), operation)
    return defined if isinstance(defined, Kernel) else Kernel(defined)
