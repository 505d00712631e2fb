"""Arguments of `from_preset` that override a preset. Each has an effect or raises an error."""

import difflib
import inspect


def split_overrides(preset, cls, kwargs):
    """Returns three dictionaries: arguments of the task, its backbone and its preprocessor."""
    classes = (cls, cls.backbone_cls, cls.preprocessor_cls)
    check_overrides(preset, classes, kwargs)
    shares = ({}, {}, {})
    for key, value in kwargs.items():
        taker = next(i for i, c in enumerate(classes) if key in _parameters(c))
        shares[taker][key] = value
    for given, share in zip(("backbone", "preprocessor"), shares[1:], strict=True):
        if given in shares[0] and share:
            raise ValueError(
                f"{', '.join(map(repr, share))}: belongs to the {given}, which is passed as "
                f"`{given}=`. Pass it to the constructor of the {given}."
            )
    return shares


def check_overrides(preset, classes, kwargs):
    """Raises an error for arguments that none of `classes` takes."""
    known = [key for c in classes for key in _parameters(c)]
    for key in kwargs:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"`from_preset({preset!r})` got {key!r}, which nothing takes.{hint} Known: "
                f"{', '.join(sorted(set(known)))}"
            )


def takes_argument(cls, name):
    """Returns True if the constructor of a class names an argument."""
    return name in _parameters(cls)


def _parameters(cls):
    if cls is None:  # a task without a preprocessor
        return []
    # Until Python 3.11.4, the signature of the class is that of Keras's `__new__(cls, *args, ...)`.
    _, *parameters = inspect.signature(cls.__init__).parameters.values()
    return [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]


def check_weights_fit(preset, cls, overrides):
    """Raises an error if overrides change the shape of a backbone whose weights are loaded."""
    changed = sorted(overrides.keys() - {"dtype", *getattr(cls, "free_arguments", ())})
    if changed:
        raise ValueError(
            f"{', '.join(map(repr, changed))}: the weights in {preset!r} fit only the backbone "
            "they were saved from. Pass `load_weights=False` for fresh weights in another."
        )
