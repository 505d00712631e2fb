"""GPTQ and AWQ calibrate on the activations of a forward pass."""

import keras
import numpy as np
import pytest

from tests.models.tiny import any_family, tiny_causal_lm

TOKEN_IDS = np.arange(12)[None]


def activations(model):
    """Returns the input of the first block and the outputs of all blocks."""
    seen = []
    model.score(TOKEN_IDS, layer_intercept_fn=lambda x, i: seen.append(x) or x)
    return [keras.ops.convert_to_numpy(x) for x in seen]


@pytest.mark.once
@any_family
@pytest.mark.parametrize("mode", ["gptq", "awq"])
def test_quantization_structure_gives_each_block_its_activations(family, mode):
    kwargs = {"embedding_scale": 4.0} if family == "griffin" else {}
    model = tiny_causal_lm(family=family, **kwargs)
    structure = model.get_quantization_layer_structure(mode)
    (embed,), blocks = structure["pre_block_layers"], structure["sequential_blocks"]
    found = [embed(TOKEN_IDS)]
    for block in blocks:
        found.append(block(found[-1]))
    for x, expected in zip(found, activations(model), strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(x), expected)
    assert model.get_quantization_layer_structure("int8") is None


@pytest.mark.once
@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method:UserWarning")
def test_awq_of_keras_calibrates_on_the_activations_of_the_last_block(monkeypatch):
    model = tiny_causal_lm(family="hgrn2", vocabulary_size=12)
    block, seen = model.backbone.transformer_layers[-1], []
    norm = block.channel_norm

    def call(x):
        seen.append(keras.ops.convert_to_numpy(x))
        return type(norm).call(norm, x)

    monkeypatch.setattr(norm, "call", call)
    model.score(TOKEN_IDS)
    config = keras.quantizers.AWQConfig(
        dataset=[TOKEN_IDS[0]],
        tokenizer=keras.layers.Identity(),  # the dataset holds token ids
        num_samples=1,
        sequence_length=TOKEN_IDS.size,
        num_grid_points=1,
    )
    model.quantize("awq", config=config, filters=lambda layer: layer is block.mlp.down_proj)
    assert block.mlp.down_proj.quantization_mode == "awq"
    expected, found = seen
    np.testing.assert_array_equal(found, expected)
