"""Saving and gathering in JAX programs of several processes, each with some of the devices.

All processes call the same functions. Tensors are gathered one at a time, and only the first
process writes files.

`keras.callbacks.OrbaxCheckpoint`, with the extra `orbax`, gathers nothing: each process writes its
shards of weights and optimizer slots while training continues, and `model.load_weights(directory)`
loads them into a model with the same layout. It takes paths as strings.
"""

import contextlib
import functools
import inspect
import json
import os
import tempfile

import keras
import numpy as np
from keras import ops

from keras_recurrent import atomic_files, compat
from keras_recurrent.atomic_files import AtomicPreset


def is_multi_process():
    """Returns True if other processes run the same JAX program on other devices."""
    return _jax() is not None and _jax().process_count() > 1


def is_first():
    """Returns True in the process that writes files."""
    return process_index() == 0


def gather_to_numpy(tensor):
    """Returns a variable or tensor as a NumPy array. All processes must call it together."""
    value = tensor.value if isinstance(tensor, keras.Variable) else tensor
    if not is_multi_process() or not isinstance(value, _jax().Array):
        return ops.convert_to_numpy(value)
    if value.is_fully_addressable or value.is_fully_replicated:
        return ops.convert_to_numpy(value)
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(value, tiled=True)


def gather_json(content):
    """Returns a list of the JSON-serializable values of all processes, in order of their indices.

    All processes must call it together.
    """
    text = json.dumps(content, default=int)
    if not is_multi_process():
        return [json.loads(text)]
    from jax.experimental import multihost_utils

    data = np.frombuffer(text.encode(), "uint8")
    sizes = multihost_utils.process_allgather(np.array(data.size))
    padded = multihost_utils.process_allgather(np.pad(data, (0, sizes.max() - data.size)))
    return [json.loads(row[:size].tobytes()) for row, size in zip(padded, sizes, strict=True)]


def process_index():
    """Returns the index of this process."""
    return _jax().process_index() if is_multi_process() else 0


def begin_gathering(tensors):
    """Starts to copy tensors, which may not be computed yet, for later calls of `gather_to_numpy`.

    tensors: nested tensors.
    """
    for tensor in keras.tree.flatten(tensors):
        if getattr(tensor, "is_fully_addressable", False):  # an array of JAX
            tensor.copy_to_host_async()


@contextlib.contextmanager
def shared_output_path(path):
    """Context manager that yields `path` in the first process, a temporary path in others.

    Returns after all processes have left the block.
    """
    if is_first():
        yield path
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield os.path.join(folder, os.path.basename(path))
    if is_multi_process():
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices("keras_recurrent: written")


class SavedByAllProcesses(AtomicPreset):
    """Mixin to save a Keras model whose weights and optimizer slots several processes share.

    All processes call the method. Tensors are gathered one at a time, and only the first process
    writes them. Files and folders are replaced in one step.
    """

    def save_to_preset(self, preset_dir, *args, **kwargs):
        """Saves model, weights, tokenizer and preprocessor to a folder for `from_preset`.

        The folder is replaced in one step: if the process is killed or the disk is full, the old
        content is complete. Other files in the folder are kept. LoRA weights are included: the
        loaded model gives the same outputs.

        Args:
            preset_dir: string, the folder, which is created if it does not exist.
            max_shard_size: integer or float, the size in GB above which weights are split into
                several files. None: one file.
        """
        with _gather_on_save(self), shared_output_path(preset_dir) as path:
            return super().save_to_preset(path, *args, **kwargs)


def save_atomically(save):
    """Returns a function of Keras that saves `SavedByAllProcesses` in all processes, in one step.

    Streams, remote files and sharded weights outside of presets are written in place.
    """

    @functools.wraps(save)
    def save_model(model, filepath, *args, **kwargs):
        if not isinstance(model, SavedByAllProcesses):
            return save(model, filepath, *args, **kwargs)
        arguments = inspect.signature(save).bind(model, filepath, *args, **kwargs).arguments
        in_place = not isinstance(filepath, (str, os.PathLike)) or arguments.get("max_shard_size")
        with _gather_on_save(model), shared_output_path(filepath) as path:
            if in_place or compat.is_remote_path(path):
                return save(model, path, *args, **kwargs)
            with atomic_files.replace(path) as new:
                return save(model, new, *args, **kwargs)

    return save_model


@contextlib.contextmanager
def _gather_on_save(model):
    """Makes the layers and the optimizer of a model gather whole arrays when they are saved."""
    if not is_multi_process():
        yield
        return
    savers = {layer: layer.save_own_variables for layer in model._flatten_layers()}
    if optimizer := getattr(model, "optimizer", None):
        savers[optimizer] = functools.partial(_save_slots, optimizer)
    # Saving a model may save its backbone by the same method, inside this one.
    savers = {saver: save for saver, save in savers.items() if not isinstance(save, _GatheringSave)}
    for saver, save in savers.items():
        # `__setattr__` of Keras would track the attribute.
        object.__setattr__(saver, "save_own_variables", _GatheringSave(save))
    try:
        yield
    finally:
        for saver in savers:
            object.__delattr__(saver, "save_own_variables")


def _save_slots(optimizer, store):
    """Stores an optimizer's variables as Keras does, but without converting them to NumPy."""
    for i, variable in enumerate(optimizer.variables):
        store[str(i)] = variable


class _GatheringSave:
    """A `save_own_variables` that gathers the tensors it stores."""

    def __init__(self, save):
        self._save = save

    def __call__(self, store):
        self._save(_GatheringStore(store))


class _GatheringStore:
    def __init__(self, store):
        self._store = store

    def __setitem__(self, name, tensor):
        array = gather_to_numpy(tensor)
        if is_first():
            self._store[name] = array


def _jax():
    if keras.config.backend() != "jax":
        return None
    import jax

    return jax
