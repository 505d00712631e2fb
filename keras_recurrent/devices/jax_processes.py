"""One model in several processes of JAX, each of which has some of the devices.

All processes call what a program calls in one: they gather a tensor at a time where it is whole,
and the first of them writes files.

`keras.callbacks.OrbaxCheckpoint`, with the extra `orbax`, gathers nothing: each process writes its
shards of weights and slots while training goes on, and `model.load_weights(directory)` reads them
where a model of the same layout wants them. It takes strings for paths.
"""

import contextlib
import functools
import os
import tempfile

import keras
from keras import ops


def several():
    """Whether there are other processes, which have other devices of the same program."""
    return _jax() is not None and _jax().process_count() > 1


def is_first():
    """Whether this process is the one that writes."""
    return not several() or _jax().process_index() == 0


def whole(tensor):
    """A variable or tensor as a NumPy array; all processes must ask for it together."""
    value = tensor.value if isinstance(tensor, keras.Variable) else tensor
    if not several() or not isinstance(value, _jax().Array):
        return ops.convert_to_numpy(value)
    if value.is_fully_addressable or value.is_fully_replicated:
        return ops.convert_to_numpy(value)
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(value, tiled=True)


@contextlib.contextmanager
def own_path(path):
    """A path to write to: the same for the first process, for others one that is removed.

    No process goes on before all have written.
    """
    if is_first():
        yield path
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield os.path.join(folder, os.path.basename(path))
    if several():
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices("keras_recurrent: written")


class SavedByAllProcesses:
    """Lets several processes save a Keras model whose weights and slots are spread over them.

    All of them call the method that saves. Each tensor is gathered by itself, and the first
    process alone writes it.
    """

    def save(self, filepath, *args, **kwargs):
        """Saves the model to a `.keras` file: `keras.Model.save`, whose arguments it takes."""
        with _gathering(self), own_path(filepath) as path:
            return super().save(path, *args, **kwargs)  # type: ignore[misc]

    def save_weights(self, filepath, *args, **kwargs):
        """Saves the weights alone: `keras.Model.save_weights`, whose arguments it takes."""
        with _gathering(self), own_path(filepath) as path:
            return super().save_weights(path, *args, **kwargs)  # type: ignore[misc]

    def save_to_preset(self, preset_dir, *args, **kwargs):
        """Saves model, weights, tokenizer and preprocessor to a folder that `from_preset` takes.

        Low-rank adapters are saved with it, and a model gives the same outputs when it is loaded.

        Args:
            preset_dir: string, the folder; it is made where there is none.
            max_shard_size: integer or float, the size in GB from which on weights are several
                files; None: they are one.
        """
        with _gathering(self), own_path(preset_dir) as path:
            return super().save_to_preset(path, *args, **kwargs)  # type: ignore[misc]


@contextlib.contextmanager
def _gathering(model):
    """Has the layers and the optimizer of a model hand over whole arrays, where they are saved."""
    if not several():
        yield
        return
    savers = {layer: layer.save_own_variables for layer in model._flatten_layers()}
    if optimizer := getattr(model, "optimizer", None):
        savers[optimizer] = functools.partial(_save_slots, optimizer)
    # A method that saves a model may save its backbone by the same method.
    savers = {of: save for of, save in savers.items() if not isinstance(save, _Whole)}
    for saver, save in savers.items():
        # Past `__setattr__` of Keras, which tracks what a layer has.
        object.__setattr__(saver, "save_own_variables", _Whole(save))
    try:
        yield
    finally:
        for saver in savers:
            object.__delattr__(saver, "save_own_variables")


def _save_slots(optimizer, store):
    """As Keras does, which would ask each variable for its NumPy array."""
    for i, variable in enumerate(optimizer.variables):
        store[str(i)] = variable


class _Whole:
    """A `save_own_variables` with a store that gathers what it is given."""

    def __init__(self, save):
        self._save = save

    def __call__(self, store):
        self._save(_Gathered(store))


class _Gathered:
    def __init__(self, store):
        self._store = store

    def __setitem__(self, name, tensor):
        array = whole(tensor)
        if is_first():
            self._store[name] = array


def _jax():
    if keras.config.backend() != "jax":
        return None
    import jax

    return jax
