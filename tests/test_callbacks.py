"""Training that is broken off at some batch ends in the same bits as training that is not."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import pytest

from keras_recurrent.callbacks import TrainingBackup
from keras_recurrent.callbacks import training_backup as callbacks
from tests import resumed
from tests.models.tiny import FAMILIES
from tests.processes import ROOT, fresh_process
from tests.resumed import STEPS, AtBatch, train


class Stop(Exception):
    pass


def stop():
    raise Stop


class Trained:
    """A model that begins as a new one would, without another compilation."""

    def __init__(self, model):
        self.model = model
        self.fresh = resumed.values(model)

    def begin(self):
        # Where a new process would begin, other than Keras, which leaves the number of an epoch.
        self.model._initial_epoch = None
        keras.utils.set_random_seed(0)
        for variable, value in zip(resumed.variables(self.model), self.fresh, strict=True):
            variable.assign(value)
        return self.model


@pytest.fixture(scope="module")
def trained():
    return Trained(resumed.model_with_dropout())


@pytest.fixture(scope="module")
def whole(trained, tmp_path_factory):
    """The variables and the history of a run without interruption, and the digest of a first one.

    In a first one Keras builds metrics of a batch, for which torch draws a number.
    """
    model = trained.begin()
    train(model, str(tmp_path_factory.mktemp("first")))
    first = resumed.digest(model)
    history = train(trained.begin(), str(tmp_path_factory.mktemp("whole"))).history
    return resumed.values(model), history, first


def assert_same_bits(model, wanted):
    for found, value in zip(resumed.values(model), wanted, strict=True):
        np.testing.assert_array_equal(found, value)


@pytest.mark.parametrize(
    "batches",
    [
        pytest.param([0], marks=pytest.mark.once),
        pytest.param([4], marks=[pytest.mark.once, pytest.mark.nightly]),
        pytest.param([STEPS + 3], marks=[pytest.mark.once, pytest.mark.nightly]),
        [1, 2 * STEPS + 5, 3 * STEPS - 1],
    ],
)
def test_a_run_that_is_broken_off_ends_in_the_same_bits(trained, whole, batches, tmp_path):
    """A backup is written every two batches, so that some are trained twice."""
    for batch in batches:
        with pytest.raises(Stop):
            train(trained.begin(), str(tmp_path), AtBatch(batch, stop))
        assert trained.model._initial_epoch is None  # or the next `fit` would begin there
    # In a new process the model is new, and Keras may not have built its metrics yet, for which
    # torch draws a number. JAX and TensorFlow would compile the model again.
    torch = keras.backend.backend() == "torch"
    model = resumed.model_with_dropout() if torch else trained.begin()
    history = train(model, str(tmp_path)).history
    values, wanted, _ = whole
    assert_same_bits(model, values)
    # The resumed epoch's loss is the mean over all of its batches.
    for name, of_epochs in history.items():
        assert of_epochs == wanted[name][-len(of_epochs) :]
    assert sorted(os.listdir(tmp_path)) == ["one.txt", "two.txt"]


def at_the_beginning(rows, state=None, skip=0, start_at=resumed.PackedText.start_at):
    start_at(rows, None, skip)


def assign_all_but(part, assign=callbacks.Backup.assign):
    return lambda backup, variables, name: name != part and assign(backup, variables, name)


@pytest.mark.nightly
@pytest.mark.once
def test_seeds_slots_and_the_place_matter(trained, whole, tmp_path, monkeypatch):
    """Each of them alone, left out, is another run."""
    for part in (callbacks.SLOTS, callbacks.WEIGHTS, "place"):
        with pytest.raises(Stop):
            train(trained.begin(), str(tmp_path), AtBatch(STEPS + 3, stop))
        with monkeypatch.context() as patch:
            if part == "place":
                patch.setattr(resumed.PackedText, "start_at", at_the_beginning)
            else:
                patch.setattr(callbacks.Backup, "assign", assign_all_but(part))
            train(trained.begin(), str(tmp_path))
        with pytest.raises(AssertionError):
            assert_same_bits(trained.model, whole[0])


@pytest.mark.nightly
@pytest.mark.skipif(keras.backend.backend() != "jax", reason="torch has none; shown on one of two")
def test_steps_of_several_batches(tmp_path):
    """Keras takes batches in pairs; five of them make three pairs."""
    trained = Trained(resumed.model_with_dropout(steps_per_execution=2))
    (tmp_path / "whole").mkdir()
    train(trained.begin(), str(tmp_path / "whole"), steps=5)
    trained_whole = resumed.values(trained.model)
    for batch in (2, 9):
        with pytest.raises(Stop):
            train(trained.begin(), str(tmp_path), AtBatch(batch, stop, steps=5), steps=5)
    other = resumed.model_with_dropout(steps_per_execution=3)
    with pytest.raises(ValueError, match=r"after 4 steps .* `steps_per_execution` .*, not 3"):
        train(other, str(tmp_path), steps=5)
    train(trained.begin(), str(tmp_path), steps=5)
    assert_same_bits(trained.model, trained_whole)


@pytest.mark.nightly
@pytest.mark.once
def test_a_process_that_is_killed(whole, tmp_path):
    command = [sys.executable, "-m", "tests.resumed", str(tmp_path)]
    killed = subprocess.run([*command, str(STEPS + 3)], cwd=ROOT, capture_output=True, timeout=300)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert "run.backup" in os.listdir(tmp_path)
    # As where it is killed while it writes.
    temporary = tmp_path / ".run.backup-0123abcd.part"
    temporary.mkdir()
    (temporary / "run.backup").write_bytes(b"half of a file")
    assert fresh_process("-m", "tests.resumed", str(tmp_path)) == whole[2]
    assert not temporary.exists()


@pytest.mark.nightly
@pytest.mark.once
def test_a_write_that_is_broken_off_leaves_the_backup_before(trained, whole, tmp_path, monkeypatch):
    write_array, written = np.lib.format.write_array, []

    def write(file, array, **arguments):
        written.append(array)
        if len(written) == 50:
            raise Stop
        write_array(file, array, **arguments)

    with monkeypatch.context() as patch:
        patch.setattr(np.lib.format, "write_array", write)
        with pytest.raises(Stop):
            train(trained.begin(), str(tmp_path))
    assert "run.backup" in os.listdir(tmp_path)
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".part")]
    train(trained.begin(), str(tmp_path))
    assert_same_bits(trained.model, whole[0])


STRINGS = ["tick tock", "tock", "tick", "tick tock tick", "tock tock"] * 2


@pytest.fixture(scope="module")
def language_model():
    family = FAMILIES["hgrn2"]
    preprocessor = family.preprocessor(family.tokenizer(), sequence_length=8)
    sizes = {**family.sizes, "vocabulary_size": 259, "num_layers": 1}
    model = family.causal_lm(family.backbone(**sizes), preprocessor)
    model.compile(keras.optimizers.Adam(0.01))
    model.optimizer.build(model.trainable_variables)
    return Trained(model)


@pytest.mark.once
@pytest.mark.parametrize("kept_by", ["Keras", "this package"])
def test_shuffled_strings_come_in_the_same_order(language_model, kept_by, tmp_path):
    """BackupAndRestore resumes at the ends of epochs, and ours inside them."""

    def fit(name, *more):
        model = language_model.begin()
        if kept_by == "Keras":
            arguments = {"save_freq": "epoch", "double_checkpoint": True}
            backup = keras.callbacks.BackupAndRestore(str(tmp_path / name), **arguments)
        else:
            backup = TrainingBackup(tmp_path / name, save_freq=1)
        arguments = {"batch_size": 3, "epochs": 3, "verbose": 0, "callbacks": [backup, *more]}
        model.fit(STRINGS, **arguments)
        return resumed.values(model)

    wanted = fit("whole")
    for batch in (5, 10):
        with pytest.raises(Stop):
            fit("broken off", AtBatch(batch, stop, steps=4))
    fit("broken off")
    assert_same_bits(language_model.model, wanted)


@pytest.mark.once
def test_a_backup_of_something_else_is_an_error(trained, tmp_path):
    folder = str(tmp_path)
    paths = resumed.write_text(folder)
    with pytest.raises(Stop):
        train(trained.begin(), folder, AtBatch(3, stop))
    with pytest.raises(ValueError, match="inside an epoch of 6 steps; this one has 7"):
        train(trained.begin(), folder, steps=7)
    with pytest.raises(ValueError, match=r"written with the data .*one.txt.*now it is .*two.txt"):
        train(trained.begin(), folder, paths=paths[1:])
    other = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    other.compile("sgd", "mse")
    rows = resumed.packed_text(paths)
    backup = TrainingBackup(tmp_path / "run.backup", data=rows)
    backup.set_model(other)
    backup.set_params({"steps": STEPS})
    with pytest.raises(
        ValueError, match=r"another model.*its weights are 4 variables, here they ar"
    ):
        backup.on_train_begin()
    (tmp_path / "run.backup").write_bytes((tmp_path / "run.backup").read_bytes()[:-100])
    before = resumed.values(trained.begin())
    with pytest.raises(ValueError, match=r"run.backup is damaged .*Delete it to start again"):
        train(trained.model, folder)
    assert_same_bits(trained.model, before)


@pytest.mark.once
def test_arguments_of_another_kind_are_errors(tmp_path):
    resumed.write_text(tmp_path)
    once = resumed.packed_text([str(tmp_path / "one.txt")], passes=1)
    for arguments, match in [
        ({"path": ""}, "`path` must name a file; got ''"),
        ({"path": tmp_path}, "`path` must name a file; .* is a directory"),
        ({"path": "x", "save_freq": "epoch"}, "`save_freq` must be an integer"),
        ({"path": "x", "delete_checkpoint": 1}, "`delete_checkpoint` must be True or False"),
        ({"path": "x", "data": [1]}, "`data` must be a .*PackedText.* without `passes`; got a lis"),
        ({"path": "x", "data": once}, "`data` must be .* without `passes`; got a PackedText"),
        ({"path": "x", "callbacks": 1}, "`callbacks` must be a list of `EarlyStopping`, .*; got 1"),
        ({"path": "x", "callbacks": [keras.callbacks.History()]}, "`callbacks` .* got a History"),
    ]:
        with pytest.raises(ValueError, match=match):
            TrainingBackup(**arguments)


def monitors(folder):
    """Callbacks with a memory; the losses below are better once, and then worse."""
    return [
        keras.callbacks.EarlyStopping("val_loss", patience=4, restore_best_weights=True),
        keras.callbacks.ModelCheckpoint(
            str(folder / "best.weights.h5"), "val_loss", save_best_only=True, save_weights_only=True
        ),
        keras.callbacks.ReduceLROnPlateau("val_loss", patience=3, factor=0.1),
    ]


@pytest.mark.once
def test_what_other_callbacks_remember_is_kept(tmp_path):
    """A run that is broken off in its sixth epoch stops as early, with the same best weights."""
    losses = [3.0, 1.0, *range(2, 20)]

    class Losses(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["val_loss"] = losses[epoch]

    def run(folder, stop_at=None, remember=True):
        folder.mkdir(exist_ok=True)
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        others = monitors(folder)
        backup = TrainingBackup(folder / "run", 2, callbacks=others if remember else ())
        breaks = [] if stop_at is None else [AtBatch(stop_at, stop)]
        x = np.arange(36.0).reshape(12, 3) / 36
        everything = [Losses(), *others, backup, *breaks]
        model.fit(x, x[:, :1], 2, 12, shuffle=False, callbacks=everything, verbose=0)
        rate = float(model.optimizer.learning_rate)
        return others[0].stopped_epoch, rate, model.get_weights(), others

    whole = run(tmp_path / "whole")
    assert whole[0] == 5
    assert whole[1] == pytest.approx(0.01)
    for stop_at in (3 * STEPS + 3, 5 * STEPS + 1):
        folder = tmp_path / f"broken at {stop_at}"
        with pytest.raises(Stop):
            run(folder, stop_at)
        found = run(folder)
        assert found[:2] == whole[:2]
        for one, other in zip(found[2], whole[2], strict=True):
            np.testing.assert_array_equal(one, other)
        assert [c.best for c in found[3]] == [1.0, 1.0, 1.0]
    with pytest.raises(Stop):
        run(tmp_path / "other", 3 * STEPS)
    with pytest.raises(
        ValueError, match=r"with the callbacks \['EarlyStopping', .*now they are \[\]"
    ):
        run(tmp_path / "other", remember=False)


@pytest.mark.once
def test_a_file_that_stays_ends_the_next_run_at_once(trained, tmp_path):
    x, y = np.ones((4, 3), "int32"), np.ones((4, 3), "int32")
    inputs = {"token_ids": x, "padding_mask": x > 0, "segment_ids": x}
    for epochs in (2, 0):
        backup = TrainingBackup(tmp_path / "run", delete_checkpoint=False)
        arguments = {"epochs": 2, "verbose": 0, "shuffle": False, "callbacks": [backup]}
        history = trained.begin().fit(inputs, y, **arguments).history
        assert len(history.get("loss", [])) == epochs
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.once
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int32", "bool"])
def test_variables_of_all_dtypes(dtype, tmp_path):
    path = str(tmp_path / "backup")
    variable = keras.Variable(np.arange(3) % 2, dtype=dtype, trainable=False)
    callbacks.write_backup(path, {"version": callbacks.VERSION}, {"weights": [variable]})
    wanted = keras.ops.convert_to_numpy(variable)
    variable.assign(keras.ops.zeros(3))
    callbacks.Backup(path).assign([variable], "weights")
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), wanted)


@pytest.mark.nightly
def test_a_run_that_is_killed_at_20_random_moments(tmp_path):
    """Processes that get SIGKILL while they train, write or read."""
    steps, rng = 4000, random.Random(0)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.resumed"])

    def start(folder):
        folder.mkdir(exist_ok=True)
        ours, theirs = context.Pipe()
        process = context.Process(target=resumed.report, args=(str(folder), steps, theirs))
        process.start()
        assert ours.poll(300), "nothing is trained"
        assert ours.recv() == "trains"
        return process, ours

    for _ in range(20):
        process, _ = start(tmp_path / "killed")
        time.sleep(rng.uniform(0, 1))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, "it ended before it was killed"
    digests = []
    for name in ("killed", "whole"):
        process, connection = start(tmp_path / name)
        assert connection.poll(900), "it does not end"
        digests.append(connection.recv())
        process.join()
    assert digests[0] == digests[1]
