"""Backup of training runs, which resume bit-identically."""

import contextlib
import json
import os
import zipfile

import keras
import numpy as np

from keras_recurrent import atomic_files, compat
from keras_recurrent.checks.arguments import check_boolean, check_positive_integer
from keras_recurrent.devices.jax_processes import (
    gather_json,
    gather_to_numpy,
    process_index,
    shared_output_path,
)

__all__ = ["TrainingBackup"]

WEIGHTS, SLOTS, METRICS, GENERATORS = "weights", "optimizer", "metrics", "generators"
# Version 2 had the data of one process. Version 1 also had no state of other callbacks.
VERSION = 3
CONTENT = "content.json"
# {callback: attributes that it keeps from epoch to epoch}
REMEMBERED = {
    keras.callbacks.EarlyStopping: ("best", "best_epoch", "wait", "stopped_epoch"),
    keras.callbacks.ModelCheckpoint: ("best",),
    keras.callbacks.ReduceLROnPlateau: ("best", "wait", "cooldown_counter"),
}


class TrainingBackup(keras.callbacks.Callback):
    """Saves the complete state of a training run in one file, to resume inside an epoch.

    A run that is killed at any time and started again by the same program ends bit-identical to an
    uninterrupted one, on the same backend and machine. The file has the weights, the variables of
    the optimizer and of metrics, the seeds of layers such as dropout (on torch also the states of
    torch's generators) and the position in the data. It is written before the first step of each
    epoch and then every `save_freq` batches, and is deleted when training ends. A temporary file is
    written first and then renamed, so a complete file exists at any time.

    A resumed run prints its first epoch and step, counted from 1, unless `fit` gets `verbose=0`.
    The resumed epoch counts batches from its beginning. Batches trained before the backup are
    skipped without a step, but callbacks are called for them again.

    **Data.** A `keras_recurrent.datasets.PackedText` resumes at its position: pass it as `data`,
    too. Any other source must restart in each epoch and yield the same batches in the same epoch of
    another run; the batches of the epoch before the backup are then read again.

    - Supported: strings in memory and datasets of grain of known length in `fit` of this package's
      language models, shuffled or not (after `keras.utils.set_random_seed`), and unshuffled arrays,
      `tf.data` and loaders.
    - Supported: several processes of JAX, each with its own `PackedText` of different `documents`.
      They share one file, which has the positions of all processes.
    - Not supported: generators and other streams that continue from epoch to epoch, and arrays that
      Keras shuffles.

    **Compared with Keras.** `keras.callbacks.BackupAndRestore` does not save the seeds of layers
    and torch's generators, the position in data that continues from epoch to epoch, or the state of
    other callbacks. With an integer `save_freq`, it restarts the epoch, and if the process
    is killed between the writes of its two files, an epoch is trained twice. Neither class saves
    the `History` of earlier epochs and the state of Python's and NumPy's generators.

    Args:
        path: string, the file.
        save_freq: integer, batches between backups.
        data: the `PackedText` that the model trains on, without `passes`. None for other sources.
        delete_checkpoint: boolean, deletes the file when training ends. If False, a run started
            again after its end has the last weights and trains no further.
        callbacks: a list of callbacks of the same `fit` whose state is saved, too, of the classes
            `keras.callbacks.EarlyStopping`, `ModelCheckpoint` and `ReduceLROnPlateau`: the best
            value, the number of epochs without a better one, and the best weights of an
            `EarlyStopping` that restores them.

    Raises:
        ValueError: an argument has another type; in `fit`, before anything is changed, the file is
            damaged or belongs to another model, data or number of steps. (TensorFlow makes metrics
            in the first step, and they are compared there.)

    Example:

    >>> import os, tempfile
    >>> import keras, numpy as np
    >>> from keras_recurrent.callbacks import TrainingBackup
    >>> def run(path, stop_at=None):
    ...     keras.utils.set_random_seed(0)
    ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    ...     model.compile("adam", "mse")
    ...     def stop(batch, logs=None):
    ...         if batch == stop_at:
    ...             raise KeyboardInterrupt
    ...     callbacks = [
    ...         TrainingBackup(path, save_freq=2),
    ...         keras.callbacks.LambdaCallback(on_train_batch_begin=stop),
    ...     ]
    ...     x = np.arange(36.0).reshape(12, 3) / 36
    ...     model.fit(x, x[:, :1], 2, shuffle=False, callbacks=callbacks, verbose=0)
    ...     return model.get_weights()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "run.backup")
    ...     whole = run(path)
    ...     try:
    ...         run(path, stop_at=5)
    ...     except KeyboardInterrupt:
    ...         resumed = run(path)
    >>> all((a == b).all() for a, b in zip(whole, resumed))
    True
    """

    def __init__(self, path, save_freq=1000, data=None, delete_checkpoint=True, callbacks=()):
        super().__init__()
        check_positive_integer("save_freq", save_freq)
        check_boolean("delete_checkpoint", delete_checkpoint)
        if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
            raise ValueError(f"`path` must name a file; got {path!r}.")
        if os.path.isdir(path):
            raise ValueError(f"`path` must name a file; {os.fspath(path)!r} is a directory.")
        if data is not None and not getattr(data, "is_endless", False):
            raise ValueError(
                "`data` must be a `keras_recurrent.datasets.PackedText` without `passes`; got a "
                f"{type(data).__name__}. Leave it out for sources that begin anew in each epoch."
            )
        _check_callbacks(callbacks)
        self.callbacks = tuple(callbacks)
        self.path = os.path.abspath(os.fspath(path))
        self.save_freq, self.data, self.delete_checkpoint = save_freq, data, delete_checkpoint

    # There is no `on_train_batch_end`, for which Keras would wait for each step. A backup is
    # written at the beginning of a step, never between epochs, where a source may draw random
    # numbers when it restarts.

    def on_train_begin(self, logs=None):
        model = self.model
        # Reading `self.model` in each step would make JAX synchronize its state.
        self._steps_per_execution = model.steps_per_execution
        self._epoch = None
        self._trained = 0  # batches of earlier epochs in this process, including skipped ones
        self._last = 0  # batches of this epoch, up to the end of the latest step
        self._resumed = Backup(self.path) if os.path.exists(self.path) else None
        if self._resumed is None:
            model._initial_epoch = None
        else:
            self._restore(self._resumed)
        if self.data is not None:
            place, batch = None, 0
            if self._resumed is not None:
                place = self._resumed.content["place"][process_index()]
                batch = self._resumed.content["batch"]
            self.data.start_at(place, batch)

    def on_epoch_begin(self, epoch, logs=None):
        # Keras has read the value. A later `fit` must begin with its `initial_epoch`.
        self.model._initial_epoch = None
        self._epoch, self._trained, self._last = epoch, self._trained + self._last, 0
        self._saved = -self.save_freq
        if self._resumed is not None:
            # All callbacks have reset their state by now, at the beginning of training.
            for i, callback in enumerate(self.callbacks):
                vars(callback).update(self._resumed.content["callbacks"][i]["values"])
                if hasattr(callback, "best_weights"):
                    callback.best_weights = list(self._resumed.arrays(f"callback_{i}")) or None
            self._saved = self._resumed.content["batch"]
            if self._saved:
                self._skip_batches(self._resumed, self._saved)

    def on_train_batch_begin(self, batch, logs=None):
        self._last = batch + self._steps_per_execution
        if self._resumed is not None and batch == self._resumed.content["batch"]:
            self._resumed.assign_generators()
            self._resumed = None
        elif batch - self._saved >= self.save_freq:
            self._write(self._epoch, batch, self._trained + batch)
            self._saved = batch

    def on_train_end(self, logs=None):
        self.model._initial_epoch = None
        if self.delete_checkpoint:
            # The file is missing if nothing was trained, or if another process deleted it.
            with contextlib.suppress(FileNotFoundError):
                os.remove(self.path)
        elif self._epoch is not None:  # at least one epoch was trained
            self._write(self._epoch + 1, 0, self._trained + self._last)

    def _restore(self, backup):
        """Restores the weights, the optimizer and the initial epoch."""
        model, content = self.model, backup.content
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        steps, current = content["steps"], self.params.get("steps")
        if content["batch"] and steps != current:
            raise ValueError(
                f"{self.path} was written inside an epoch of {steps} steps; this one has "
                f"{current}. Use the same data, batch size and `steps_per_epoch`, or delete "
                "the file."
            )
        if content["batch"] % model.steps_per_execution:
            raise ValueError(
                f"{self.path} was written after {content['batch']} steps of an epoch. Compile with "
                f"a `steps_per_execution` that divides these, not {model.steps_per_execution}, or "
                "delete the file."
            )
        description = self._describe_data()
        if content["data"] != description:
            raise ValueError(
                f"{self.path} was written with the data {content['data']}; now it is "
                f"{description}. Use the same data, or delete the file."
            )
        current = [type(callback).__name__ for callback in self.callbacks]
        if (saved := [callback["class"] for callback in content["callbacks"]]) != current:
            raise ValueError(
                f"{self.path} was written with the callbacks {saved}; now they are {current}. Pass "
                "equal `callbacks`, or delete the file."
            )
        for part, variables in _parts(model).items():
            if part != METRICS or not _makes_metrics_late():
                backup.check(variables, part)
        backup.assign(model.variables, WEIGHTS)
        backup.assign(_slots(model), SLOTS)
        model._initial_epoch = content["epoch"]
        if self.params.get("verbose", 1) and process_index() == 0:
            first = f"epoch {content['epoch'] + 1}, step {content['batch'] + 1}"
            compat.print_msg(f"Training resumes at {first}, from {self.path}.")

    def _describe_data(self):
        """Returns a list of descriptions of the data, one for each process, or None."""
        return None if self.data is None else gather_json(self.data.description)

    def _skip_batches(self, backup, batches):
        """Makes the first steps of an epoch only read their batches, which were trained before."""
        model = self.model
        train, history, logs = model.train_function, model.history, None

        def restored_metrics():
            backup.check(model.metrics_variables, METRICS)
            backup.assign(model.metrics_variables, METRICS)
            return model.get_metrics_result()

        def train_function(*arguments):
            nonlocal logs
            if self._last > batches or model.history is not history:  # a later `fit` has another
                model.train_function = train
                return train(*arguments)
            if keras.backend.backend() == "torch":  # gets a batch; other backends get an iterator
                return logs
            for _ in range(self._steps_per_execution):
                batch = next(arguments[-1])
            if logs is None:
                model._symbolic_build(data_batch=batch)
                logs = restored_metrics()
            return logs if keras.backend.backend() == "tensorflow" else (logs, arguments[0])

        if not _makes_metrics_late():
            logs = restored_metrics()
        model.train_function = train_function

    def _write(self, epoch, batch, trained):
        model = self.model
        best_weights = {
            f"callback_{i}": getattr(callback, "best_weights", None) or []
            for i, callback in enumerate(self.callbacks)
        }
        content = {
            "version": VERSION,
            "epoch": epoch,
            "batch": batch,
            "steps": self.params.get("steps"),
            "data": self._describe_data(),
            "place": None if self.data is None else gather_json(self.data.state_after(trained)),
            "callbacks": [
                {"class": type(callback).__name__, "values": _remembered_values(callback)}
                for callback in self.callbacks
            ],
        }
        parts = {**_parts(model), GENERATORS: get_generator_states(), **best_weights}
        write_backup(self.path, content, parts)


def _check_callbacks(callbacks):
    known = ", ".join(f"`{cls.__name__}`" for cls in REMEMBERED)
    if not isinstance(callbacks, (list, tuple)):
        raise ValueError(f"`callbacks` must be a list of {known}; got {callbacks!r}.")
    for callback in callbacks:
        if not isinstance(callback, tuple(REMEMBERED)):
            raise ValueError(
                f"`callbacks` must be of {known}, whose state can be saved; got a "
                f"{type(callback).__name__}. Leave it out here."
            )


def _remembered_values(callback):
    """Returns the attributes of a callback in `REMEMBERED` as integers, floats or None."""
    names = next(names for cls, names in REMEMBERED.items() if isinstance(callback, cls))
    values = {name: getattr(callback, name, None) for name in names}
    return {n: v if isinstance(v, (int, type(None))) else float(v) for n, v in values.items()}


def _makes_metrics_late():
    """Returns True if Keras makes the variables of metrics in the first step, not before it."""
    return keras.backend.backend() == "tensorflow"


def _parts(model):
    return {WEIGHTS: model.variables, SLOTS: _slots(model), METRICS: model.metrics_variables}


def _slots(model):
    return [] if model.optimizer is None else model.optimizer.variables


def get_generator_states():
    """Returns the states of torch's generators, from which a dropout without a seed draws."""
    if keras.backend.backend() != "torch":
        return []
    import torch

    states = [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
    return [state.cpu().numpy() for state in states]


def write_backup(path, content, parts):
    """Writes variables one by one to a file, which replaces `path` in one step.

    Args:
        path: string.
        content: a dictionary for JSON.
        parts: `{name: list of variables or arrays}`.
    """
    with shared_output_path(path) as local_path:
        os.makedirs(os.path.dirname(local_path), exist_ok=True)
        with atomic_files.replace(local_path) as new:
            _write(new, content, parts)


def _write(path, content, parts):
    names = {part: [_describe_variable(v) for v in variables] for part, variables in parts.items()}
    with zipfile.ZipFile(path, "w") as archive:
        for part, variables in parts.items():
            for i, variable in enumerate(variables):
                array = np.asarray(gather_to_numpy(variable))
                with archive.open(f"{part}/{i}", "w", force_zip64=True) as entry:
                    np.lib.format.write_array(entry, _to_integers(array), allow_pickle=False)
        archive.writestr(CONTENT, json.dumps({**content, "variables": names}, default=int))


class Backup:
    """Reader of a file of `write_backup`.

    Raises:
        ValueError: the file is damaged, or of another version.
    """

    def __init__(self, path):
        self.path = path
        try:
            self._archive = zipfile.ZipFile(path)
            if damaged := self._archive.testzip():
                raise zipfile.BadZipFile(f"in its part {damaged}")
            self.content = json.loads(self._archive.read(CONTENT))
        except (zipfile.BadZipFile, KeyError, ValueError) as error:
            raise ValueError(f"{path} is damaged ({error}). Delete it to start again.") from error
        if self.content.get("version") != VERSION:
            raise ValueError(
                f"{path} is of version {self.content.get('version')!r}; this package reads "
                f"{VERSION}. Delete it to start again."
            )

    def check(self, variables, part):
        """Raises an error if variables differ from those of the file in shape or dtype."""
        saved, current = self.content["variables"][part], [_describe_variable(v) for v in variables]
        if saved == current:
            return
        pairs = zip(saved + [None] * len(current), current + [None] * len(saved), strict=True)
        in_file, in_model = next((a, b) for a, b in pairs if a != b)
        raise ValueError(
            f"{self.path} belongs to another model, optimizer or metrics: its {part} are "
            f"{len(saved)} variables, here they are {len(current)}; the first difference is "
            f"{in_file} instead of {in_model}. Delete the file to start again."
        )

    def assign(self, variables, part):
        """Assigns the values of the file to variables."""
        for variable, array in zip(variables, self.arrays(part), strict=True):
            variable.assign(array)

    def arrays(self, part):
        """Yields the arrays of a part as NumPy arrays."""
        for i, (_, dtype) in enumerate(self.content["variables"][part]):
            yield self._array(part, i).view(dtype)  # Keras registers the dtypes of ml_dtypes

    def assign_generators(self):
        """Sets torch's generators to the states in the file."""
        saved = len(self.content["variables"][GENERATORS])
        if not saved:
            return
        import torch

        states = [torch.from_numpy(self._array(GENERATORS, i)) for i in range(saved)]
        torch.set_rng_state(states[0])
        for device, state in enumerate(states[1 : 1 + torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, device)

    def _array(self, part, i):
        with self._archive.open(f"{part}/{i}") as entry:
            return np.lib.format.read_array(entry, allow_pickle=False)


def _describe_variable(variable):
    # Without the name, which differs for a second model in a program.
    return [list(variable.shape), keras.backend.standardize_dtype(variable.dtype)]


def _to_integers(array):
    """Views bfloat16 and 8-bit floats, which NumPy's files cannot hold, as integers."""
    return array.view(f"u{array.itemsize}") if array.dtype.kind == "V" else array
