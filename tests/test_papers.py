"""The guides below guides/papers run, at toy size, and count as by hand."""

import functools
import importlib
import json
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


def run_anew(guide, module, monkeypatch, capsys, folder, toy):
    """Runs a guide at toy size, then what is missing after its last line is lost.

    Returns the lines of results, and what the second run wrote.
    """
    words = [word for name, values in toy.items() for word in (name, *values)]
    words += ["--output", folder, "--seeds", 0]
    call(module, monkeypatch, *words)
    path = folder / f"{module.__name__}.jsonl"
    *kept, lost = path.read_text().splitlines()
    path.write_text("\n".join([*kept, ""]))
    capsys.readouterr()
    call(module, monkeypatch, *words)
    assert path.read_text().splitlines()[:-1] == kept
    assert (folder / f"{module.__name__}.png").stat().st_size > 0
    lines = guide("runs").Results(path).lines
    assert lines[-1].keys() == json.loads(lost).keys()
    return lines, capsys.readouterr().out


@pytest.mark.once
def test_synthetic_tasks(guide, tmp_path, monkeypatch, capsys):
    synthetic = guide("synthetic_tasks")
    toy = {
        **{"--width": [16], "--num-layers": [2], "--rows": [4], "--test-rows": [8]},
        **{"--copying-length": [8], "--copying-data": [2], "--copying-window": [4]},
        **{"--induction-length": [8], "--induction-window": [4], "--longest": [32]},
        **{"--copying-steps": [2], "--induction-steps": [2], "--every": [1], "--warmup": [1]},
    }
    lines, written = run_anew(guide, synthetic, monkeypatch, capsys, tmp_path, toy)
    assert [line["model"] for line in lines] == [*synthetic.MODELS] * 2
    assert all(list(line["right_after"]) == ["1", "2"] for line in lines)
    assert all(list(line["right_at"]) == ["4", "8", "16", "32"] for line in lines[3:])
    assert written.count("| Griffin |") == 2
    assert "NO: at least 99 % right" in written


@pytest.mark.once
def test_tasks_count_and_end_as_by_hand(guide):
    synthetic, tasks = guide("synthetic_tasks"), guide("tasks")
    predicted = np.array([[1, 2, 3], [4, 5, 6]])
    labels = np.array([[1, 0, 3], [0, 5, 0]])
    weights = np.array([[1.0, 0, 1], [0, 1, 1]])
    assert tasks.right(predicted, labels, weights) == 0.75
    assert synthetic.steps_to({"2": 0.5, "4": 0.9, "6": 0.8}, 0.9) == 4
    assert synthetic.steps_to({"2": 0.5}, 0.9) is None
    # A curve that was ended goes on as it was.
    curves = synthetic.curves_of([{"right_after": {"2": 0.5, "4": 1.0}}], (2, 4, 6))
    assert curves.tolist() == [[0.5, 1.0, 1.0]]
    compare = synthetic.compare_speed
    slower, near = ": slower than MQA by more than 2 deviations", ": within 2 deviations of MQA"
    assert compare("Hawk", [200, 220], [100, 110], 500) == (
        *("210 ± 14", "2.00 ± 0.00"),
        "yes" + slower,
    )
    assert compare("Hawk", [100, 120], [100, 110], 500)[2] == "NO" + slower
    assert compare("Griffin", [120, 130], [100, 110], 500)[2].startswith("yes" + near)
    assert compare("Griffin", [50, 60], [100, 110], 500)[2].startswith("yes" + near)
    assert compare("Griffin", [200, 220], [100, 110], 500)[2].startswith("NO" + near)
    # A seed that was not there by the last step counts as that, and for nobody's good.
    steps = "375 ± 177 at least: 1 of 2 not within 500"
    assert compare("Hawk", [250, None], [100, 100], 500) == (steps, "≥ 3.75 ± 1.77", "NO" + slower)
    assert compare("Hawk", [490, None], [100, 100], 500)[2] == "yes" + slower
    assert compare("Hawk", [490, None], [100, None], 500)[1:] == ("-", "NO" + slower)
    assert compare("Griffin", [300, None], [500, 500], 500)[2].startswith("NO" + near)
    assert compare("Griffin", [250, 250], [500, None], 500)[1:] == (
        "≤ 0.50 ± 0.00",
        f"yes{near}, or a quarter, or faster",
    )
    assert synthetic.judge_reading_on("MQA", [1.0, 0.99], [0.4, 0.6]) == (
        "yes: at least 99 % right; yes: at most 50 % of the longest"
    )
    assert synthetic.judge_reading_on("Hawk", [1.0, 0.9], [0.9, 0.9]) == (
        "NO: at least 99 % right; NO: at least 95 % of the longest"
    )


@pytest.mark.once
def test_associative_recall(guide, tmp_path, monkeypatch, capsys):
    recall = guide("associative_recall")
    toy = {
        **{"--lengths": [8, 16], "--pairs": [2, 3], "--vocabulary": [16], "--widths": [8]},
        **{"--expansions": [4, 16], "--rates": [0.01], "--rows": [4], "--test-rows": [8]},
        **{"--steps": [2], "--every": [1]},
    }
    lines, written = run_anew(guide, recall, monkeypatch, capsys, tmp_path, toy)
    # A line a task and model; an expansion that does not divide the width is left out.
    assert [(line["pairs"], line["model"], line["expansion"]) for line in lines] == [
        (pairs, *model) for pairs in (2, 3) for model in (("HGRN", 1), ("HGRN2", 4))
    ]
    assert {line["state_numbers"] for line in lines} == {16, 64}
    assert "| 3 pairs in 16 tokens, width 8 |" in written


@pytest.mark.once
def test_the_best_setting_of_recall_counts(guide, tmp_path):
    recall = guide("associative_recall")
    size = recall.Size((8,), (2,), 16, (8,), (4,), (0.1, 0.2), 4, 8, 4, 2, 1.0)
    results = guide("runs").Results(tmp_path / "lines")
    for key in recall.settings(size):
        for seed, share in ((0, 0.5), (1, 0.6)):
            share += key["rate"] if key["model"] == "HGRN2" else -key["rate"]
            results.append(**key, seed=seed, right_after={"2": 0.0, "4": share})
    for name, rate in (("HGRN", 0.1), ("HGRN2", 0.2)):
        lines = recall.best(results, size, name, length=8, width=8)
        assert [line["rate"] for line in lines] == [rate, rate]
    assert recall.judge(np.array([0.4, 0.5]), np.array([0.7, 0.8])).startswith("yes: HGRN2 above")
    assert recall.judge(np.array([0.4, 0.5]), np.array([0.5, 0.6])).startswith("NO")
    assert recall.judge(np.array([0.99, 1.0]), np.array([1.0, 1.0])) == "yes: both at least 99 %"


@pytest.mark.once
def test_phone_book(guide, tmp_path, monkeypatch, capsys):
    book = guide("phone_book")
    toy = {
        **{"--width": [16], "--num-layers": [2], "--window": [12], "--queries": [1]},
        **{"--names": [2, 6], "--tokens": [32], "--test-rows": [8]},
        **{"--steps": [2], "--every": [1], "--warmup": [1]},
        **{"--name-length": [1], "--number-length": [2]},
    }
    lines, written = run_anew(guide, book, monkeypatch, capsys, tmp_path, toy)
    assert [line["tokens_of_a_row"] for line in lines] == [12] * 3 + [28] * 3
    assert "| 2 names, 0.666667 windows | 6 names, 2 windows |" in written
    assert "NO: at least 95 % inside its window; NO: 30 points less of 6 names" in written


@pytest.mark.once
def test_numbers_of_phone_books_count_as_by_hand(guide):
    book = guide("phone_book")
    labels = np.array([[0, 1, 2, 0, 3, 4], [0, 5, 6, 0, 7, 8]])
    predicted = np.array([[9, 1, 2, 9, 3, 9], [9, 5, 6, 9, 9, 8]])
    assert book.whole_numbers(2)(predicted, labels, (labels > 0).astype("float32")) == 0.5
    size = book.MINIATURE
    good, bad = {n: [1.0] for n in size.names}, {n: [0.9 if n < 9 else 0.5] for n in size.names}
    falling = {n: [1.0 if n < 9 else 0.7] for n in size.names}
    assert book.judge("MQA", good, good, size).startswith("yes")
    assert book.judge("MQA", bad, good, size).startswith("NO")
    inside = "at least 95 % inside its window"
    assert book.judge("Griffin", falling, falling, size) == (
        f"yes: {inside}; yes: 30 points less of 32 names"
    )
    assert book.judge("Griffin", bad, bad, size).startswith(f"NO: {inside}; yes")
    assert book.judge("Griffin", good, good, size).startswith(f"yes: {inside}; NO")
    assert book.judge("Hawk", bad, good, size).startswith("yes: below Griffin")
    assert book.judge("Hawk", good, good, size).startswith("NO")


@pytest.mark.once
def test_state_size(guide, tmp_path, monkeypatch, capsys):
    state_size = guide("state_size")
    text = tmp_path / "text"
    text.write_bytes(bytes(range(32, 127)) * 8)
    toy = {
        **{"--text": [text], "--width": [12], "--num-layers": [2], "--ratios": [1, 4, 5]},
        **{"--length": [8], "--tokens": [16], "--steps": [2], "--windows": [8]},
    }
    lines, written = run_anew(guide, state_size, monkeypatch, capsys, tmp_path, toy)
    # A ratio that does not divide the width is left out.
    assert [line["setting"] for line in lines] == [1, 4, *state_size.FORMS]
    parameters = [line["parameters"] for line in lines]
    assert max(parameters) < 1.02 * min(parameters)
    assert "below 1 by more than 2 deviations" in written
    assert "| HGRN | complex, 2 d |" in written
    assert state_size.better(np.array([1.0, 1.1]), np.array([1.5, 1.6])) == "yes"
    assert state_size.better(np.array([1.0, 1.1]), np.array([1.1, 1.2])) == "NO"


def test_states_of_hgrn_are_what_the_forms_say(guide):
    """Against a loop over time in NumPy, with a bound, and a sequence in two parts."""
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
    counts = np.random.default_rng(1).integers(0, 3, (2, 2, 5)).astype("float32")
    training = guide("training")
    rows = np.random.default_rng(0).integers(0, 7, (2, 2, 2, 6))  # steps, models, rows, tokens
    ways = {
        "by Keras": training._by_keras,
        "in turns": functools.partial(training._in_one_program, side_by_side=False),
        "side by side": functools.partial(training._in_one_program, side_by_side=True),
    }
    found = {}
    for name, start in ways.items():
        models = [tiny(0), tiny(1)]
        optimizers = [keras.optimizers.Adam(0.01, global_clipnorm=1.0) for _ in models]
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.build(model.trainable_variables)
        step, finish = start(models, optimizers)
        first, _ = (np.array(step(part[..., :-1], part[..., 1:], counts)) for part in rows)
        finish()
        found[name] = [first, *(w for model in models for w in model.get_weights())]
        # Each model's weights are found by the program of the first one's shape.
        predict = training.predictor(models[0], batch_size=1)
        for model in models:
            logits = training.language_model_logits(model, rows[0, 0])
            likeliest = np.argmax(keras.ops.convert_to_numpy(logits), axis=-1)
            np.testing.assert_array_equal(predict(model, rows[0, 0]), likeliest)
    for name in ("in turns", "side by side"):
        for one, other in zip(found["by Keras"], found[name], strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5, err_msg=name)
