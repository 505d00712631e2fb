"""A wheel, an sdist and an editable installation have the files of the source tree."""

import os
import pathlib
import shutil
import sysconfig
import tomllib
import zipfile

import pytest

import keras_recurrent
from tests.processes import ROOT, printed

pytestmark = pytest.mark.once

TOP = {"keras_recurrent": "keras_recurrent"} | {
    f"keras_recurrent/{name}": name for name in ("backends", "presets")
}


def files_of_tree(suffixes=(".py", ".typed", ".h5", ".md", ".html")):
    """Returns `{path in an installation: file of the tree}`."""
    return {
        f"{installed}/{file.relative_to(ROOT / folder).as_posix()}": file
        for installed, folder in TOP.items()
        for file in (ROOT / folder).rglob("*")  # does not follow links
        if file.suffix in suffixes
    }


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the source tree, so that building leaves no files in the original."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("keras_recurrent", "backends", "presets"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(copy):
    """A wheel that is built from an sdist, which must have all files."""
    printed("-m", "build", "--no-isolation", "--outdir", "dist", cwd=copy)
    (path,) = (copy / "dist").glob("*.whl")
    return path


def import_from(folder, code):
    """Runs code that finds `folder` and other packages, but no installation of this tree.

    With `-S`, the .pth files of site-packages have no effect.
    """
    path = os.pathsep.join([str(folder), sysconfig.get_paths()["purelib"]])
    return printed("-S", "-c", code, cwd=folder, PYTHONPATH=path)


# KerasHub imports TensorFlow if it is installed, which takes seconds.
PRINT_PATHS = (
    "import keras, sys; sys.modules['tensorflow'] = sys.modules['tensorflow_text'] = None\n"
    "import keras_recurrent as k, keras_recurrent.presets as p\n"
    "import keras_recurrent.backends.reference.linear_scan as r\n"
    "assert p.path_of_weights('griffin_tiny_text.weights.h5').is_file()\n"
    "print(k.__file__, r.__file__, p.__file__, sep='\\n')"
)


def test_pyproject_lists_every_package_and_packages_have_an_init(project):
    names = files_of_tree(suffixes=(".py",))
    folders = {name.rpartition("/")[0] for name in names}
    assert [folder for folder in sorted(folders) if f"{folder}/__init__.py" not in names] == []
    listed = project["tool"]["setuptools"]["packages"]
    assert set(listed) == {name.replace("/", ".") for name in folders}
    assert len(listed) == len(set(listed))


@pytest.mark.nightly
def test_wheel_has_the_version_and_the_files_of_the_tree(wheel, project):
    assert wheel.name.split("-")[1] == keras_recurrent.__version__
    assert "version" not in project["project"]  # setuptools reads the attribute
    with zipfile.ZipFile(wheel) as archive:
        built = {
            name: archive.read(name)
            for name in archive.namelist()
            if ".dist-info/" not in name and not name.endswith("/")
        }
    assert built == {name: file.read_bytes() for name, file in files_of_tree().items()}


@pytest.mark.nightly
def test_wheel_imports_its_own_files(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    files = import_from(tmp_path, PRINT_PATHS).split()
    assert [pathlib.Path(f).relative_to(tmp_path).as_posix() for f in files] == [
        "keras_recurrent/__init__.py",
        "keras_recurrent/backends/reference/linear_scan.py",
        "keras_recurrent/presets/__init__.py",
    ]


@pytest.mark.nightly
def test_editable_install_imports_the_tree(copy, tmp_path):
    """An editable installation, built without pip, imports a copy of a file."""
    code = f"import setuptools.build_meta as b; print(b.build_editable({str(tmp_path)!r}))"
    name = printed("-c", code, cwd=copy).split()[-1]
    with zipfile.ZipFile(tmp_path / name) as archive:
        archive.extractall(tmp_path)
    code = f"import site; site.addsitedir({str(tmp_path)!r})\n{PRINT_PATHS}"
    files = import_from(tmp_path, code).split()
    assert [pathlib.Path(f).resolve() for f in files] == [
        copy / "keras_recurrent/__init__.py",
        copy / "backends/reference/linear_scan.py",
        copy / "presets/__init__.py",
    ]
