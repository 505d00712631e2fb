"""Setup of all tests: the backend, caches of compiled programs, seeds, markers and budget."""

import gc
import importlib.metadata
import importlib.util
import os
import pathlib

import pytest

from tests.budget import Budget
from tests.selection import BACKENDS

INSTALLED = [name for name in BACKENDS if importlib.util.find_spec(name)]
# Tests marked `once` do not depend on the backend; they run on torch, which compiles least.
ONCE = "torch" if "torch" in INSTALLED else INSTALLED[0]

# Without this, Keras reads the user's keras.json and falls back to TensorFlow.
os.environ.setdefault("KERAS_BACKEND", INSTALLED[0])
# On GPUs, JAX multiplies float32 matrices in TF32, whose error would mask others.
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")

# Tests spend most time compiling, so XLA's optimizations are off. The older emitters and a single
# LLVM module more than halve compile time. XLA aborts on unknown flags, so these are set for one
# version only.
# On GPUs, each process would measure and choose other kernels, and add gradients in any order.
_XLA_FLAGS = [
    "--xla_backend_optimization_level=0",
    "--xla_gpu_autotune_level=0",
    "--xla_gpu_deterministic_ops=true",
]
if "jax" in INSTALLED and importlib.metadata.version("jax").startswith("0.10."):
    _XLA_FLAGS += [
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
os.environ.setdefault("XLA_FLAGS", " ".join(_XLA_FLAGS))

# Compiled programs are cached on disk for other workers and later runs, by default inside this
# checkout: Inductor reuses entries although operator code changed. JAX's entries are keyed by the
# program, so JAX_COMPILATION_CACHE_DIR may name a directory that outlives the checkout.
_CACHE = pathlib.Path(__file__).parents[1] / ".pytest_cache"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_CACHE / "torchinductor"))
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE / "jax"))
# By default JAX skips small and quickly compiled programs: nearly all here.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Parallel workers use one thread each: torch's threads wait by spinning. torch reads this when it
# is imported, below.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Triton cannot be imported after TensorFlow, which KerasHub imports. On torch it already is.
if os.environ["KERAS_BACKEND"] == "jax" and importlib.util.find_spec("triton"):
    importlib.import_module("triton")

# Without a GPU, the Triton kernels run in Triton's interpreter. Triton reads this when imported.
if os.environ["KERAS_BACKEND"] == "torch":
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
        # The patch changes internals of this Triton version.
        spec = importlib.util.find_spec("triton")
        if spec and importlib.metadata.version("triton").startswith("3.7."):
            from tests.interpreter import spare_repeated_work

            spare_repeated_work()
else:
    from tests.initializers import patch_initializers

    patch_initializers()


def pytest_addoption(parser):
    group = parser.getgroup("keras_recurrent")
    group.addoption(
        "--nightly",
        default="",
        metavar="PATHS",
        help="also run nightly tests in these comma-separated files and folders",
    )
    group.addoption(
        "--budget",
        choices=("check", "write"),
        help="check CPU seconds by, or write, durations.json",
    )
    group.addoption(
        "--draws", default="few", help="random inputs per test: a number, few (default) or many"
    )
    group.addoption("--start", type=int, default=0, help="index of the first random input")


def pytest_configure(config):
    if config.option.budget:
        config.pluginmanager.register(Budget(config), "budget")
    # Incomplete cache entries (still being written, or interrupted) are recompiled.
    message = "Error reading persistent compilation cache entry"
    config.addinivalue_line("filterwarnings", f"ignore:{message}:UserWarning")


def pytest_collection_modifyitems(config, items):
    """Deselects nightly tests unless requested, and tests marked `once` on all but one backend.

    In a file marked `once`, tests marked `every_backend` still run on all.
    `--nightly=PATHS` requests the nightly tests of files and folders, `file::name` a single one.
    """
    paths = [config.invocation_params.dir / p for p in config.option.nightly.split(",") if p]
    names = tuple(argument for argument in config.args if "::" in argument)
    if missing := [str(path) for path in paths if not path.exists()]:
        raise pytest.UsageError(f"--nightly must name files and folders; missing: {missing}")

    def runs(item):
        marks = {mark.name for mark in item.iter_markers()}
        is_requested = item.nodeid.startswith(names) or any(
            item.path.is_relative_to(path) for path in paths
        )
        is_once = "once" in marks and "every_backend" not in marks
        is_backend = not is_once or os.environ["KERAS_BACKEND"] == ONCE
        return is_backend and (is_requested or "nightly" not in marks)

    config.hook.pytest_deselected(items=[item for item in items if not runs(item)])
    items[:] = [item for item in items if runs(item)]


def pytest_report_header():
    return f"KERAS_BACKEND={os.environ['KERAS_BACKEND']}"


def memory_is_short():
    """Returns True if this process exceeds its share of half the memory, or if that is unknown."""
    try:
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return True
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return pages > os.sysconf("SC_PHYS_PAGES") / 2 / workers


@pytest.fixture(scope="module", autouse=True)
def _memory():
    """Frees JAX's programs if memory is short; excludes loaded objects from garbage collection.

    Dropped programs are read again from the disk cache. Keras collects garbage for each quantized
    layer.
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
