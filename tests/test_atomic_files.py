"""Files, folders and models are replaced in one step: a failed write leaves the old content."""

import os
import pathlib

import h5py
import keras
import numpy as np
import pytest

from keras_recurrent import atomic_files
from keras_recurrent.callbacks.training_backup import write_backup
from keras_recurrent.models import HGRN2CausalLM
from tests.models.tiny import FAMILIES, tiny_causal_lm

SIZE = 0.00002  # GB of a shard


class Stop(Exception):
    pass


def read_all(folder):
    """Returns `{path: content}`, with hidden files."""
    paths = [path for path in pathlib.Path(folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def model():
    family = FAMILIES["hgrn2"]
    preprocessor = family.preprocessor(family.tokenizer(), sequence_length=8)
    return tiny_causal_lm(0, preprocessor, "hgrn2", vocabulary_size=259)


def write_text(path, text):
    with atomic_files.replace(path) as new:
        pathlib.Path(new).write_text(text)


def write_folder(path, **files):
    with atomic_files.replace(path) as new:
        os.mkdir(new)
        for name, text in files.items():
            (pathlib.Path(new) / name).write_text(text)


SAVERS = {
    "keras": lambda model, path: keras.saving.save_model(model, path / "x.keras"),
    "weights": lambda model, path: model.save_weights(path / "x.weights.h5"),
    "folder": lambda model, path: model.save(path / "x", zipped=False),
    "checkpoint": lambda model, path: _checkpoint(model, path / "x.weights.h5"),
    "preset": lambda model, path: model.save_to_preset(path / "x"),
    "backbone": lambda model, path: model.backbone.save_to_preset(path / "x"),
}


def _checkpoint(model, path):
    callback = keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
    callback.set_model(model)
    callback.on_epoch_end(0, {})


@pytest.mark.parametrize(
    "saver",
    [
        *("keras", "preset"),
        *(
            pytest.param(name, marks=pytest.mark.once)
            for name in ("weights", "folder", "checkpoint", "backbone")
        ),
    ],
)
def test_save_model_failed_write_leaves_old_files(saver, model, tmp_path, monkeypatch):
    """A full disk destroys the saved model, or leaves temporary files."""
    save = SAVERS[saver]
    save(model, tmp_path)
    old, written = read_all(tmp_path), []

    def write(group, name, value):
        written.append(name)
        if len(written) == 5:
            raise OSError("no space left on device")
        set_item(group, name, value)

    set_item = h5py.Group.__setitem__
    for weight in model.weights:
        weight.assign(weight + 1)
    model.preprocessor.sequence_length += 1  # in other files of a preset than the weights
    with monkeypatch.context() as patch:
        patch.setattr(h5py.Group, "__setitem__", write)
        with pytest.raises(OSError, match="no space left"):
            save(model, tmp_path)
    assert read_all(tmp_path) == old
    save(model, tmp_path)
    assert read_all(tmp_path) != old


@pytest.mark.once
def test_save_to_preset_existing_folder_keeps_other_files(model, tmp_path):
    """Files of the user are lost, or weights of an earlier model are loaded."""
    preset = tmp_path / "new" / "preset"
    model.save_to_preset(str(preset))
    (preset / "notes" / "empty").mkdir(parents=True)
    (preset / "notes" / "model.weights.h5").write_text("mine")
    (preset / "notes" / "link").symlink_to("nothing")
    model.save_to_preset(preset, max_shard_size=SIZE)
    assert not (preset / "model.weights.h5").exists()
    weights = read_all(preset)
    model.preprocessor.save_to_preset(preset)
    model.preprocessor.tokenizer.save_to_preset(preset)
    assert {n: text for n, text in read_all(preset).items() if n in weights} == weights
    assert (preset / "notes" / "model.weights.h5").read_text() == "mine"
    assert os.readlink(preset / "notes" / "link") == "nothing"
    assert (preset / "notes" / "empty").is_dir()
    assert os.listdir(tmp_path / "new") == ["preset"]


@pytest.mark.once
def test_from_preset_interrupted_exchange_loads_old_folder(model, tmp_path, monkeypatch):
    """Without `renameat2`, a process killed between two steps loses the preset."""
    preset = tmp_path / "preset"
    model.save_to_preset(preset)
    (preset / "notes").touch()
    rename, renamed = os.rename, []

    def rename_once(*paths):
        if renamed:
            raise Stop
        renamed.append(rename(*paths))

    monkeypatch.setattr(atomic_files, "_exchange", lambda *folders: False)
    with monkeypatch.context() as patch:
        patch.setattr(atomic_files.os, "rename", rename_once)
        with pytest.raises(Stop):
            model.save_to_preset(preset)
    assert os.listdir(tmp_path) == [".preset.old"]
    again = HGRN2CausalLM.from_preset(str(preset))
    for a, b in zip(again.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    model.save_to_preset(preset)
    assert os.listdir(tmp_path) == ["preset"]
    assert (preset / "notes").exists()


@pytest.mark.once
def test_replace_existing_target_keeps_link_and_permissions(tmp_path, monkeypatch):
    """A link becomes a file, a private file becomes public, or the working directory is lost."""
    file, folder = tmp_path / "file", tmp_path / "folder"
    write_text(file, "1")
    write_folder(folder, a="1", b="1")
    (tmp_path / "plain").touch()
    assert file.stat().st_mode == (tmp_path / "plain").stat().st_mode
    private = (file, folder / "a", folder / "b")
    for path in private:
        path.chmod(0o600)
    folder.chmod(0o700)
    for path in (file, folder):
        (tmp_path / f"link to {path.name}").symlink_to(path.name)
    monkeypatch.chdir(tmp_path)
    write_text("link to file", "2")
    monkeypatch.chdir(folder)
    write_folder(".", a="2")
    assert [path.read_text() for path in private] == ["2", "2", "1"]
    write_folder(tmp_path / "link to folder", a="3")
    assert [path.stat().st_mode & 0o777 for path in (*private, folder)] == [0o600] * 3 + [0o700]
    assert pathlib.Path("a").read_text() == "3"
    assert all((tmp_path / f"link to {path.name}").is_symlink() for path in (file, folder))


@pytest.mark.once
def test_replace_stale_temporary_folder_is_removed_unless_locked(tmp_path):
    """Temporary folders accumulate, or the folder of a running process is removed."""
    path = tmp_path / "x"
    stale, other = tmp_path / ".x-0123abcd.part", tmp_path / ".x.y-0123abcd.part"
    for folder in (stale, other):
        folder.mkdir()
        (folder / "x").touch()
    with atomic_files.temporary_folder(str(path)) as locked:
        assert not stale.exists()
        write_text(path, "1")
        assert os.path.isdir(locked)
    assert set(os.listdir(tmp_path)) == {"x", other.name}


@pytest.mark.once
def test_replace_impossible_target_is_an_error(tmp_path, monkeypatch):
    """A save to a read-only directory raises an error that does not name the cause."""
    with pytest.raises(FileNotFoundError, match=r"temporary folder .* in '.*missing'"):
        write_text(tmp_path / "missing" / "x", "")
    with pytest.raises(IsADirectoryError):
        write_text(tmp_path, "")

    def mkdir(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(atomic_files.os, "mkdir", mkdir)
    with pytest.raises(PermissionError, match="denied: a temporary folder cannot be created in"):
        write_text(tmp_path / "x", "")


@pytest.mark.once
def test_write_backup_failed_write_leaves_old_file(tmp_path):
    """A backup of training is lost if the disk is full."""
    path = str(tmp_path / "run.backup")
    write_backup(path, {}, {"weights": [np.zeros(3)]})
    old = read_all(tmp_path)
    with pytest.raises(TypeError):
        write_backup(path, {"not": {1j}}, {"weights": [np.ones(3)]})
    assert read_all(tmp_path) == old
