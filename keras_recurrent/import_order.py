"""What is known before Keras is imported to end badly, as errors that say what to do.

Keras takes its backend from the environment, and TensorFlow where nothing says another.

TensorFlow loads its LLVM for all libraries of the process to see, and Triton 3.7 and later, loaded
after it, ends in a segmentation fault (https://github.com/tensorflow/tensorflow/issues/124205).
Keras on torch imports Triton. Nothing here imports Keras.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import sys
import warnings

FIRST_BROKEN = (3, 7)  # of Triton
FRAMEWORKS = ("jax", "torch", "tensorflow")
CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")  # of JAX
OTHERS = ("numpy", "openvino")  # backends of Keras that nothing here is implemented for


def check_backend():
    """Raises where Keras would be imported for a framework that is not installed.

    Raises:
        ImportError: it is not installed, or Keras has no such backend.
    """
    if hasattr(sys.modules.get("keras"), "config"):
        return  # it runs
    backend = keras_backend()
    if backend in OTHERS or (backend in FRAMEWORKS and _is_installed(backend)):
        return
    said = os.environ.get("KERAS_BACKEND")
    source = f"KERAS_BACKEND is {said!r}" if said else "KERAS_BACKEND is not set"
    fault = "is not installed" if backend in FRAMEWORKS else "is no backend of Keras"
    installed = [name for name in FRAMEWORKS if _is_installed(name)]
    if installed:
        advice = (
            f"Set the environment variable KERAS_BACKEND to {' or '.join(map(repr, installed))}, "
            f"installed here, before Keras is imported: KERAS_BACKEND={installed[0]} python ..., "
            f'or os.environ["KERAS_BACKEND"] = "{installed[0]}" at the top of the program.'
        )
    else:
        advice = "Install one: the extra `jax` of keras-recurrent, or pip install jax."
    raise ImportError(f"Keras would run on {backend!r}, which {fault} ({source}). {advice}")


def _is_installed(package):
    return package in sys.modules or importlib.util.find_spec(package) is not None


def check_import_order():
    """Raises where importing Keras would now crash.

    Raises:
        ImportError: TensorFlow is imported, a Triton of 3.7 or later is not but will be.
    """
    if keras_backend() != "torch" or not triton_would_crash():
        return
    version = importlib.metadata.version("triton")
    raise ImportError(
        "TensorFlow was imported before triton, and Keras on torch, which imports triton, would "
        f"now end in a segmentation fault (tensorflow {_version('tensorflow')}, triton {version}). "
        "Import keras_recurrent before tensorflow, or begin the program with `import triton`."
    )


def warn_of_left_out_kernels():
    """Warns where an order of imports leaves the kernels for NVIDIA GPUs out, on JAX with one."""
    if keras_backend() != "jax" or not triton_would_crash():
        return
    if any(map(_is_installed, CUDA_PLUGINS)) and os.path.exists("/dev/nvidiactl"):
        warnings.warn(
            "TensorFlow was imported before keras_recurrent, as `import keras_hub` does, so the "
            "kernels for NVIDIA GPUs are left out, which would now crash. Import keras_recurrent "
            "first.",
            stacklevel=3,
        )


def triton_would_crash():
    """Whether TensorFlow is imported, and a Triton of 3.7 or later installed but not imported."""
    if "tensorflow" not in sys.modules or "triton" in sys.modules:
        return False
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(int(n) for n in re.findall(r"\d+", version)[:2]) >= FIRST_BROKEN


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
