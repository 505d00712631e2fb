"""Layers and networks that guides of papers define."""

import types

import keras
import numpy as np
import pytest

from keras_recurrent.models import TransNormerBackbone, TransNormerCausalLM

pytestmark = pytest.mark.once


def test_state_hgrn_equals_a_loop_over_time(guide):
    """A form differs from a loop in NumPy, or a sequence in two parts from the whole."""
    state_size = guide("state_size")
    x = np.random.default_rng(0).normal(size=(2, 6, 4)).astype("float32")
    bound = np.log(np.array([[0.3] * 4, [0.7] * 4], "float32"))
    for form, (multiple, is_complex) in state_size.FORMS.items():
        keras.utils.set_random_seed(0)
        layer = state_size.StateHGRN(form, return_state=True)
        found, state = layer(x, lower_bound=bound)
        maps = {w.path.split("/")[-2]: keras.ops.convert_to_numpy(w) for w in layer.weights}
        f, i, o = (x @ maps[name] for name in ("f_proj", "i_proj", "o_proj"))
        f = 0.3 + 0.7 / (1 + np.exp(-f))
        c, o = i / (1 + np.exp(-i)), 1 / (1 + np.exp(-o))
        turn = np.ones(4 * multiple)
        if is_complex:
            c = c[..., :4] + 1j * c[..., 4:]
            turn = np.exp(1j * 10_000.0 ** (-np.arange(4) / 4))
        h, outputs = 0, []
        for t in range(6):
            h = f[:, t] * turn * h + (1 - f[:, t]) * c[:, t]
            real = np.concatenate([h.real, h.imag], axis=-1) if is_complex else h
            y = real * o[:, t]
            y = y / np.sqrt(np.mean(y**2, axis=-1, keepdims=True) + layer.norm.epsilon)
            outputs.append(y @ maps["projection"])
        found = keras.ops.convert_to_numpy(found)
        np.testing.assert_allclose(found, np.stack(outputs, 1), rtol=1e-3, atol=1e-5)
        assert tuple(state["hidden"].shape) == (2, 4 * multiple)
        _, left = layer(x[:, :3], lower_bound=bound)
        right, _ = layer(x[:, 3:], lower_bound=bound, initial_state=left)
        right = keras.ops.convert_to_numpy(right)
        np.testing.assert_allclose(right, found[:, 3:], rtol=1e-3, atol=1e-5)


def test_lightning_ablations_variant_changes_its_part_only(guide):
    ablations = guide("lightning_ablations")
    size = types.SimpleNamespace(width=8, num_heads=2, num_layers=3)
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
    logits, weights = {}, {}
    for name, variant in ablations.VARIANTS.items():
        model = ablations.build(variant, size, seed=0)
        weights[name], blocks = model.count_params(), model.backbone.transformer_layers
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
    assert weights["no gate"] == weights[ablations.RELEASED] - maps
    assert weights["no decay"] == weights[ablations.RELEASED]
    assert weights["RMSNorm"] == weights[ablations.RELEASED] + 8 * (3 * 3 + 1)
