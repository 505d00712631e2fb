"""Operations on sequences whose tokens are on several devices."""

import keras
import pytest

from keras_recurrent import layers, models
from tests.devices.meshes import device_mesh, model_parallel
from tests.devices.processes import run_on_simulated_devices
from tests.models.tiny import tiny_backbone

pytestmark = pytest.mark.skipif(
    keras.config.backend() != "jax", reason="torch has another implementation, TensorFlow none"
)


@pytest.mark.nightly
def test_operations_on_shards_of_time_match_one_device():
    """Outputs, states or gradients differ, messages grow with the length, or errors are missing."""
    run_on_simulated_devices(8, "jax_sequence")


def test_global_attention_on_shards_of_time_raises_before_weights_are_made():
    layout_map = models.GriffinBackbone.get_layout_map(device_mesh(1, 4, 1))
    message = "`LocalAttention` without a `sliding_window` needs all tokens of a sequence"
    with model_parallel(layout_map), pytest.raises(NotImplementedError, match=message):
        tiny_backbone(family="griffin", block_types=("recurrent", "global_attention"))
    layout_map = models.GriffinBackbone.get_layout_map(device_mesh(4, 1, 1))
    with model_parallel(layout_map):
        layers.LocalAttention(2, head_dim=4)  # each device has all tokens


@pytest.mark.parametrize("argument", ["model_parallel_dim_name", "data_parallel_dim_name"])
def test_layout_map_with_sequence_as_another_axis_raises(argument):
    with pytest.raises(ValueError, match=f"`{argument}` must be another axis than 'sequence'"):
        models.GriffinBackbone.get_layout_map(device_mesh(1, 4, 1), **{argument: "sequence"})
