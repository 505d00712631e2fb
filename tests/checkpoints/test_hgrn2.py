"""Variants of HGRN2 in checkpoints, which the golden files do not have."""

import numpy as np
import pytest

from keras_recurrent.models import HGRN2Backbone
from tests.checkpoints import golden
from tests.models.tiny import HYBRID, tiny_backbone, weights_of

pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    "variant",
    [
        {"conv_size": 3, "tie_word_embeddings": True},
        {"num_layers": 1},
        {"num_layers": 1, "use_lower_bounds": False},
        HYBRID,
        {**HYBRID, "attention_layers": (1, 2), "num_key_value_heads": None},
    ],
    ids=["short convolutions, tied", "one block", "no lower bounds", "hybrid", "unused bounds"],
)
def test_export_of_each_variant_loads_with_the_same_config_and_weights(variant, tmp_path):
    """A filter is saved as that of another projection, or its taps are reversed."""
    backbone = tiny_backbone(family="hgrn2", **variant)
    backbone.export_to_transformers(tmp_path)
    tensors = golden.read_tensors(tmp_path)
    assert ("lm_head.weight" in tensors) != backbone.tie_word_embeddings
    assert ("model.lower_bounds" in tensors) == backbone.use_lower_bounds
    for name in "qfi" if backbone.conv_size else ():
        filters = tensors[f"model.layers.1.attn.{name}_conv1d.weight"]  # [channels, 1, taps]
        kernel = weights_of(backbone)[f"block_1/temporal_block/{name}_conv1d/kernel"]
        np.testing.assert_array_equal(filters[:, 0].T, kernel)
    reloaded = HGRN2Backbone.from_preset(str(tmp_path))
    assert reloaded.get_config() | {"name": ""} == backbone.get_config() | {"name": ""}
    golden.assert_equal_weights(reloaded, backbone)
