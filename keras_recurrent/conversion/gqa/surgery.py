"""One layer in the place of another inside a built model."""

import contextlib

import keras


def replace_layer(root, old, new):
    """Puts `new` wherever `old` is held below `root`: attributes, lists, dictionaries.

    The order of the layers stays, so files of weights and the order of `model.weights` fit those
    of a model that was built with `new` from the start.
    """
    for holder in root._flatten_layers():
        if not any(layer is old for layer in holder._layers):
            continue
        holder._tracker.replace_tracked_value("layers", old, new)
        for name, value in list(vars(holder).items()):
            if name == "_layers":  # the tracker's own list
                continue
            if value is old:
                setattr(holder, name, new)
            elif isinstance(value, list):
                for i, entry in enumerate(value):
                    if entry is old:
                        list.__setitem__(value, i, new)
            elif isinstance(value, dict):
                for key, entry in value.items():
                    if entry is old:
                        dict.__setitem__(value, key, new)
    if keras.backend.backend() == "torch":
        # A built layer lists all parameters below it for torch: make those lists anew.
        for layer in root._flatten_layers():
            if hasattr(layer, "_torch_params"):
                layer._track_variables()


def build_in_place_of(old, new, *args, **kwargs):
    """Builds `new` under the names that `old` was built under, so its weights have those paths."""
    with contextlib.ExitStack() as scopes:
        for name in old.path.split("/")[:-1]:
            scopes.enter_context(keras.name_scope(name))
        new.build(*args, **kwargs)
