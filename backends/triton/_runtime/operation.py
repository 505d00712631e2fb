"""An operation as two functions that launch kernels, with the facts that frameworks need."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from ...signatures import SIGNATURES
from .launch import like

# Arguments that have no gradient, always the last ones.
INTEGERS = ("token_kind", "tokens")


class Operation(NamedTuple):
    """Two functions of arrays, forward and backward, and the shapes of the forward's results.

    - forward(*tensors, **options) returns a tuple: the output, the final state if there is one,
      then residuals that only the backward reads.
    - backward(*tensors, output, *residuals, *d_results, **options) returns a gradient for each
      tensor, None for one that is absent or has no gradient. All d_results but the first may be
      None if nothing depends on that result; this is so on torch, while JAX passes zeros.
    - results takes the arguments of forward and returns `Array`s.
    - unsupported and effect_on_state are those of the `Kernel`.

    Tensors may be None. Options are keyword arguments, numbers or strings.
    """

    name: str
    forward: Callable
    results: Callable
    backward: Callable
    unsupported: Callable | None = None
    saves_output: bool = False  # False: the backward gets None in place of the output
    unused_in_backward: tuple = ()  # tensors for which the backward gets None
    residuals: tuple = ()  # names of the dimensions of the last results, only for the backward
    on_jax: bool = True  # False where XLA replaces the kernels on JAX
    effect_on_state: Callable | None = None

    def gradients(self, *arguments, **_options):
        """`Array`s of the gradients, from the arguments of the backward.

        Each has the shape and dtype of its tensor, but the gradient of an initial state is float32.
        The gradient of a tensor that the backward does not get is like the output.
        """
        output = arguments[len(self.parameters.tensors)]
        arrays = []
        for name, x in zip(self.differentiable, arguments, strict=False):
            x = output if name in self.unused_in_backward else x
            array = None if x is None else like(x)
            arrays.append(array.astype("float32") if array and name == "initial_state" else array)
        return arrays

    @property
    def dimensions(self):
        """Names of the dimensions of each tensor; "..." means any number of token dimensions."""
        return SIGNATURES[self.name].layout[0]

    @property
    def result_dimensions(self):
        """Names of the dimensions of each result of forward, residuals included."""
        return (*SIGNATURES[self.name].layout[1], *self.residuals)

    @property
    def channels(self):
        """Dimensions besides the batch whose members are independent."""
        return SIGNATURES[self.name].channels

    @property
    def parameters(self):
        """The `Parameters` of forward."""
        return parameters_of(self.forward)

    @property
    def num_results(self):
        """Number of results without residuals."""
        return len(self.result_dimensions) - len(self.residuals)

    @property
    def is_token_wise(self):
        """Returns True if the operation processes each token independently."""
        return self.dimensions[0].startswith("...")

    @property
    def differentiable(self):
        """The names of the tensors that have a gradient."""
        return [name for name in self.parameters.tensors if name not in INTEGERS]


class Parameters(NamedTuple):
    """Parameters of a function that launches kernels, from its signature.

    Attributes:
        tensors: list of the names of tensors and of lists of tensors.
        options: `{name: annotation}` of the other parameters, which alone have an annotation.
        lists: the names of lists of tensors or Nones, annotated `list`.
        defaults: `{name: default}`.
    """

    tensors: list[str]
    options: dict[str, Any]
    lists: list[str]
    defaults: dict[str, Any]


def parameters_of(function):
    """The `Parameters` of a function."""
    given = inspect.signature(function).parameters.values()
    options = {p.name: p.annotation for p in given if p.annotation not in (p.empty, list)}
    return Parameters(
        [p.name for p in given if p.name not in options],
        options,
        [p.name for p in given if p.annotation is list],
        {p.name: p.default for p in given if p.default is not p.empty},
    )


def tensors_among(arguments):
    """The tensors among arguments and lists of them; the others are options and Nones."""
    listed = [x for a in arguments for x in (a if isinstance(a, list) else (a,))]
    return [x for x in listed if hasattr(x, "dtype")]
