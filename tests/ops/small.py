"""A small input of each operation with gradients, for tests of properties that all share."""

from tests.ops import cases, losses, token_wise

OPERATIONS = (*cases.DRAW, *token_wise.DRAW, "linear_crossentropy")


def draw(operation, length=5, dtype="float32", parameter_dtype=None, seed=0, **options):
    """options: further fields of the `Case` of an operation over time, or on each token."""
    if operation in cases.DRAW:
        case = cases.Case(2, length, 3, dtype, parameter_dtype, **options)
        return cases.draw(operation, case, seed)
    if operation in token_wise.DRAW:
        case = token_wise.Case((2, length, 8), dtype, parameter_dtype, **options)
        return token_wise.draw(operation, case, seed)
    return losses.draw(losses.Case((2, length), dtype=dtype, **options), seed=seed)
