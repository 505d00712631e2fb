"""`memory_sizes` and `training_sizes`."""

import itertools
import math

import keras
import numpy as np
import pytest

from keras_recurrent import compat
from keras_recurrent.models import GriffinBackbone, memory_sizes, training_sizes
from tests.layers.table import assert_rejects
from tests.models.tiny import FAMILIES, tiny_causal_lm

pytestmark = pytest.mark.once


def nbytes(arrays):
    return sum(keras.ops.convert_to_numpy(array).nbytes for array in keras.tree.flatten(arrays))


@pytest.mark.parametrize(("dtype", "length"), [("float16", 1), ("float32", 3), ("float32", 50)])
def test_memory_sizes_equal_the_bytes_of_the_arrays(dtype, length):
    model = tiny_causal_lm(dtype=dtype)
    sizes = memory_sizes(model, batch_size=3, length=length)
    cache = model.backbone.get_initial_state(3, max_length=length)
    assert sizes.parameters == nbytes(model.weights)
    assert sizes.cache == nbytes(cache)
    assert sizes.total == sizes.parameters + sizes.cache
    recurrent, *attention = cache["blocks"]
    assert sizes.recurrent_state == nbytes(recurrent["temporal_block"]["rg_lru"])
    assert sizes.convolution_state == nbytes(recurrent["temporal_block"]["conv1d"])
    assert sizes.keys_and_values == nbytes(attention)
    assert sizes.places == 3 * 2 * 4  # a segment and a position of each sequence


def test_dtype_of_a_preset_determines_sizes(tmp_path):
    """Sizes of a preset ignore `dtype` and use the global policy."""
    dtype = "bfloat16"
    model = GriffinBackbone.from_preset("griffin_tiny", dtype=dtype)
    GriffinBackbone.from_preset("griffin_tiny").save_to_preset(tmp_path)
    for name in ("griffin_tiny", str(tmp_path)):
        assert memory_sizes(name, 2, 100, dtype=dtype) == memory_sizes(model, 2, 100)
        assert training_sizes(name, dtype=dtype) == training_sizes(model)


def test_sizes_of_a_preset_reject_unknown_and_quantized_dtypes():
    for function in (training_sizes, lambda *a, **k: memory_sizes(*a, 1, 1, **k)):
        for dtype in ("bf16", "int8_from_bfloat16", "int32", 16, ""):
            match = "`dtype` must be the name of a Keras dtype pol"
            assert_rejects(match, function, "griffin_tiny", dtype=dtype)
        match = r"`dtype` is only supported.*`GriffinCausalLM`"
        assert_rejects(match, function, tiny_causal_lm(), dtype="bfloat16")


def test_memory_sizes_of_a_preset_name_allocate_no_weights():
    """Keras allocates 27 gigabytes, at once or at its next initialization."""
    large = memory_sizes("griffin_7b", 1, 1000)
    assert large.parameters == 4 * GriffinBackbone.presets["griffin_7b"]["metadata"]["params"]
    assert not compat.global_state.get_global_attribute("uninitialized_variables")
    assert_rejects("Near names: 'hawk_7b'", memory_sizes, "hawk_8b", 1, 1)
    assert_rejects(
        "`HGRN2VisionBackbone`, which has no state", memory_sizes, "hgrn2_vision_tiny", 1, 1
    )


def layout_map(family, sizes, names=("batch", "model")):
    devices = [f"gpu:{i}" for i in range(math.prod(sizes))]
    mesh = keras.distribution.DeviceMesh(sizes, names, devices)
    return FAMILIES[family].backbone.get_layout_map(mesh)


def test_layout_map_divides_weights_and_caches_by_devices():
    """A large weight or a state is counted whole on each device, or a norm is divided."""
    whole = training_sizes("tnl_7b")
    parameters = 4 * 7_193_235_456
    assert whole == (parameters, parameters, 2 * parameters)
    part = training_sizes("tnl_7b", layout_map=layout_map("transnormer", (2, 4)))
    np.testing.assert_allclose(part.total, whole.total / 8, rtol=1e-4)
    assert part.total >= whole.total / 8
    names = ("batch", "sequence", "model")
    layout = layout_map("hgrn2", (1, 4, 2), names)
    part = training_sizes("hgrn2_7b", num_slots=0, layout_map=layout)
    np.testing.assert_allclose(part.total, 2 * 4 * 6_738_677_760 / 8, rtol=1e-3)
    one = memory_sizes("hgrn2_150m", 16, 100)
    many = memory_sizes("hgrn2_150m", 16, 100, layout_map=layout_map("hgrn2", (4, 2)))
    assert (8 * many.recurrent_state, 4 * many.places) == (one.recurrent_state, one.places)
    # Five sequences cannot be divided by four devices, heads by two.
    odd = memory_sizes("hgrn2_150m", 5, 100, layout_map=layout_map("hgrn2", (4, 2)))
    assert 2 * odd.recurrent_state == 5 * one.recurrent_state // 16


def test_sizes_reject_invalid_layouts_counts_and_models_without_state():
    match = r"`token_embedding/embeddings` of shape \(259, 128\)"
    assert_rejects(match, training_sizes, "hgrn2_tiny", layout_map=layout_map("hgrn2", (1, 4)))
    mesh = layout_map("hgrn2", (1, 1)).device_mesh
    for wrong in (mesh, keras.distribution.LayoutMap(mesh)):
        for function in (training_sizes, lambda *a, **k: memory_sizes(*a, 1, 1, **k)):
            match = "`layout_map` must be the result of `get_layout_map`"
            assert_rejects(match, function, "hgrn2_tiny", layout_map=wrong)
    for number in (-1, 1.5):
        match = "`num_slots` must be an integer, at least 0"
        assert_rejects(match, training_sizes, "hgrn2_tiny", num_slots=number)
    for name, number in itertools.product(("batch_size", "length"), (0, 1.5, "1")):
        counts = {"batch_size": 1, "length": 1, name: number}
        match = f"`{name}` must be an integer, at least 1"
        assert_rejects(match, memory_sizes, "hgrn2_tiny", **counts)
    assert_rejects("`Sequential`, which has no state", memory_sizes, keras.Sequential(), 1, 1)
