"""A small input of each operation with gradients, for tests of properties that all share."""

from tests.ops import cases, losses, steps, token_wise

OPERATIONS = (*cases.DRAW, *token_wise.DRAW, "linear_crossentropy")


def draw_case(operation, case, seed=0):
    """Inputs of an operation for a `Case` of any module."""
    if isinstance(case, losses.Case):
        return losses.draw(case, seed)
    modules = {module.Case: module for module in (cases, steps, token_wise)}
    return modules[type(case)].draw(operation, case, seed)


def draw(operation, length=5, dtype="float32", parameter_dtype=None, seed=0, **options):
    """options: further fields of the `Case` of an operation over time, or on each token."""
    if operation in cases.DRAW:
        case = cases.Case(2, length, 3, dtype, parameter_dtype, **options)
    elif operation in token_wise.DRAW:
        case = token_wise.Case((2, length, 8), dtype, parameter_dtype, **options)
    else:
        case = losses.Case((2, length), dtype=dtype, **options)
    return draw_case(operation, case, seed)
