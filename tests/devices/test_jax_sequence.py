"""Rows whose tokens are on several devices: the same numbers as on one, and how little is sent."""

import os

import keras
import pytest

from tests.devices.test_jax_layouts import compare
from tests.processes import fresh_process

pytestmark = pytest.mark.skipif(
    keras.config.backend() != "jax", reason="torch has a way of its own, TensorFlow none"
)


def report(*arguments):
    return fresh_process(
        *("-m", "tests.devices.jax_sequence", *arguments),
        XLA_FLAGS=os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=8",
        JAX_PLATFORMS="cpu",
    )


def check(report):
    for name, found in report["found"].items():
        assert found["error"] < 2e-6, (name, found)
        assert found["in loops"] == 0, name
    # Rows of 8192 tokens are 524,288 bytes each of x, y and z.
    assert 0 < report["sent"]["linear_scan"] < 4096
    assert 0 < report["sent"]["window"] < 16_384
    of_attention, of_length = report["refused"]
    assert of_attention.startswith("NotImplementedError: `sliding_window_attention`")
    assert "Give a `sliding_window`" in of_attention
    assert of_length.startswith("ValueError: The 63 tokens")
    assert "such as 64 tokens" in of_length


def test_shards_of_time_know_what_came_before_them():
    """Of packed rows with padding over whole devices, from a state on: forward and gradients."""
    check(report("quick", "gated_linear_attention", "causal_conv1d", "wide_window"))


@pytest.mark.slow
def test_every_operation_over_time_on_shards_of_time():
    found = report()
    assert len(found["found"]) == 32
    check(found)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", ["1,8,1", "2,2,2", "1,4,2"])
@pytest.mark.parametrize("family", ["griffin", "hgrn2", "transnormer"])
def test_models_train_and_write_on_shards_of_time(tmp_path, family, sizes):
    compare(tmp_path, True, f"{family}:{sizes}")
