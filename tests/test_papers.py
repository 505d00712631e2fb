"""The guides below guides/papers run, at toy size, and count as by hand."""

import functools
import importlib
import pathlib
import re
import sys

import keras
import numpy as np
import pytest

from keras_recurrent.models import (
    GriffinBackbone,
    GriffinCausalLM,
    TransNormerBackbone,
    TransNormerCausalLM,
    memory_sizes,
)

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


@pytest.mark.once
def test_throughput(guide, tmp_path, monkeypatch, capsys):
    throughput = guide("throughput")
    monkeypatch.setattr(throughput, "compute", functools.cache(throughput.compute))
    monkeypatch.setattr(throughput, "LENGTHS", [512, 1024, 2048, 4096])
    monkeypatch.setattr(throughput, "build", functools.partial(throughput.build, num_layers=1))
    toy = ("--tokens", 8, "--latency-tokens", 4, "--prompts", 0, "--latency-rows", 8)
    toy = (*toy, "--window", 4, "--memory", 12 * 10**5, "--seeds", 0, "--output", tmp_path)
    call(throughput, monkeypatch, *toy)
    file = tmp_path / "throughput.jsonl"
    *first, last = file.read_text().splitlines(keepends=True)
    assert len(first) == 5
    assert '"model": "mqa"' in last
    # A later sitting measures what is missing.
    file.write_text("".join(first))
    call(throughput, monkeypatch, *toy)
    lines = file.read_text().splitlines(keepends=True)
    assert lines[:-1] == first
    assert '"model": "mqa"' in lines[-1]
    written = capsys.readouterr().out
    assert "| Griffin, 4,096 tokens | 4,096 | 38,346 | 1.81 |" in written
    for name in ("Hawk", "Griffin", "MQA"):
        assert f"| {name}, 8 tokens |" in written
    assert "8 tokens: Hawk above Griffin by 2 deviations: " in written
    assert (tmp_path / "throughput.png").stat().st_size > 0
    with pytest.raises(SystemExit, match="are more than a memory of 1,000 bytes"):
        call(throughput, monkeypatch, "--memory", 1000, "--output", tmp_path / "none")


OUT_OF_MEMORY = MemoryError("CUDA out of memory")


@pytest.mark.once
def test_rows_are_doubled_until_memory_or_time_ends(monkeypatch):
    decoding = importlib.import_module("benchmarks.decoding")
    monkeypatch.setattr(decoding, "warm_up", lambda model, rows, tokens: None)

    def take(rows_that_fit, milliseconds_a_row, error=OUT_OF_MEMORY):
        def seconds(model, rows, tokens):
            if rows > rows_that_fit:
                raise error
            return milliseconds_a_row * rows / 1000

        monkeypatch.setattr(decoding, "seconds_a_token", seconds)
        return decoding.doubled(None, tokens=100, first=4, longest=10)

    assert take(20, 1) == ([(4, 0.004), (8, 0.008), (16, 0.016)], "memory")
    assert take(1000, 1)[0][-1] == (64, 0.064)
    assert take(1000, 1)[1] == "time"
    with pytest.raises(SystemExit, match="4 rows of 100 tokens do not fit"):
        take(3, 1)
    with pytest.raises(ZeroDivisionError):
        take(4, 1, ZeroDivisionError())


@pytest.mark.once
def test_as_many_rows_as_memory_holds():
    decoding = importlib.import_module("benchmarks.decoding")
    sizes = memory_sizes("mqa_tiny", 1, 256)  # the room of 100 tokens
    for rows, found in ((1, 1), (2, 2), (3.99, 2), (4, 4)):
        memory = sizes.parameters + rows * sizes.cache
        assert decoding.largest_batch("mqa_tiny", 100, memory) == found


@pytest.mark.once
def test_grouped_queries(guide, tmp_path, monkeypatch, capsys):
    grouped_queries = guide("grouped_queries")
    toy = ("--width", 16, "--head-dim", 2, "--length", 8, "--steps", 8, "--rows", 8)
    toy = (*toy, "--heads", 4, "--timed-width", 16, "--timed-length", 16, "--repeats", 1)
    toy = (*toy, "--groups", 2, "--output", tmp_path, "--seeds", 0)
    call(grouped_queries, monkeypatch, *toy)
    file = tmp_path / "grouped_queries.jsonl"
    lines = file.read_text()
    assert len(lines.splitlines()) == 3 + 4  # times by groups, and all that is trained
    # A later sitting finds everything there.
    call(grouped_queries, monkeypatch, *toy)
    assert file.read_text() == lines
    written = capsys.readouterr().out
    for name in ("2 groups, mean", "2 groups, first", "2 groups, random", "8 groups, all heads"):
        assert f"| {name} |" in written
    assert re.search(r"\| 4 groups \| [\d.]+ ± 0.000 \| [\d.]+ \| 0.00 \|", written)
    assert (tmp_path / "grouped_queries.png").stat().st_size > 0


@pytest.mark.once
def test_verdicts_on_times_by_groups(guide):
    judge_times = guide("grouped_queries").judge_times
    found = {1: [1.0], 8: [1.2], 64: [3.0]}
    assert [line.split(": ")[1] for line in judge_times(found, 64)] == ["yes"] * 3
    found = {1: [1.0], 8: [2.0], 64: [1.9]}
    assert [line.split(": ")[1] for line in judge_times(found, 64)] == ["NO"] * 3


@pytest.mark.once
def test_lightning_ablations(guide, tmp_path, monkeypatch, capsys):
    ablations = guide("lightning_ablations")
    toy = ("--width", 8, "--num-heads", 2, "--num-layers", 2, "--length", 8, "--tokens", 16)
    toy = (*toy, "--steps", 2, "--windows", 4, "--output", tmp_path)
    call(ablations, monkeypatch, *toy, "--seeds", 0, 1, "--variants", "no gate")
    first = (tmp_path / "lightning_ablations.jsonl").read_text()
    assert len(first.splitlines()) == 4
    call(ablations, monkeypatch, *toy, "--seeds", 0, 1, "--variants", "no gate", "LayerNorm")
    lines = (tmp_path / "lightning_ablations.jsonl").read_text()
    assert lines.startswith(first)
    assert len(lines.splitlines()) == 6
    written = capsys.readouterr().out
    assert "| worse: 2.263, not 2.248 |" in written
    assert "| LayerNorm |" in written
    assert (tmp_path / "lightning_ablations.png").stat().st_size > 0
    assert ablations.judge(np.array([0.1, 0.11])) == "worse"
    assert ablations.judge(np.array([-0.1, -0.11])) == "better"
    assert ablations.judge(np.array([0.1, -0.05])) == "within 2 deviations"


@pytest.mark.once
def test_variants_of_transnormer_differ_where_they_say(guide):
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
            # The same network as the package's, with its weights.
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


@pytest.mark.once
def test_training_speed(guide, tmp_path, monkeypatch, capsys):
    speed = guide("training_speed")
    toy = ("--lengths", 8, 16, "--tokens", 16, "--window", 4, "--output", tmp_path)
    call(speed, monkeypatch, *toy, "--seeds", 0)
    file = tmp_path / "training_speed.jsonl"
    lines = file.read_text()
    assert len(lines.splitlines()) == len(speed.MODELS) * 2
    # A later sitting finds everything there.
    call(speed, monkeypatch, *toy, "--seeds", 0)
    assert file.read_text() == lines
    written = capsys.readouterr().out
    assert re.search(r"\| TNL \| 1.00 ± 0.00 \| [\d.]+ ± 0.00 \| \w+: within 10 % to 16; ", written)
    assert (tmp_path / "training_speed.png").stat().st_size > 0
    with pytest.raises(SystemExit):
        call(speed, monkeypatch, "--lengths", 8, 12, "--tokens", 16)


@pytest.mark.once
def test_verdicts_on_training_speed(guide):
    judge, lengths = guide("training_speed").judge, (8, 16, 32, 64)

    def found(*ratios):
        return {n: np.array([ratio]) for n, ratio in zip(lengths, ratios, strict=False)}

    assert judge("Griffin", found(1, 1.02, 1.04, 1.07), lengths) == (
        "yes: within 5 % to 32; yes: within 8 % to 64"
    )
    assert judge("Griffin", found(1, 1.06, 1.04, 1.09), lengths) == (
        "NO: within 5 % to 32; NO: within 8 % to 64"
    )
    assert judge("MQA", found(1, 1.1, 1.3), lengths) == "rises: yes"
    assert judge("MQA", found(1, 1.1, 1.05), lengths) == "rises: NO"


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
