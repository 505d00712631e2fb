"""The guides below guides/papers run, at toy size, and count as by hand."""

import functools
import importlib
import pathlib
import sys

import keras
import numpy as np
import pytest

from keras_recurrent.models import GriffinBackbone, GriffinCausalLM

PAPERS = pathlib.Path(__file__).parents[1] / "guides/papers"
TOY = {
    "--width": [16],
    "--lru-width": [16],
    "--num-layers": [3],
    "--lengths": [8, 16],
    "--tokens": [32],
    "--steps": [3],
    "--longest": [64],
    "--windows": [16],
}


@pytest.fixture
def guide(monkeypatch):
    """A function that imports a guide by its name."""
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(PAPERS)

    def load(name):
        return importlib.import_module(name)

    return load


def call(guide, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [guide.__name__, *map(str, arguments)])
    guide.main()


@pytest.mark.once
def test_gates(guide, tmp_path, monkeypatch, capsys):
    gates = guide("gates")
    call(gates, monkeypatch, "--output", tmp_path)
    written = capsys.readouterr().out
    assert "Measured gates and closed forms agree to 1e-06" in written
    assert (tmp_path / "gates.png").stat().st_size > 0
    lines = guide("runs").Results(tmp_path / "gates.jsonl").lines
    assert [line["decay"] for line in lines] == [0.5, 0.9, 0.99]
    # A gate that is measured wrongly is told.
    monkeypatch.setitem(gates.MEASURED, "Mamba", lambda a, r: (1 - r, r))
    (tmp_path / "gates.jsonl").unlink()
    call(gates, monkeypatch, "--output", tmp_path)
    assert "DO NOT AGREE" in capsys.readouterr().out


@pytest.mark.once
def test_extrapolation(guide, tmp_path, monkeypatch, capsys):
    extrapolation = guide("extrapolation")
    text = tmp_path / "text"
    text.write_bytes(bytes(range(32, 127)) * 20)
    toy = [word for name, values in TOY.items() for word in (name, *values)]
    arguments = (*toy, "--text", text, "--output", tmp_path, "--seeds", 0)
    call(extrapolation, monkeypatch, *arguments, "--lengths", 8)
    first = (tmp_path / "extrapolation.jsonl").read_text()
    capsys.readouterr()
    # A later sitting runs what is missing.
    call(extrapolation, monkeypatch, *arguments)
    lines = (tmp_path / "extrapolation.jsonl").read_text()
    assert lines.startswith(first)
    assert len(first.splitlines()) == 4
    assert len(lines.splitlines()) == 8
    written = capsys.readouterr().out
    for name in extrapolation.MODELS:
        assert f"| {name} |" in written
    assert "4 L less L" in written
    assert (tmp_path / "extrapolation.png").stat().st_size > 0


@pytest.mark.once
def test_verdicts_are_what_the_claims_say(guide):
    judge = guide("extrapolation").judge
    rope = np.array([1.0, 1.1, 0.9])
    assert judge("Hawk", np.array([-0.1, 0.0, 0.1]), rope) == (
        "yes: at most 0; beyond 2 deviations of RoPE"
    )
    assert judge("Hawk", np.array([0.1, 0.0, 0.1]), rope).startswith("NO: at most 0")
    assert judge("Griffin", np.array([0.0, 0.01, 0.01]), rope).startswith("yes: at most .01")
    assert judge("Griffin", np.array([0.0, 0.8, -0.8]), rope).endswith(
        "NOT beyond 2 deviations of RoPE"
    )
    assert judge("MQA RoPE", rope, rope) == "yes: at least .3"
    assert judge("MQA RoPE", rope / 5, rope) == "NO: at least .3"
    assert judge("MQA NoPE", rope, rope) == "told"


@pytest.mark.once
def test_text_windows_errors_and_tables(guide, tmp_path):
    runs = guide("runs")
    file = tmp_path / "text"
    file.write_bytes(bytes(range(100)))
    training, held_out = runs.read_text(file, held_out=0.2)
    np.testing.assert_array_equal(held_out, np.arange(80, 100))
    assert len(training) == 80
    windows = runs.spread(held_out, 3, 6, 12)
    np.testing.assert_array_equal(windows[:, [0, 11]], [[80, 91], [86, 97], [92, 85]])
    for first in (0, 3, 6):  # all of 80 to 97, at any six places
        np.testing.assert_array_equal(np.sort(windows[:, first : first + 6], None), range(80, 98))
    for sizes in ((4, 6, 12), (2, 6, 13), (1, 1, 21)):
        with pytest.raises(SystemExit, match="take a longer --text"):
            runs.spread(held_out, *sizes)
    training, held_out = runs.read_text()
    assert len(held_out) / (len(training) + len(held_out)) == pytest.approx(0.15, abs=1e-4)
    assert runs.with_error([1.0, 2.0, 3.0], 2) == "2.00 ± 1.00"
    assert runs.with_error([1.0], 1) == "1.0 ± 0.0"
    assert runs.table(("a", "b"), [(1, 2)]) == "| a | b |\n| --- | ---: |\n| 1 | 2 |"
    results = runs.Results(tmp_path / "folder" / "results.jsonl")
    results.append(seed=3, model="a")
    results = runs.Results(results.path)
    assert results.missing([2, 3], model="a") == [2]
    assert results.missing([3], model="b") == [3]


def tiny(seed):
    keras.utils.set_random_seed(seed)
    return GriffinCausalLM(
        GriffinBackbone(
            vocabulary_size=7,
            num_layers=1,
            hidden_dim=8,
            intermediate_dim=8,
            lru_width=8,
            num_blocks=2,
        )
    )


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="a program of JAX")
def test_models_side_by_side_learn_as_by_keras(guide):
    """In one program or in turns, each on its own rows, as Keras's own training step has it."""
    runs = guide("runs")
    rows = np.random.default_rng(0).integers(0, 7, (2, 2, 2, 6))  # steps, models, rows, tokens
    ways = {
        "by Keras": runs._by_keras,
        "in turns": functools.partial(runs._in_one_program, side_by_side=False),
        "side by side": functools.partial(runs._in_one_program, side_by_side=True),
    }
    found = {}
    for name, start in ways.items():
        models = [tiny(0), tiny(1)]
        optimizers = [keras.optimizers.Adam(0.01, global_clipnorm=1.0) for _ in models]
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.build(model.trainable_variables)
        step, finish = start(models, optimizers)
        first, _ = (np.array(step(part[..., :-1], part[..., 1:])) for part in rows)
        finish()
        found[name] = [first, *(w for model in models for w in model.get_weights())]
    for name in ("in turns", "side by side"):
        for one, other in zip(found["by Keras"], found[name], strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5, err_msg=name)
