"""An error in place of the crash that TensorFlow and Triton end in when imported in that order.

TensorFlow loads its LLVM for all libraries of the process to see, and Triton 3.7 and later, loaded
after it, ends in a segmentation fault (https://github.com/tensorflow/tensorflow/issues/124205).
Keras on torch imports Triton. Nothing here imports Keras.
"""

import importlib.metadata
import json
import os
import re
import sys

FIRST_BROKEN = (3, 7)  # of Triton


def check_import_order():
    """Raises where importing Keras would now crash.

    Raises:
        ImportError: TensorFlow is imported, a Triton of 3.7 or later is not but will be.
    """
    if "tensorflow" not in sys.modules or "triton" in sys.modules or keras_backend() != "torch":
        return
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return
    if tuple(int(n) for n in re.findall(r"\d+", version)[:2]) < FIRST_BROKEN:
        return
    raise ImportError(
        "TensorFlow was imported before triton, and Keras on torch, which imports triton, would "
        f"now end in a segmentation fault (tensorflow {_version('tensorflow')}, triton {version}). "
        "Import keras_recurrent before tensorflow, or begin the program with `import triton`."
    )


def keras_backend():
    """The backend that Keras has or will have: as it runs, KERAS_BACKEND, or `keras.json`."""
    keras = sys.modules.get("keras")
    if keras is not None and hasattr(keras, "config"):
        return keras.config.backend()
    if os.environ.get("KERAS_BACKEND"):
        return os.environ["KERAS_BACKEND"]
    try:
        with open(os.path.join(_keras_home(), "keras.json"), encoding="utf-8") as file:
            return json.load(file).get("backend", "tensorflow")
    except (OSError, ValueError):  # as Keras, which takes its default then
        return "tensorflow"


def _keras_home():
    if "KERAS_HOME" in os.environ:
        return os.path.expanduser(os.environ["KERAS_HOME"])
    home = os.path.expanduser("~")
    return os.path.join(home if os.access(home, os.W_OK) else "/tmp", ".keras")


def _version(package):
    return getattr(sys.modules[package], "__version__", "of unknown version")
