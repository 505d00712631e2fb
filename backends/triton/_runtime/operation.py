"""An operation as launches, with what a framework has to know of it."""

import inspect
from collections.abc import Callable
from typing import NamedTuple

# Arguments that have no gradient, always the last ones.
INTEGERS = ("token_kind", "tokens")


class Operation(NamedTuple):
    """Two functions of arrays, forward and backward, and the shapes of what they return.

    forward(*tensors, **options) returns a tuple: the output, then the final state where there is
    one, then what only the backward reads.
    backward(*tensors, output, *d_results, **options) returns a gradient for each tensor, None for
    one that is absent or has none. Where something was kept for it, that comes before d_results. Of
    d_results all but the first may be None where nothing depends on that result, as torch has it;
    on JAX they are zeros then.
    results and gradients take the same arguments, and return `Array`s in place of arrays.

    Of tensors some may be None. Options are keyword arguments, numbers or strings.
    """

    name: str
    forward: Callable
    results: Callable
    backward: Callable
    gradients: Callable
    # A name for each dimension of each tensor, such as "b t d", and of each result; "..." are those
    # of tokens, any number. None where XLA does on JAX, which needs the names, what kernels do.
    # Results are all that the forward returns.
    dimensions: tuple | None = None
    result_dimensions: tuple | None = None
    channels: str | None = "d"  # the dimension, beside the batch, whose members are independent
    keeps_output: bool = False  # else the backward gets None in its place
    without: tuple = ()  # tensors that the backward does not read, and gets None for
    kept: int = 0  # how many of the last results only the backward reads

    @property
    def tensors(self):
        """The names of the tensors."""
        return tensors_of(self.forward)

    @property
    def num_results(self):
        """How many results there are beside those that only the backward reads."""
        return 1 if self.result_dimensions is None else len(self.result_dimensions) - self.kept

    @property
    def is_token_wise(self):
        """Whether it sees one token at a time."""
        return self.dimensions is None or self.dimensions[0].startswith("...")

    @property
    def options(self):
        """{name: annotation} of the options."""
        return options_of(self.forward)

    @property
    def differentiable(self):
        """The names of the tensors that have a gradient."""
        return [name for name in self.tensors if name not in INTEGERS]


def tensors_of(forward):
    """The names of a forward's tensors."""
    parameters = inspect.signature(forward).parameters.values()
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]


def options_of(forward):
    """{name: annotation} of a forward's options."""
    parameters = inspect.signature(forward).parameters.values()
    return {p.name: p.annotation for p in parameters if p.kind is p.KEYWORD_ONLY}
