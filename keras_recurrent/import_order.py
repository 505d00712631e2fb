"""Checks that must run before Keras is imported.

Keras takes its backend from the environment and otherwise uses TensorFlow, installed or not.

TensorFlow makes its LLVM visible to all libraries of the process, and loading Triton 3.7 or later
after it ends in a segmentation fault (https://github.com/tensorflow/tensorflow/issues/124205).
Keras on torch imports Triton. This file does not import Keras.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import sys
import warnings

FIRST_CRASHING_TRITON = (3, 7)
FRAMEWORKS = ("jax", "torch", "tensorflow")
CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")  # of JAX
OTHER_BACKENDS = ("numpy", "openvino")  # backends of Keras without implementations here


def check_backend():
    """Raises an error if Keras's backend is not installed.

    Raises:
        ImportError: the backend is not installed, or Keras has no such backend.
    """
    if hasattr(sys.modules.get("keras"), "config"):
        return  # Keras is imported
    backend = keras_backend()
    if backend in OTHER_BACKENDS or (backend in FRAMEWORKS and _is_installed(backend)):
        return
    variable = os.environ.get("KERAS_BACKEND")
    source = f"KERAS_BACKEND is {variable!r}" if variable else "KERAS_BACKEND is not set"
    fault = "is not installed" if backend in FRAMEWORKS else "is not a backend of Keras"
    installed = [name for name in FRAMEWORKS if _is_installed(name)]
    if installed:
        advice = (
            f"Set the environment variable KERAS_BACKEND to {' or '.join(map(repr, installed))}, "
            f"installed here, before Keras is imported: KERAS_BACKEND={installed[0]} python ..., "
            f'or os.environ["KERAS_BACKEND"] = "{installed[0]}" at the beginning of the program.'
        )
    else:
        advice = "Install one: the extra `jax` of keras-recurrent, or pip install jax."
    raise ImportError(f"Keras would run on {backend!r}, which {fault} ({source}). {advice}")


def _is_installed(package):
    return package in sys.modules or importlib.util.find_spec(package) is not None


def check_import_order():
    """Raises an error if importing Keras would crash.

    Raises:
        ImportError: TensorFlow is imported, and Triton 3.7 or later will be imported after it.
    """
    if keras_backend() != "torch" or not triton_would_crash():
        return
    version = importlib.metadata.version("triton")
    tensorflow = getattr(sys.modules["tensorflow"], "__version__", "of unknown version")
    raise ImportError(
        "TensorFlow was imported before triton, and Keras on torch, which imports triton, would "
        f"end in a segmentation fault (tensorflow {tensorflow}, triton {version}). "
        "Import keras_recurrent before tensorflow, or begin the program with `import triton`."
    )


def warn_about_disabled_kernels():
    """Warns on JAX with an NVIDIA GPU if the order of imports disables the kernels for it."""
    if keras_backend() != "jax" or not triton_would_crash():
        return
    if any(map(_is_installed, CUDA_PLUGINS)) and os.path.exists("/dev/nvidiactl"):
        warnings.warn(
            "TensorFlow was imported before keras_recurrent, as `import keras_hub` does. The "
            "kernels for NVIDIA GPUs are disabled, since they would crash. Import keras_recurrent "
            "first.",
            stacklevel=3,
        )


def triton_would_crash():
    """Returns True if TensorFlow is imported, and Triton 3.7 or later installed, not imported."""
    if "tensorflow" not in sys.modules or "triton" in sys.modules:
        return False
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(int(n) for n in re.findall(r"\d+", version)[:2]) >= FIRST_CRASHING_TRITON


def keras_backend():
    """Returns the backend of Keras: of the imported module, of KERAS_BACKEND or `keras.json`."""
    keras = sys.modules.get("keras")
    if keras is not None and hasattr(keras, "config"):
        return keras.config.backend()
    if os.environ.get("KERAS_BACKEND"):
        return os.environ["KERAS_BACKEND"]
    try:
        with open(os.path.join(_keras_home(), "keras.json"), encoding="utf-8") as file:
            return json.load(file).get("backend", "tensorflow")
    except (OSError, ValueError):  # Keras then uses its default, too
        return "tensorflow"


def _keras_home():
    if "KERAS_HOME" in os.environ:
        return os.path.expanduser(os.environ["KERAS_HOME"])
    home = os.path.expanduser("~")
    return os.path.join(home if os.access(home, os.W_OK) else "/tmp", ".keras")
