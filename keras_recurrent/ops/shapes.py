"""Shapes of which a part is not known yet."""


def fits(shape, wanted):
    """Whether two shapes can be the same; None stands for any size."""
    return len(shape) == len(wanted) and all(
        None in (a, b) or a == b for a, b in zip(shape, wanted, strict=True)
    )
