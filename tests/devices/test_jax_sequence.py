"""Rows whose tokens are on several devices: the same numbers as on one, and how little is sent."""

import os

import keras
import pytest

from keras_recurrent import layers, models
from tests.devices.test_jax_layouts import compare
from tests.models.tiny import tiny_backbone
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
    for name, (of_8192, of_32768) in report["sent"].items():
        # These rows are 524,288 bytes each of x, y and z, and four times as many.
        assert 0 < of_8192 == of_32768 < 32_768, (name, of_8192, of_32768)
    of_attention, of_length, of_axis = report["refused"]
    assert of_attention.startswith("NotImplementedError: `sliding_window_attention`")
    assert "Give a `sliding_window`" in of_attention
    assert of_length.startswith("ValueError: Sequences of 63 tokens")
    assert "such as 64 tokens" in of_length
    assert "cannot split the batch: give the distribution another `batch_dim_name`" in of_axis


@pytest.mark.nightly
def test_shards_of_time_know_what_came_before_them():
    """Of packed rows with padding over whole devices, from a state on: forward and gradients."""
    check(report("quick", "gated_linear_attention", "causal_conv1d", "wide_window"))


def test_what_shards_of_time_do_not_have_is_refused_before_weights_are_made():
    devices = [f"cpu:{i}" for i in range(4)]
    mesh = keras.distribution.DeviceMesh((1, 4, 1), ("batch", "sequence", "model"), devices)
    layout_map = models.GriffinBackbone.get_layout_map(mesh)
    kinds = {"block_types": ("recurrent", "global_attention")}
    with keras.distribution.ModelParallel(layout_map=layout_map).scope():
        message = "`LocalAttention` without a `sliding_window` needs all tokens of a sequence"
        with pytest.raises(NotImplementedError, match=message):
            tiny_backbone(family="griffin", **kinds)
    for argument in ("model_parallel_dim_name", "data_parallel_dim_name"):
        with pytest.raises(ValueError, match=f"`{argument}` must be another axis than 'sequence'"):
            models.GriffinBackbone.get_layout_map(mesh, **{argument: "sequence"})
    mesh = keras.distribution.DeviceMesh((4, 1, 1), ("batch", "sequence", "model"), devices)
    layout_map = models.GriffinBackbone.get_layout_map(mesh)
    with keras.distribution.ModelParallel(layout_map=layout_map).scope():
        layers.LocalAttention(2, head_dim=4)  # one device has all tokens


@pytest.mark.nightly
def test_every_operation_over_time_on_shards_of_time():
    found = report()
    assert len(found["found"]) == 36
    check(found)


@pytest.mark.nightly
@pytest.mark.parametrize("sizes", ["1,8,1", "2,2,2", "1,4,2"])
@pytest.mark.parametrize("family", ["griffin", "hgrn2", "transnormer"])
def test_models_train_and_write_on_shards_of_time(tmp_path, family, sizes):
    compare(tmp_path, True, f"{family}:{sizes}")
