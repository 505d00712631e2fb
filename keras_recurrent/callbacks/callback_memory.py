"""State of Keras's callbacks from epoch to epoch, saved in a `TrainingBackup`."""

import keras

# {callback: attributes set by its `on_train_begin` or its constructor}
REMEMBERED = {
    keras.callbacks.EarlyStopping: ("best", "best_epoch", "wait", "stopped_epoch"),
    keras.callbacks.ModelCheckpoint: ("best",),
    keras.callbacks.ReduceLROnPlateau: ("best", "wait", "cooldown_counter"),
}
BEST_WEIGHTS = "best_weights"  # attribute of an `EarlyStopping` that restores weights


def check_callbacks(callbacks):
    """Returns a tuple of callbacks whose state can be saved.

    Raises:
        ValueError: a callback is of another class.
    """
    known = ", ".join(f"`{cls.__name__}`" for cls in REMEMBERED)
    if not isinstance(callbacks, (list, tuple)):
        raise ValueError(f"`callbacks` must be a list of {known}; got {callbacks!r}.")
    for callback in callbacks:
        if _attribute_names(callback) is None:
            raise ValueError(
                f"`callbacks` must be of {known}, whose state can be saved; got a "
                f"{type(callback).__name__}. Leave it out here."
            )
    return tuple(callbacks)


def collect_memory(callbacks):
    """Returns `(content, arrays)`: a list for JSON, and `{name: list of arrays}`."""
    content, arrays = [], {}
    for i, callback in enumerate(callbacks):
        values = {name: getattr(callback, name, None) for name in _attribute_names(callback)}
        values = {name: None if v is None else float(v) for name, v in values.items()}
        weights = getattr(callback, BEST_WEIGHTS, None)
        content.append({"class": type(callback).__name__, "values": values})
        arrays[part_name(i)] = [] if weights is None else weights
    return content, arrays


def describe(callbacks):
    """Returns the class names of callbacks, for comparison with a file."""
    return [type(callback).__name__ for callback in callbacks]


def restore(callbacks, content, arrays):
    """Restores the state of callbacks.

    Args:
        callbacks: callbacks with the same `describe` as those of the file.
        content: the list from `collect_memory`.
        arrays: a function from the name of a part to an iterable of its arrays.
    """
    for i, (callback, saved) in enumerate(zip(callbacks, content, strict=True)):
        for name, value in saved["values"].items():
            is_count = value is not None and name != "best"  # all other values are counters
            setattr(callback, name, int(value) if is_count else value)
        if hasattr(callback, BEST_WEIGHTS):
            callback.best_weights = list(arrays(part_name(i))) or None


def part_name(i):
    """Returns the name of the part of a file with the arrays of callback `i`."""
    return f"callback_{i}"


def _attribute_names(callback):
    return next((names for cls, names in REMEMBERED.items() if isinstance(callback, cls)), None)
