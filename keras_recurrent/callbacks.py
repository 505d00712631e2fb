"""Training that is broken off and goes on, in the same bits."""

import io
import json
import os
import zipfile

import keras
import numpy as np

from keras_recurrent import callback_memory
from keras_recurrent.checks.arguments import check_boolean, check_positive_integer
from keras_recurrent.devices.jax_processes import gather_to_numpy, shared_output_path

__all__ = ["TrainingBackup"]

WEIGHTS, SLOTS, METRICS, GENERATORS = "weights", "optimizer", "metrics", "generators"
VERSION = 2  # 1 had no memory of other callbacks
CONTENT = "content.json"


class TrainingBackup(keras.callbacks.Callback):
    """Keeps all that a training run needs to go on from inside an epoch, in one file.

    A run that is killed at any moment, and started again by the same program, ends in the same
    bits as one that was not, on the same backend and machine: the file has the weights, the
    variables of the optimizer, those of metrics, the seeds of layers such as dropout (on torch
    also the states of torch's generators) and the place in the data.
    It is written beside `path` and then put into its place, so that there is always a whole one:
    the last, or the one before. It is written before the first step of each epoch and then every
    `save_freq` batches, and is deleted when training ends.

    ```python
    import keras
    import keras_recurrent

    def train(model, files):
        keras.utils.set_random_seed(0)
        rows = keras_recurrent.datasets.PackedText(files, model.preprocessor, 8, seed=0)
        backup = keras_recurrent.callbacks.TrainingBackup("run.backup", 500, data=rows)
        model.fit(rows, steps_per_epoch=10_000, epochs=20, callbacks=[backup])
    ```

    The resumed epoch counts its batches from the first one on; those that were trained before the
    backup pass by without a step, and callbacks hear of them once more.

    **Data.** A `keras_recurrent.datasets.PackedText` jumps to its place: pass it as `data`, too.
    Any other source must begin anew in each epoch and give the same batches in the same epoch of
    another run; what was trained of the epoch is then read again. So do strings in memory and
    datasets of grain of known length in `fit` of this package's language models, shuffled or not
    (after `keras.utils.set_random_seed`), and unshuffled arrays, `tf.data` and loaders. A
    generator or any stream that goes on from epoch to epoch does not, nor do arrays that Keras
    shuffles.

    **What Keras itself does not keep.** `keras.callbacks.BackupAndRestore` with `save_freq="epoch"`
    resumes at ends of epochs, in the same bits where the source is as above and no layer draws
    random numbers. Take `double_checkpoint=True` for it: a file that is cut off while it is written
    is replaced by the one before. It keeps neither the seeds of layers (a dropout begins with its
    first numbers again), nor on torch the generators of torch itself, from which a dropout without
    a seed draws, nor the place in data that goes on from epoch to epoch; with an integer as
    `save_freq` it restores weights from inside an epoch and begins that epoch anew. Weights and the
    epoch's number are two files: a process that is killed between the two trains an epoch twice.
    Nor does it keep what other callbacks remember (the patience of `EarlyStopping`, the best value
    of `ModelCheckpoint`): this one does for those in `callbacks`. Neither keeps the `History` of
    epochs before, nor the state of Python's and NumPy's generators.

    Args:
        path: string, the file.
        save_freq: integer, batches from one backup to the next.
        data: the `PackedText` that the model trains on, without `passes`; None for other sources.
        delete_checkpoint: whether the file goes when training ends. If not, a run that is started
            again after its end has the last weights and trains no more.
        callbacks: a list of those callbacks of the same `fit` whose memory is kept, too: of
            `keras.callbacks.EarlyStopping`, `ModelCheckpoint` and `ReduceLROnPlateau`, that is the
            best value so far, the epochs without a better one, and the best weights of an
            `EarlyStopping` that restores them.

    Raises:
        ValueError: an argument of another kind; in `fit`, a file that is damaged or belongs to
            another model, data or number of steps, before anything is changed (TensorFlow makes
            metrics in the first step, and compares them there).

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
        self.callbacks = callback_memory.check_callbacks(callbacks)
        self.path = os.path.abspath(os.fspath(path))
        self.save_freq, self.data, self.delete_checkpoint = save_freq, data, delete_checkpoint

    # Only what begins is listened to: a callback for ends of batches would let Keras wait for
    # each step. A backup is written when a step begins, never between epochs, where a source may
    # draw random numbers as it begins anew.

    def on_train_begin(self, logs=None):
        model = self.model
        # `self.model` would let JAX bring back its state at each step.
        self._steps_per_execution = model.steps_per_execution
        self._epoch = None
        self._trained = 0  # the batches of this process, those included that pass by
        self._last = 0  # those of this epoch after the step that began last
        self._resumed = Backup(self.path) if os.path.exists(self.path) else None
        if self._resumed is None:
            model._initial_epoch = None
        else:
            self._restore(self._resumed)
        if self.data is not None:
            content = {} if self._resumed is None else self._resumed.content
            self.data.start_at(content.get("place"), content.get("batch", 0))

    def on_epoch_begin(self, epoch, logs=None):
        # Keras has read it by now. A `fit` after one that is broken off begins with its own epoch.
        self.model._initial_epoch = None
        self._epoch, self._trained, self._last = epoch, self._trained + self._last, 0
        self._saved = -self.save_freq
        if self._resumed is not None:
            # All callbacks have forgotten by now what they knew, as training began.
            callback_memory.restore(
                self.callbacks, self._resumed.content["callbacks"], self._resumed.arrays
            )
            self._saved = self._resumed.content["batch"]
            if self._saved:
                self._let_pass(self._resumed, self._saved)

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
            if os.path.exists(self.path):
                os.remove(self.path)
        elif self._epoch is not None:  # something was left to train
            self._write(self._epoch + 1, 0, self._trained + self._last)

    def _restore(self, backup):
        """Weights, the optimizer, and the epoch to begin with."""
        model, content = self.model, backup.content
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        steps, wanted = content["steps"], self.params.get("steps")
        if content["batch"] and steps != wanted:
            raise ValueError(
                f"{self.path} was written inside an epoch of {steps} steps; this one has {wanted}. "
                "Take the same data, batch size and `steps_per_epoch`, or delete the file."
            )
        if content["batch"] % model.steps_per_execution:
            raise ValueError(
                f"{self.path} was written after {content['batch']} steps of an epoch. Compile with "
                f"a `steps_per_execution` that divides these, not {model.steps_per_execution}, or "
                "delete the file."
            )
        described = None if self.data is None else json.loads(json.dumps(self.data.description))
        if content["data"] != described:
            raise ValueError(
                f"{self.path} was written with the data {content['data']}; now it is {described}. "
                "Take the same, or delete the file."
            )
        there = [kept["class"] for kept in content["callbacks"]]
        if there != (here := callback_memory.describe(self.callbacks)):
            raise ValueError(
                f"{self.path} was written with the callbacks {there}; now they are {here}. Pass "
                "the same as `callbacks`, or delete the file."
            )
        for part, variables in _parts(model).items():
            if part != METRICS or not _makes_metrics_late():
                backup.check(variables, part)
        backup.assign(model.variables, WEIGHTS)
        backup.assign(_slots(model), SLOTS)
        model._initial_epoch = content["epoch"]

    def _let_pass(self, backup, batches):
        """The steps of an epoch that were trained before: their batches are taken, no more."""
        model = self.model
        train, history, logs = model.train_function, model.history, None

        def restored_metrics():
            backup.check(model.metrics_variables, METRICS)
            backup.assign(model.metrics_variables, METRICS)
            return model.get_metrics_result()

        def train_function(*arguments):
            nonlocal logs
            if self._last > batches or model.history is not history:  # another `fit` has its own
                model.train_function = train
                return train(*arguments)
            if keras.backend.backend() == "torch":  # which gets batches, the others an iterator
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
        remembered, arrays = callback_memory.memory_of(self.callbacks)
        content = {
            "version": VERSION,
            "epoch": epoch,
            "batch": batch,
            "steps": self.params.get("steps"),
            "data": None if self.data is None else self.data.description,
            "place": None if self.data is None else self.data.state_after(trained),
            "callbacks": remembered,
        }
        write(self.path, content, _parts(model) | {GENERATORS: generators()} | arrays)


def _makes_metrics_late():
    """Whether Keras makes the variables of metrics in the first step, and not before it."""
    return keras.backend.backend() == "tensorflow"


def _parts(model):
    return {WEIGHTS: model.variables, SLOTS: _slots(model), METRICS: model.metrics_variables}


def _slots(model):
    return [] if model.optimizer is None else model.optimizer.variables


def generators():
    """The states of torch's own generators, from which a dropout without a seed draws there."""
    if keras.backend.backend() != "torch":
        return []
    import torch

    states = [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
    return [state.cpu().numpy() for state in states]


def write(path, content, parts):
    """Writes variables beside `path`, one after another, and puts the file into its place.

    Args:
        path: string.
        content: what JSON can hold.
        parts: `{name: list of variables or arrays}`.
    """
    with shared_output_path(path) as own:
        _write(own, content, parts)


def _write(path, content, parts):
    folder, name = os.path.split(path)
    os.makedirs(folder, exist_ok=True)
    # Always of one name, so that processes that are killed leave one file at most.
    temporary = os.path.join(folder, f".{name}.part")
    names = {part: [_described(v) for v in variables] for part, variables in parts.items()}
    with open(temporary, "wb") as file:
        with zipfile.ZipFile(file, "w") as archive:
            for part, variables in parts.items():
                for i, variable in enumerate(variables):
                    array = np.asarray(gather_to_numpy(variable))
                    with archive.open(f"{part}/{i}", "w", force_zip64=True) as entry:
                        np.lib.format.write_array(entry, _plain(array), allow_pickle=False)
            archive.writestr(CONTENT, json.dumps({**content, "variables": names}, default=int))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


class Backup:
    """A file that `write` wrote.

    Raises:
        ValueError: it is damaged, or of another version.
    """

    def __init__(self, path):
        self.path = path
        try:
            self._archive = zipfile.ZipFile(path)
            if damaged := self._archive.testzip():
                raise zipfile.BadZipFile(f"in its part {damaged}")
            self.content = json.loads(self._archive.read(CONTENT))
        except (zipfile.BadZipFile, KeyError, ValueError) as error:
            raise ValueError(f"{path} is damaged ({error}). Delete it to begin anew.") from error
        if self.content.get("version") != VERSION:
            raise ValueError(
                f"{path} is of version {self.content.get('version')!r}; this package reads "
                f"{VERSION}. Delete it to begin anew."
            )

    def check(self, variables, part):
        """Raises where the file has variables of other shapes or dtypes."""
        there, wanted = self.content["variables"][part], [_described(v) for v in variables]
        if there == wanted:
            return
        pairs = zip(there + [None] * len(wanted), wanted + [None] * len(there), strict=True)
        theirs, ours = next((a, b) for a, b in pairs if a != b)
        raise ValueError(
            f"{self.path} belongs to another model, optimizer or metrics: of {part} it has "
            f"{len(there)} variables and here are {len(wanted)}, of which the first that differ "
            f"are {theirs} and {ours}. Delete the file to begin anew."
        )

    def assign(self, variables, part):
        """Gives variables the values that are in the file."""
        for variable, array in zip(variables, self.arrays(part), strict=True):
            variable.assign(array)

    def arrays(self, part):
        """The arrays of a part one after another, as NumPy has them."""
        for i, (_, dtype) in enumerate(self.content["variables"][part]):
            array = self._array(part, i)
            yield array if array.dtype.name == dtype else _of_dtype(array, dtype)

    def assign_generators(self):
        """Gives torch's own generators the states that are in the file."""
        there = len(self.content["variables"][GENERATORS])
        if not there:
            return
        import torch

        states = [torch.from_numpy(self._array(GENERATORS, i)) for i in range(there)]
        torch.set_rng_state(states[0])
        for device, state in enumerate(states[1 : 1 + torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, device)

    def _array(self, part, i):
        data = io.BytesIO(self._archive.read(f"{part}/{i}"))
        return np.lib.format.read_array(data, allow_pickle=False)


def _described(variable):
    # Names differ where a program makes a second model.
    return [list(variable.shape), keras.backend.standardize_dtype(variable.dtype)]


def _plain(array):
    """NumPy's files hold no bfloat16 and 8-bit floats: as integers of their bits."""
    return array.view(f"u{array.itemsize}") if array.dtype.kind == "V" else array


def _of_dtype(array, dtype):
    import ml_dtypes

    return array.view(getattr(ml_dtypes, dtype))
