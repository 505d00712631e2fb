"""What every test stands on: a backend, its seeds, and tests that need no backend at all."""

import importlib.util
import os

import pytest

BACKENDS = ("jax", "torch", "tensorflow")
INSTALLED = [name for name in BACKENDS if importlib.util.find_spec(name)]

# Keras would look into the user's configuration file, and take TensorFlow without one.
os.environ.setdefault("KERAS_BACKEND", INSTALLED[0])
# On a GPU, JAX takes float32 matrix products in TF32, whose error would hide all others.
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")

# Tests that run side by side take one thread each: torch's threads wait by spinning.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_report_header():
    return f"KERAS_BACKEND={os.environ['KERAS_BACKEND']}"


def pytest_collection_modifyitems(items):
    if os.environ["KERAS_BACKEND"] == INSTALLED[0]:
        return
    reason = f"does not depend on the backend, runs on {INSTALLED[0]}"
    for item in items:
        if item.get_closest_marker("once"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _seeds():
    import keras

    keras.utils.set_random_seed(0)
