"""Guides of HGRN2's figures 2 and 3 and table 1: runs at tiny sizes, counts and layers."""

import keras
import numpy as np
import pytest

pytestmark = pytest.mark.once


def test_associative_recall_guide_trains_each_task_and_model(run_twice):
    lines, printed = run_twice(
        "associative_recall",
        "--lengths 8 16 --pairs 2 3 --vocabulary 16 --widths 8 --expansions 4 16 "
        "--rates 0.01 0.02 --rows 4 --test-rows 8 --steps 2 --every 1",
    )
    # There is a line for each task and model; expansions that do not divide the width are left out.
    assert [(line["pairs"], line["model"], line["expansion"]) for line in lines] == [
        (pairs, *model)
        for pairs in (2, 3)
        for model in (("HGRN", 1), ("HGRN2", 4))
        for _ in ("0.01", "0.02")
    ]
    assert {line["state_numbers"] for line in lines} == {16, 64}
    assert "| 3 pairs in 16 tokens, width 8 |" in printed


def test_state_size_guide_compares_models_of_equal_size(guide, run_twice, tmp_path):
    state_size = guide("state_size")
    text = tmp_path / "text"
    text.write_bytes(bytes(range(32, 127)) * 8)
    sizes = "--width 12 --num-layers 2 --ratios 1 4 5 --length 8 --tokens 16 --steps 2 --windows 8"
    lines, printed = run_twice("state_size", f"--text {text} {sizes}")
    # A ratio that does not divide the width is left out.
    assert [line["setting"] for line in lines] == [1, 4, *state_size.FORMS]
    parameters = [line["parameters"] for line in lines]
    assert max(parameters) < 1.02 * min(parameters)
    assert "below 1 by more than 2 deviations" in printed
    assert "| HGRN | complex, 2 d |" in printed
    assert state_size.better(np.array([1.0, 1.1]), np.array([1.5, 1.6])) == "yes"
    assert state_size.better(np.array([1.0, 1.1]), np.array([1.1, 1.2])) == "NO"
    assert state_size.better(np.array([1.0]), np.array([1.5])) == "NO"  # one seed has no deviation


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


@pytest.mark.parametrize("ratio", [1, 2])
def test_scanned_hgrn2_of_the_guide_matches_the_layer(guide, ratio):
    """The guide's experiment measures another layer than `HGRN2`."""
    state_size = guide("state_size")
    x = np.random.default_rng(0).normal(size=(2, 6, 4)).astype("float32")
    bound = np.log(np.array([[0.3] * 4, [0.7] * 4], "float32"))
    keras.utils.set_random_seed(0)
    layer, scanned = (
        kind(expand_ratio=ratio, return_state=True)
        for kind in (state_size.HGRN2, state_size.ScannedHGRN2)
    )
    expected, state = layer(x, lower_bound=bound)
    scanned.build(x.shape)
    scanned.set_weights(layer.get_weights())
    found, memory = scanned(x, lower_bound=bound)
    np.testing.assert_allclose(*map(keras.ops.convert_to_numpy, (found, expected)), atol=1e-5)
    pair = memory["memory"], state["memory"]
    np.testing.assert_allclose(*map(keras.ops.convert_to_numpy, pair), atol=1e-5)
    _, left = scanned(x[:, :3], lower_bound=bound)
    right, _ = scanned(x[:, 3:], lower_bound=bound, initial_state=left)
    right, found = map(keras.ops.convert_to_numpy, (right, found))
    np.testing.assert_allclose(right, found[:, 3:], atol=1e-5)
