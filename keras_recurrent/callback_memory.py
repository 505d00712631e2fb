"""What callbacks of Keras remember from epoch to epoch, kept with a training run."""

import keras

# The attributes that `on_train_begin` of each sets, or that begin as an argument says.
REMEMBERED = {
    keras.callbacks.EarlyStopping: ("best", "best_epoch", "wait", "stopped_epoch"),
    keras.callbacks.ModelCheckpoint: ("best",),
    keras.callbacks.ReduceLROnPlateau: ("best", "wait", "cooldown_counter"),
}
BEST_WEIGHTS = "best_weights"  # of an `EarlyStopping` that restores them


def check_callbacks(callbacks):
    """A tuple of callbacks whose memory is known.

    Raises:
        ValueError: something else.
    """
    known = ", ".join(f"`{cls.__name__}`" for cls in REMEMBERED)
    if not isinstance(callbacks, (list, tuple)):
        raise ValueError(f"`callbacks` must be a list of {known}; got {callbacks!r}.")
    for callback in callbacks:
        if _names(callback) is None:
            raise ValueError(
                f"`callbacks` must be of {known}, whose memory is known; got a "
                f"{type(callback).__name__}. Leave it out here."
            )
    return tuple(callbacks)


def memory_of(callbacks):
    """`(content, arrays)`: a list of what JSON can hold, and `{name: list of arrays}`."""
    content, arrays = [], {}
    for i, callback in enumerate(callbacks):
        values = {name: getattr(callback, name, None) for name in _names(callback)}
        values = {name: None if v is None else float(v) for name, v in values.items()}
        weights = getattr(callback, BEST_WEIGHTS, None)
        content.append({"class": _class_name(callback), "values": values})
        arrays[part_name(i)] = [] if weights is None else weights
    return content, arrays


def describe(callbacks):
    """What a file says of its callbacks, to be compared."""
    return [_class_name(callback) for callback in callbacks]


def restore(callbacks, content, arrays):
    """Gives callbacks what `memory_of` found.

    Args:
        callbacks: those that `describe` describes as those of the file.
        content: as from `memory_of`.
        arrays: a function of the name of a part, an iterable of its arrays.
    """
    for i, (callback, kept) in enumerate(zip(callbacks, content, strict=True)):
        for name, value in kept["values"].items():
            whole = value is not None and name != "best"  # all others count
            setattr(callback, name, int(value) if whole else value)
        if hasattr(callback, BEST_WEIGHTS):
            callback.best_weights = list(arrays(part_name(i))) or None


def part_name(i):
    """Where a file has the arrays of a callback."""
    return f"callback_{i}"


def _names(callback):
    for cls, names in REMEMBERED.items():
        if isinstance(callback, cls):
            return names
    return None


def _class_name(callback):
    return type(callback).__name__
