"""`memory_sizes` equals the bytes of the arrays."""

import math

import keras
import keras_hub
import numpy as np
import pytest

from benchmarks.decoding import decoding_time
from keras_recurrent import compat
from keras_recurrent.models import (
    GriffinBackbone,
    GriffinCausalLM,
    memory_sizes,
    training_sizes,
)
from tests.models.tiny import FAMILIES, SIZES, any_family, tiny_causal_lm

pytestmark = pytest.mark.once


def nbytes(arrays):
    return sum(keras.ops.convert_to_numpy(array).nbytes for array in keras.tree.flatten(arrays))


@pytest.mark.parametrize(("dtype", "length"), [("float16", 1), ("float32", 3), ("float32", 50)])
def test_sizes_are_those_of_the_arrays(dtype, length):
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
    assert sizes.places == 3 * 2 * 4  # a segment and a position a row


@pytest.mark.once
def test_appendix_f_of_the_paper():
    """Elements a row, of four bytes here, by block type and length."""

    def sizes(block_type, length):
        backbone = GriffinBackbone(**{**SIZES, "num_layers": 5, "block_types": (block_type,)})
        return memory_sizes(backbone, batch_size=2, length=length)

    rows, layers, bytes_ = 2, 5, 4
    for length in (10, 1000):
        recurrent = sizes("recurrent", length)
        assert recurrent.recurrent_state == rows * layers * bytes_ * 24
        assert recurrent.convolution_state == rows * layers * bytes_ * 3 * 24
        assert recurrent.keys_and_values == 0
        heads, head_dim = 2, 8
        local = sizes("local_attention", length).keys_and_values
        assert local == rows * layers * bytes_ * 2 * heads * head_dim * (
            SIZES["sliding_window"] - 1
        )
        everything = sizes("global_attention", length).keys_and_values
        assert everything == rows * layers * bytes_ * 2 * heads * head_dim * length


@pytest.mark.once
def test_the_order_of_the_papers_models():
    """At 32 thousand tokens the keys and values of the Transformer outgrow the other caches."""
    caches = [
        memory_sizes(GriffinCausalLM.from_preset(name), 16, 32_768).cache
        for name in ("hawk_tiny", "griffin_tiny", "mqa_tiny")
    ]
    assert 100 * caches[0] < caches[2]
    assert 100 * caches[1] < caches[2]


@pytest.mark.once
def test_the_name_of_a_preset_stands_for_its_model():
    for name in ("griffin_tiny", "hgrn2_tiny", "tnl_tiny"):
        model = keras_hub.models.Backbone.from_preset(name)
        assert memory_sizes(name, 2, 100) == memory_sizes(model, 2, 100)


@pytest.mark.once
@pytest.mark.parametrize("dtype", ["bfloat16", "mixed_bfloat16"])
def test_dtype_of_a_preset(dtype, tmp_path):
    """Sizes had the dtype of Keras's policy alone, and the manual's table another one."""
    model = GriffinBackbone.from_preset("griffin_tiny", dtype=dtype)
    GriffinBackbone.from_preset("griffin_tiny").save_to_preset(tmp_path)
    for name in ("griffin_tiny", str(tmp_path)):
        assert memory_sizes(name, 2, 100, dtype=dtype) == memory_sizes(model, 2, 100)
        assert training_sizes(name, dtype=dtype) == training_sizes(model)


@pytest.mark.once
def test_dtypes_that_presets_do_not_have():
    functions = (training_sizes, lambda *a, **k: memory_sizes(*a, 1, 1, **k))
    for function in functions:
        for wrong in ("bf16", "int8_from_bfloat16", "int32", 16, ""):
            with pytest.raises(ValueError, match="`dtype` must be the name of a Keras dtype pol"):
                function("griffin_tiny", dtype=wrong)
        with pytest.raises(ValueError, match=r"`dtype` is only supported.*`GriffinCausalLM`"):
            function(tiny_causal_lm(), dtype="bfloat16")


@pytest.mark.once
def test_a_name_makes_no_weights():
    """These would be 27 gigabytes, now or when Keras next makes what has no values yet."""
    large = memory_sizes("griffin_7b", 1, 1000)
    assert large.parameters == 4 * GriffinBackbone.presets["griffin_7b"]["metadata"]["params"]
    assert not compat.global_state.get_global_attribute("uninitialized_variables")
    with pytest.raises(ValueError, match="Near names: 'hawk_7b'"):
        memory_sizes("hawk_8b", 1, 1)
    with pytest.raises(ValueError, match="`HGRN2VisionBackbone`, which has no state"):
        memory_sizes("hgrn2_vision_tiny", 1, 1)


def layout_map(family, sizes, names=("batch", "model")):
    devices = [f"gpu:{i}" for i in range(math.prod(sizes))]
    mesh = keras.distribution.DeviceMesh(sizes, names, devices)
    return FAMILIES[family].backbone.get_layout_map(mesh)


@pytest.mark.once
@any_family
def test_one_device_has_all(family):
    model = tiny_causal_lm(family=family)
    whole = layout_map(family, (1, 1))
    assert memory_sizes(model, 3, 10, layout_map=whole) == memory_sizes(model, 3, 10)
    assert training_sizes(model, layout_map=whole) == training_sizes(model)


@pytest.mark.once
def test_shares_of_a_device():
    """Of large weights all is split, of 16 rows four, and what a device has of norms is copied."""
    whole = training_sizes("tnl_7b")
    parameters = 4 * 7_193_235_456
    assert whole == (parameters, parameters, 2 * parameters)
    for sizes in ((8, 1), (2, 4), (1, 8)):
        part = training_sizes("tnl_7b", layout_map=layout_map("transnormer", sizes))
        np.testing.assert_allclose(part.total, whole.total / 8, rtol=1e-4)
        assert part.total >= whole.total / 8
    names = ("batch", "sequence", "model")
    rows = layout_map("hgrn2", (1, 4, 2), names)
    part = training_sizes("hgrn2_7b", num_slots=0, layout_map=rows)
    np.testing.assert_allclose(part.total, 2 * 4 * 6_738_677_760 / 8, rtol=1e-3)
    one = memory_sizes("hgrn2_150m", 16, 100)
    many = memory_sizes("hgrn2_150m", 16, 100, layout_map=layout_map("hgrn2", (4, 2)))
    assert (8 * many.recurrent_state, 4 * many.places) == (one.recurrent_state, one.places)
    # Five rows are split over no four devices, heads over two.
    odd = memory_sizes("hgrn2_150m", 5, 100, layout_map=layout_map("hgrn2", (4, 2)))
    assert 2 * odd.recurrent_state == 5 * one.recurrent_state // 16


@pytest.mark.once
def test_shares_that_are_not_to_be_had_are_errors():
    with pytest.raises(ValueError, match=r"`token_embedding/embeddings` of shape \(259, 128\)"):
        training_sizes("hgrn2_tiny", layout_map=layout_map("hgrn2", (1, 4)))
    mesh = layout_map("hgrn2", (1, 1)).device_mesh
    for wrong in (mesh, keras.distribution.LayoutMap(mesh)):
        for function in (training_sizes, lambda *a, **k: memory_sizes(*a, 1, 1, **k)):
            with pytest.raises(
                ValueError, match="`layout_map` must be the result of `get_layout_map`"
            ):
                function("hgrn2_tiny", layout_map=wrong)
    for number in (-1, 1.5):
        with pytest.raises(ValueError, match="`num_slots` must be an integer, at least 0"):
            training_sizes("hgrn2_tiny", num_slots=number)


@pytest.mark.once
def test_sizes_of_nothing_are_errors():
    model = tiny_causal_lm()
    for name in ("batch_size", "length"):
        for number in (0, 1.5, "1"):
            with pytest.raises(ValueError, match=f"`{name}` must be an integer, at least 1"):
                memory_sizes(model, **{"batch_size": 1, "length": 1, name: number})
    with pytest.raises(ValueError, match="`Sequential`, which has no state"):
        memory_sizes(keras.Sequential(), batch_size=1, length=1)


# De et al. 2024, appendix F: by memory alone, as long as the batch is small.
@pytest.mark.parametrize("batch", [1, 64])
def test_decoding_is_bound_by_memory(batch):
    model = tiny_causal_lm()
    rates = {"bytes_per_second": 1e9, "flops_per_second": 1e15}
    sizes = memory_sizes(model, batch, 40)
    weights, cache = decoding_time(model, batch, 40, **rates)
    np.testing.assert_allclose(weights, sizes.parameters / 1e9)
    np.testing.assert_allclose(cache, sizes.cache / 1e9)


def test_decoding_is_bound_by_arithmetic():
    model = tiny_causal_lm(num_layers=1)
    rates = {"bytes_per_second": 1e15, "flops_per_second": 1e9}
    weights, cache = decoding_time(model, 10, 40, **rates)
    np.testing.assert_allclose(weights, 2 * 10 * model.count_params() / 1e9)
    blocks = model.backbone.get_initial_state(1, 40)["blocks"]
    state = sum(math.prod(array.shape) for array in keras.tree.flatten(blocks))
    np.testing.assert_allclose(cache, 2 * 10 * state / 1e9)


def test_each_head_of_queries_reads_its_keys():
    sizes = {"block_types": ("local_attention",), "num_layers": 1, "num_query_heads": 4}
    rates = {"bytes_per_second": 1e15, "flops_per_second": 1e9}
    backbone = GriffinBackbone(**{**SIZES, **sizes, "num_key_value_heads": 2, "head_dim": 8})
    keys_and_values = 2 * 2 * 8 * (SIZES["sliding_window"] - 1)
    _, cache = decoding_time(backbone, 3, 1000, **rates)
    np.testing.assert_allclose(cache, 2 * 3 * (4 // 2) * keys_and_values / 1e9)


def test_embeddings_of_their_own_are_not_read():
    model = tiny_causal_lm(family="hgrn2")
    rates = {"bytes_per_second": 1.0, "flops_per_second": 1e30}
    unread = model.backbone.token_embedding.embeddings
    found, _ = decoding_time(model, 1, 1, **rates)
    assert found == memory_sizes(model, 1, 1).parameters - 4 * unread.shape[0] * unread.shape[1]
