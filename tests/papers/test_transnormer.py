"""Guide of TransNormerLLM's ablations: a run at tiny sizes, and each variant."""

import keras
import numpy as np
import pytest

from keras_recurrent.models import TransNormerBackbone, TransNormerCausalLM

pytestmark = pytest.mark.once


def test_lightning_ablations_guide_trains_every_variant(guide, run_twice):
    ablations = guide("lightning_ablations")
    lines, printed = run_twice(
        "lightning_ablations",
        "--width 8 --num-heads 2 --num-layers 2 --length 8 --tokens 16 --steps 2 --windows 4 "
        "--variants 'no gate' LayerNorm",
    )
    assert len(lines) == 3  # one is of the released model
    assert "| worse: 2.263, not 2.248 |" in printed
    assert "| LayerNorm |" in printed
    assert ablations.judge(np.array([0.1, 0.11])) == "worse"
    assert ablations.judge(np.array([-0.1, -0.11])) == "better"
    assert ablations.judge(np.array([0.1, -0.05])) == "within 2 deviations"


def test_lightning_ablations_variant_changes_its_part_only(guide):
    ablations = guide("lightning_ablations")
    size = ablations.Size(8, 2, 3, 8, 16, 1, 4, 1e-3)
    released = TransNormerCausalLM(
        TransNormerBackbone(
            vocabulary_size=256,
            num_layers=3,
            hidden_dim=8,
            intermediate_dim=22,
            num_heads=2,
            head_dim=4,
        )
    )
    rows = np.arange(10).reshape(2, 5)
    logits = {}
    for name, variant in ablations.VARIANTS.items():
        model = ablations.build(variant, size, seed=0)
        blocks = model.backbone.transformer_layers
        assert [block.temporal_block.use_lrpe for block in blocks] == {
            "first": [True, False, False],
            "all": [True] * 3,
            "none": [False] * 3,
        }[variant.lrpe]
        logits[name] = model({"token_ids": rows, "padding_mask": np.ones_like(rows)})
        logits[name] = keras.ops.convert_to_numpy(logits[name])
        if name == ablations.RELEASED:
            # The released variant is the network of the package.
            released.set_weights(model.get_weights())
            same = released({"token_ids": rows, "padding_mask": np.ones_like(rows)})
            same = keras.ops.convert_to_numpy(same)
            np.testing.assert_allclose(logits[name], same, rtol=1e-5, atol=1e-6)
        elif name == "RMSNorm":  # its weights begin at 1
            np.testing.assert_array_equal(logits[name], logits[ablations.RELEASED])
        else:
            assert np.abs(logits[name] - logits[ablations.RELEASED]).max() > 1e-3, name
    maps = 3 * 8 * 8  # of the gates
    weights = {n: ablations.build(v, size, 0).count_params() for n, v in ablations.VARIANTS.items()}
    assert weights["no gate"] == weights[ablations.RELEASED] - maps
    assert weights["no decay"] == weights[ablations.RELEASED]
    assert weights["RMSNorm"] == weights[ablations.RELEASED] + 8 * (3 * 3 + 1)
