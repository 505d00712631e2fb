"""Atomic replacement of files and folders: a killed process leaves the old or the new content.

Content is written to a temporary folder next to the target, `.{name}-{8 hex digits}.part`, and
moved at the end. The next replacement of a target removes folders that killed processes left.
"""

import contextlib
import ctypes
import errno
import glob
import os
import re
import shutil
import sys
import uuid

try:
    import fcntl
except ImportError:  # on Windows, where temporary folders of killed processes stay
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"  # file of a temporary folder, locked while its process runs
TEMPORARY = re.compile(r"[\\/]\.[^\\/]+-[0-9a-f]{8}\.part[\\/]")
WEIGHTS = re.compile(r"model(_\d{5})?\.weights\.(h5|json)")  # files of a preset


class AtomicPreset:
    """Mixin for models, tokenizers and preprocessors of KerasHub: `save_to_preset` is atomic."""

    def save_to_preset(self, preset_dir, *args, **kwargs):
        """Saves to a folder for `from_preset`, in one step. Other files in the folder are kept."""
        if not os.fspath(preset_dir):
            raise ValueError("`preset_dir` must be the name of a folder; got an empty string.")
        os.makedirs(os.path.dirname(os.path.realpath(preset_dir)), exist_ok=True)
        with replace(preset_dir) as folder:
            super().save_to_preset(folder, *args, **kwargs)  # type: ignore[misc]


@contextlib.contextmanager
def replace(path):
    """Context manager that yields a path for a new file or folder, moved to `path` at the end.

    - A symbolic link stays a link: its target is replaced. Permissions are kept.
    - A new folder gets the files that only the old folder has.
    - A path inside a temporary folder is yielded unchanged, as is a mount point, which cannot be
      moved.
    """
    path = os.path.realpath(path)
    if TEMPORARY.search(path) or os.path.ismount(path):
        yield path
        return
    with temporary_folder(path) as temporary:
        new = os.path.join(temporary, os.path.basename(path))
        yield new
        write_to_disk(temporary)
        if os.path.isdir(path) and os.path.isdir(new):
            _replace_folder(new, path)
        else:
            if os.path.exists(path):
                shutil.copymode(path, new)
            os.replace(new, path)


def find_folder(path):
    """Returns `path`, or the folder with its old content if an exchange was interrupted."""
    old = _old_folder(os.path.realpath(path))
    return old if os.path.isdir(old) and not os.path.exists(path) else path


@contextlib.contextmanager
def temporary_folder(path):
    """Context manager that yields a folder next to `path`, and removes it with its content."""
    parent, name = os.path.split(path)
    remove_temporary_folders(parent, glob.escape(name))
    folder = os.path.join(parent, f".{name}-{uuid.uuid4().hex[:8]}.part")
    try:
        os.mkdir(folder)
    except OSError as error:
        reason = (
            f"{error.strerror}: a temporary folder cannot be created in {parent!r}, which must "
            "exist and be writable"
        )
        raise OSError(error.errno, reason, path) from error
    try:
        with open(os.path.join(folder, LOCK), "w") as lock:
            with contextlib.suppress(OSError):  # some network file systems have no locks
                _lock(lock)
            if os.path.isdir(old := _old_folder(path)):  # the process that moved it was killed
                os.rename(old, os.path.join(folder, ".old") if os.path.isdir(path) else path)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_temporary_folders(parent, name="*"):
    """Removes the temporary folders of killed processes. name: the target, a pattern of `glob`."""
    for folder in glob.glob(f".{name}-{'[0-9a-f]' * 8}.part", root_dir=parent):
        path = os.path.join(parent, folder)
        with contextlib.suppress(OSError), open(os.path.join(path, LOCK), "w") as lock:
            _lock(lock)
            shutil.rmtree(path, ignore_errors=True)


def _lock(file):
    """Locks a file until it is closed. Raises OSError if a process has locked it."""
    if fcntl is None:
        raise OSError("There are no locks on Windows.")
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def write_to_disk(folder):
    """Makes the system write the files in a folder to the disk, where it may have buffered them."""
    for name in glob.glob("**", root_dir=folder, recursive=True, include_hidden=True):
        if os.path.isfile(path := os.path.join(folder, name)):
            with open(path, "rb+") as file:
                os.fsync(file.fileno())


def _replace_folder(new, path):
    """Exchanges two folders, in one step if possible, and adds files that `new` lacks to it."""
    here = ""
    with contextlib.suppress(FileNotFoundError):  # a working directory that was removed
        here = os.getcwd()
    _link_missing(path, new)
    if not _exchange(new, path):
        os.rename(path, _old_folder(path))
        os.rename(new, path)
        os.rename(_old_folder(path), new)
    _link_missing(new, path)  # files that other processes added in the meantime
    if os.path.join(here, "").startswith(os.path.join(path, "")):
        os.chdir(here)  # from the old folder to the new one


def _exchange(first, second):
    """Exchanges two folders in one step. Returns False if the system or file system cannot."""
    if sys.platform != "linux" or not hasattr(libc := ctypes.CDLL(None), "renameat2"):
        return False
    at_fdcwd, rename_exchange = -100, 2
    paths = os.fsencode(first), os.fsencode(second)
    return libc.renameat2(at_fdcwd, paths[0], at_fdcwd, paths[1], rename_exchange) == 0


def _old_folder(path):
    """Returns the name of the old folder between the steps of an exchange."""
    return os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.old")


def _link_missing(source, target):
    """Adds the files that only `source` has to `target`, and copies permissions."""
    has_model = os.path.exists(os.path.join(target, "config.json"))
    for folder, folders, names in os.walk(source, topdown=False):
        to = os.path.join(target, os.path.relpath(folder, source))
        os.makedirs(to, exist_ok=True)
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for name in names + links:
            old, new = os.path.join(folder, name), os.path.join(to, name)
            # If the file of an old model were kept, KerasHub would load it instead of new shards.
            is_outdated = has_model and folder == source and WEIGHTS.fullmatch(name)
            if os.path.exists(old) and os.path.exists(new):
                shutil.copymode(old, new)
            elif not is_outdated and not os.path.lexists(new):
                _link(old, new)
        shutil.copymode(folder, to)


def _link(path, link):
    """Makes a hard link, or a copy if the file system has no hard links."""
    try:
        os.link(path, link, follow_symlinks=False)
    except (OSError, NotImplementedError) as error:
        if getattr(error, "errno", None) == errno.EXDEV:  # a file system mounted in the folder
            raise
        shutil.copy2(path, link, follow_symlinks=False)
