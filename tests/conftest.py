"""Set up for all tests: the backend, caches of compiled programs, seeds, tiers and budget."""

import gc
import importlib.metadata
import importlib.util
import os
import pathlib

import pytest

from tests import budget, tiers

BACKENDS = ("jax", "torch", "tensorflow")
INSTALLED = [name for name in BACKENDS if importlib.util.find_spec(name)]
# Tests marked `once` do not depend on the backend; they run on torch, which compiles least.
ONCE = "torch" if "torch" in INSTALLED else INSTALLED[0]

# Keras would look into the user's configuration file, and take TensorFlow without one.
os.environ.setdefault("KERAS_BACKEND", INSTALLED[0])
# On a GPU, JAX takes float32 matrix products in TF32, whose error would hide all others.
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")

# Most of a test's time is compilation, not what is compiled: XLA need not make that fast, and its
# older emitters and a single module for LLVM take less than half the time. XLA ends the process at
# a flag that it does not know, so those of one version are given to that version alone.
_XLA_FLAGS = ["--xla_backend_optimization_level=0"]
if "jax" in INSTALLED and importlib.metadata.version("jax").startswith("0.10."):
    _XLA_FLAGS += [
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
os.environ.setdefault("XLA_FLAGS", " ".join(_XLA_FLAGS))

# What was compiled is kept on disk, for a run's other modules and workers and for the next run: not
# beyond a checkout, as torch runs what it once compiled though operators may have changed since.
_CACHE = pathlib.Path(__file__).parents[1] / ".pytest_cache"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_CACHE / "torchinductor"))
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE / "jax"))
# JAX would leave out what is small or quickly compiled, which is nearly all that tests compile.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Tests that run side by side take one thread each: torch's threads wait by spinning. It reads
# this when imported, which comes next.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# KerasHub imports TensorFlow, after which triton can no more be imported. On torch it already is.
if os.environ["KERAS_BACKEND"] == "jax" and importlib.util.find_spec("triton"):
    importlib.import_module("triton")

# Without a GPU, the Triton kernels run in Triton's interpreter. Triton reads this when imported.
if os.environ["KERAS_BACKEND"] == "torch":
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
        # As with XLA's flags, what is changed is the inside of one version.
        spec = importlib.util.find_spec("triton")
        if spec and importlib.metadata.version("triton").startswith("3.7."):
            from tests.interpreter import spare_repeated_work

            spare_repeated_work()
else:
    from tests.initializers import draw_from_numpy

    draw_from_numpy()


def pytest_addoption(parser):
    budget.addoption(parser)
    tiers.addoption(parser)
    group = parser.getgroup("fuzz", "inputs that are drawn freely, in tests/fuzz")
    group.addoption("--draws", default="few", help="a number for each test, few (default) or many")
    group.addoption("--start", type=int, default=0, help="the number of the first draw")


def pytest_configure(config):
    budget.configure(config)
    tiers.configure(config, ONCE)
    # What another worker is still writing, or what was broken off, is compiled once more.
    message = "Error reading persistent compilation cache entry"
    config.addinivalue_line("filterwarnings", f"ignore:{message}:UserWarning")


def pytest_report_header():
    return f"KERAS_BACKEND={os.environ['KERAS_BACKEND']}"


def memory_is_short():
    """Whether this process has its share of half the machine's memory, or nobody can tell."""
    try:
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return True
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return pages > os.sysconf("SC_PHYS_PAGES") / 2 / workers


@pytest.fixture(scope="module", autouse=True)
def _memory():
    """Do not scan loaded modules for garbage, and drop JAX's programs where memory is short.

    JAX keeps gigabytes of programs; those that return are read from disk. Keras collects garbage
    for each layer that it quantizes.
    """
    if os.environ["KERAS_BACKEND"] == "jax" and memory_is_short():
        import jax

        jax.clear_caches()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeds():
    import keras

    keras.utils.set_random_seed(0)
