"""Training that is interrupted and resumes from a `TrainingBackup` ends like a whole run."""

import os

import keras
import numpy as np
import pytest

from keras_recurrent.callbacks import TrainingBackup, training_backup
from tests import resumed
from tests.models.tiny import FAMILIES
from tests.resumed import STEPS, AtBatch, train


class Stop(Exception):
    pass


def stop():
    raise Stop


class Trainee:
    """A model that starts again with its first weights, without another compilation."""

    def __init__(self, model):
        self.model = model
        self.first_values = resumed.values(model)

    def restart(self):
        # As in a new process, except for Keras, which keeps the number of an epoch.
        self.model._initial_epoch = None
        keras.utils.set_random_seed(0)
        for variable, value in zip(resumed.variables(self.model), self.first_values, strict=True):
            variable.assign(value)
        return self.model


@pytest.fixture(scope="module")
def trainee():
    return Trainee(resumed.model_with_dropout())


@pytest.fixture(scope="module")
def whole(trainee, tmp_path_factory):
    """Values and history of a run without interruption.

    On torch, Keras builds metrics in the first run, which draws a random number from torch's
    generator. A run before this one builds them.
    """
    if keras.backend.backend() == "torch":
        train(trainee.restart(), str(tmp_path_factory.mktemp("first")))
    history = train(trainee.restart(), str(tmp_path_factory.mktemp("whole"))).history
    return resumed.values(trainee.model), history


def assert_equal_values(model, expected):
    keras.tree.map_structure(np.testing.assert_array_equal, resumed.values(model), expected)


def interrupt(run, *arguments, **options):
    with pytest.raises(Stop):
        run(*arguments, **options)


def test_training_backup_interrupted_run_ends_with_equal_weights(trainee, whole, tmp_path):
    """Weights, optimizer slots, seeds or the position in the data are not restored."""
    for batch in (1, STEPS + 3, 3 * STEPS - 1):
        interrupt(train, trainee.restart(), str(tmp_path), AtBatch(batch, stop))
        assert trainee.model._initial_epoch is None  # the next `fit` would start there
    # In a new process the model is new, and Keras may not have built its metrics yet, for which
    # torch draws a number. JAX and TensorFlow would compile the model again.
    is_torch = keras.backend.backend() == "torch"
    model = resumed.model_with_dropout() if is_torch else trainee.restart()
    history = train(model, str(tmp_path)).history
    values, whole_history = whole
    assert_equal_values(model, values)
    # The loss of the resumed epoch is the mean over all of its batches.
    for name, of_epochs in history.items():
        assert of_epochs == whole_history[name][-len(of_epochs) :]
    assert sorted(os.listdir(tmp_path)) == ["one.txt", "two.txt"]


@pytest.mark.nightly
@pytest.mark.skipif(keras.backend.backend() != "jax", reason="torch runs one batch a step")
def test_training_backup_with_steps_of_several_batches_resumes(tmp_path):
    """A step of two batches is repeated or skipped; an epoch of five batches has three steps."""
    trainee = Trainee(resumed.model_with_dropout(steps_per_execution=2))
    (tmp_path / "whole").mkdir()
    train(trainee.restart(), str(tmp_path / "whole"), steps=5)
    expected = resumed.values(trainee.model)
    for batch in (2, 9):
        interrupt(train, trainee.restart(), str(tmp_path), AtBatch(batch, stop, steps=5), steps=5)
    other = resumed.model_with_dropout(steps_per_execution=3)
    with pytest.raises(ValueError, match=r"after 4 steps .* `steps_per_execution` .*, not 3"):
        train(other, str(tmp_path), steps=5)
    train(trainee.restart(), str(tmp_path), steps=5)
    assert_equal_values(trainee.model, expected)


STRINGS = ["tick tock", "tock", "tick", "tick tock tick", "tock tock"] * 2


@pytest.fixture(scope="module")
def text_trainee():
    family = FAMILIES["hgrn2"]
    preprocessor = family.preprocessor(family.tokenizer(), sequence_length=8)
    sizes = {**family.sizes, "vocabulary_size": 259, "num_layers": 1}
    model = family.causal_lm(family.backbone(**sizes), preprocessor)
    model.compile(keras.optimizers.Adam(0.01))
    model.optimizer.build(model.trainable_variables)
    return Trainee(model)


@pytest.mark.once
def test_fit_with_backup_shuffles_strings_in_the_order_of_a_whole_run(text_trainee, tmp_path):
    def fit(name, *callbacks):
        model = text_trainee.restart()
        callbacks = [TrainingBackup(tmp_path / name, save_freq=1), *callbacks]
        model.fit(STRINGS, batch_size=3, epochs=3, verbose=0, callbacks=callbacks)
        return resumed.values(model)

    expected = fit("whole")
    for batch in (5, 10):
        interrupt(fit, "interrupted", AtBatch(batch, stop, steps=4))
    fit("interrupted")
    assert_equal_values(text_trainee.model, expected)


@pytest.mark.once
def test_training_backup_of_another_run_or_a_damaged_file_raises(trainee, tmp_path):
    """A run resumes with other data or another model, or with random bytes as weights."""
    folder = str(tmp_path)
    paths = resumed.write_text(folder)
    interrupt(train, trainee.restart(), folder, AtBatch(3, stop))
    with pytest.raises(ValueError, match="inside an epoch of 6 steps; this one has 7"):
        train(trainee.restart(), folder, steps=7)
    with pytest.raises(ValueError, match=r"written with the data .*one.txt.*now it is .*two.txt"):
        train(trainee.restart(), folder, paths=paths[1:])
    other = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    other.compile("sgd", "mse")
    backup = TrainingBackup(tmp_path / "run.backup", data=resumed.packed_text(paths))
    backup.set_model(other)
    backup.set_params({"steps": STEPS})
    message = r"another model.*its weights are 4 variables, here they ar"
    with pytest.raises(ValueError, match=message):
        backup.on_train_begin()
    (tmp_path / "run.backup").write_bytes((tmp_path / "run.backup").read_bytes()[:-100])
    before = resumed.values(trainee.restart())
    with pytest.raises(ValueError, match=r"run.backup is damaged .*Delete it to start again"):
        train(trainee.model, folder)
    assert_equal_values(trainee.model, before)


@pytest.mark.once
def test_training_backup_wrong_arguments_raise(tmp_path):
    resumed.write_text(tmp_path)
    finite = resumed.packed_text([str(tmp_path / "one.txt")], passes=1)
    for arguments, message in [
        ({"path": ""}, "`path` must name a file; got ''"),
        ({"path": tmp_path}, "`path` must name a file; .* is a directory"),
        ({"path": "x", "save_freq": "epoch"}, "`save_freq` must be an integer"),
        ({"path": "x", "delete_checkpoint": 1}, "`delete_checkpoint` must be True or False"),
        ({"path": "x", "data": [1]}, "`data` must be a .*PackedText.* without `passes`; got a lis"),
        ({"path": "x", "data": finite}, "`data` must be .* without `passes`; got a PackedText"),
        ({"path": "x", "callbacks": 1}, "`callbacks` must be a list of `EarlyStopping`, .*; got 1"),
        ({"path": "x", "callbacks": [keras.callbacks.History()]}, "`callbacks` .* got a History"),
    ]:
        with pytest.raises(ValueError, match=message):
            TrainingBackup(**arguments)


LOSSES = [3.0, 1.0, *range(2, 20)]  # better once, then worse


class Losses(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        logs["val_loss"] = LOSSES[epoch]


def monitored_run(folder, stop_at=None, is_saved=True):
    """Trains with callbacks that have a memory, which the backup saves if `is_saved`."""
    folder.mkdir(exist_ok=True)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    path = str(folder / "best.weights.h5")
    monitors = [
        keras.callbacks.EarlyStopping("val_loss", patience=4, restore_best_weights=True),
        keras.callbacks.ModelCheckpoint(
            path, "val_loss", save_best_only=True, save_weights_only=True
        ),
        keras.callbacks.ReduceLROnPlateau("val_loss", patience=3, factor=0.1),
    ]
    callbacks = [Losses(), *monitors]
    callbacks.append(TrainingBackup(folder / "run", 2, callbacks=monitors if is_saved else ()))
    callbacks += [] if stop_at is None else [AtBatch(stop_at, stop)]
    x = np.arange(36.0).reshape(12, 3) / 36
    model.fit(x, x[:, :1], 2, 12, shuffle=False, callbacks=callbacks, verbose=0)
    assert [callback.best for callback in monitors] == [1.0, 1.0, 1.0]
    return monitors[0].stopped_epoch, float(model.optimizer.learning_rate), model.get_weights()


@pytest.mark.once
def test_training_backup_restores_the_memory_of_other_callbacks(tmp_path):
    """An interrupted run stops at another epoch, or forgets the best weights."""
    stopped_epoch, rate, weights = monitored_run(tmp_path / "whole")
    assert stopped_epoch == 5
    assert rate == pytest.approx(0.01)
    for stop_at in (3 * STEPS + 3, 5 * STEPS + 1):
        folder = tmp_path / f"interrupted at {stop_at}"
        interrupt(monitored_run, folder, stop_at)
        *found, found_weights = monitored_run(folder)
        assert found == [stopped_epoch, rate]
        keras.tree.map_structure(np.testing.assert_array_equal, found_weights, weights)
    interrupt(monitored_run, tmp_path / "other", 3 * STEPS)
    message = r"with the callbacks \['EarlyStopping', .*now they are \[\]"
    with pytest.raises(ValueError, match=message):
        monitored_run(tmp_path / "other", is_saved=False)


@pytest.mark.once
@pytest.mark.parametrize("verbose", [0, 2])
def test_training_backup_reports_the_first_step_of_a_resumed_run(verbose, tmp_path, capsys):
    def fit(*callbacks):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        callbacks = [TrainingBackup(tmp_path / "run", 2), *callbacks]
        model.fit(np.ones((12, 3)), np.ones((12, 1)), 2, 3, verbose, callbacks=callbacks)
        return capsys.readouterr().out

    interrupt(fit, AtBatch(STEPS + 5, stop))
    assert "resumes" not in capsys.readouterr().out
    message = f"Training resumes at epoch 2, step 5, from {tmp_path / 'run'}.\n"
    assert (message in fit()) == bool(verbose)
    assert "resumes" not in fit()


@pytest.mark.once
def test_training_backup_that_is_not_deleted_ends_the_next_run_at_once(trainee, tmp_path):
    x, y = np.ones((4, 3), "int32"), np.ones((4, 3), "int32")
    inputs = {"token_ids": x, "padding_mask": x > 0, "segment_ids": x}
    for epochs in (2, 0):
        backup = TrainingBackup(tmp_path / "run", delete_checkpoint=False)
        arguments = {"epochs": 2, "verbose": 0, "shuffle": False, "callbacks": [backup]}
        history = trainee.restart().fit(inputs, y, **arguments).history
        assert len(history.get("loss", [])) == epochs
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.once
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int32", "bool"])
def test_backup_file_restores_variables_of_every_dtype(dtype, tmp_path):
    path = str(tmp_path / "backup")
    variable = keras.Variable(np.arange(3) % 2, dtype=dtype, trainable=False)
    training_backup.write_backup(
        path, {"version": training_backup.VERSION}, {"weights": [variable]}
    )
    expected = keras.ops.convert_to_numpy(variable)
    variable.assign(keras.ops.zeros(3))
    training_backup.Backup(path).assign([variable], "weights")
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), expected)
