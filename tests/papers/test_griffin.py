"""Guides of Griffin's figures 5 to 7 and 10: runs at tiny sizes, counts and verdicts."""

import dataclasses

import numpy as np
import pytest

pytestmark = pytest.mark.once


def test_gates_guide_finds_a_wrong_gate(guide, call, tmp_path, monkeypatch):
    assert "Measured gates and closed forms agree to 1e-06" in call("gates")
    assert (tmp_path / "gates.png").stat().st_size > 0
    lines = guide("runs").Results(tmp_path / "gates.jsonl").lines
    assert [line["decay"] for line in lines] == [0.5, 0.9, 0.99]
    monkeypatch.setitem(guide("gates").MEASURED, "Mamba", lambda a, r: (1 - r, r))
    (tmp_path / "gates.jsonl").unlink()
    assert "DO NOT AGREE" in call("gates")


def test_extrapolation_guide_prints_losses(guide, run_twice, tmp_path):
    text = tmp_path / "text"
    text.write_bytes(bytes(range(32, 127)) * 20)
    sizes = "--width 16 --lru-width 16 --num-layers 3 --lengths 8 16 --longest 64 --windows 16"
    lines, printed = run_twice("extrapolation", f"{sizes} --tokens 32 --steps 3 --text {text}")
    assert len(lines) == 8
    assert all(f"| {name} |" in printed for name in guide("extrapolation").MODELS)
    assert "4 L less L" in printed


def test_extrapolation_judge_compares_losses_with_the_claims(guide):
    judge, rope = guide("extrapolation").judge, np.array([1.0, 1.1, 0.9])
    for model, losses, verdict in [
        ("Hawk", [-0.1, 0.0, 0.1], "yes: at most 0; beyond 2 deviations of RoPE"),
        ("Hawk", [0.1, 0.0, 0.1], "NO: at most 0; beyond 2 deviations of RoPE"),
        ("Griffin", [0.0, 0.01, 0.01], "yes: at most .01; beyond 2 deviations of RoPE"),
        ("Griffin", [0.0, 0.8, -0.8], "yes: at most .01; NOT beyond 2 deviations of RoPE"),
        ("MQA RoPE", rope, "yes: at least .3"),
        ("MQA RoPE", rope / 5, "NO: at least .3"),
        ("MQA NoPE", rope, "told"),
    ]:
        assert judge(model, np.array(losses), rope) == verdict


def test_synthetic_tasks_guide_prints_accuracies_and_verdicts(guide, run_twice):
    lines, printed = run_twice(
        "synthetic_tasks",
        "--width 16 --num-layers 2 --rows 4 --test-rows 8 --every 1 --warmup 1 --longest 32 "
        "--copying-length 8 --copying-data 2 --copying-window 4 --copying-steps 2 "
        "--induction-length 8 --induction-window 4 --induction-steps 2",
    )
    assert [line["model"] for line in lines] == [*guide("synthetic_tasks").MODELS] * 2
    assert all(list(line["right_after"]) == ["1", "2"] for line in lines)
    assert all(list(line["right_at"]) == ["4", "8", "16", "32"] for line in lines[3:])
    assert printed.count("| Griffin |") == 2
    assert "NO: at least 99 % right" in printed


def test_synthetic_tasks_guide_counts_steps_and_judges_speed(guide):
    synthetic, tasks = guide("synthetic_tasks"), guide("tasks")
    predicted = np.array([[1, 2, 3], [4, 5, 6]])
    labels = np.array([[1, 0, 3], [0, 5, 0]])
    weights = np.array([[1.0, 0, 1], [0, 1, 1]])
    assert tasks.right(predicted, labels, weights) == 0.75
    assert synthetic.steps_to({"2": 0.5, "4": 0.9, "6": 0.8}, 0.9) == 4
    assert synthetic.steps_to({"2": 0.5}, 0.9) is None
    # A curve that ended early continues with its last value.
    curves = synthetic.curves_of([{"right_after": {"2": 0.5, "4": 1.0}}], (2, 4, 6))
    assert curves.tolist() == [[0.5, 1.0, 1.0]]
    slower, near = ": slower than MQA by more than 2 deviations", ": within 2 deviations of MQA"
    # A seed that did not reach the accuracy, None, counts as the last step, against the claim.
    for model, steps, baseline, expected in [
        ("Hawk", [200, 220], [100, 110], ("210 ± 14", "2.00 ± 0.00", f"yes{slower}")),
        ("Hawk", [100, 120], [100, 110], (f"NO{slower}",)),
        ("Griffin", [120, 130], [100, 110], (f"yes{near}, or a quarter, or faster",)),
        ("Griffin", [50, 60], [100, 110], (f"yes{near}, or a quarter, or faster",)),
        ("Griffin", [200, 220], [100, 110], (f"NO{near}, or a quarter, or faster",)),
        (
            *("Hawk", [250, None], [100, 100]),
            ("375 ± 177 at least: 1 of 2 not within 500", "≥ 3.75 ± 1.77", f"NO{slower}"),
        ),
        ("Hawk", [490, None], [100, 100], (f"yes{slower}",)),
        ("Hawk", [490, None], [100, None], ("-", f"NO{slower}")),
        ("Griffin", [300, None], [500, 500], (f"NO{near}, or a quarter, or faster",)),
        (
            *("Griffin", [250, 250], [500, None]),
            ("≤ 0.50 ± 0.00", f"yes{near}, or a quarter, or faster"),
        ),
    ]:
        found = synthetic.compare_speed(model, steps, baseline, 500)
        assert found[-len(expected) :] == expected
    assert synthetic.judge_reading_on("MQA", [1.0, 0.99], [0.4, 0.6]) == (
        "yes: at least 99 % right; yes: at most 50 % of the longest"
    )
    assert synthetic.judge_reading_on("Hawk", [1.0, 0.9], [0.9, 0.9]) == (
        "NO: at least 99 % right; NO: at least 95 % of the longest"
    )


def test_phone_book_guide_prints_accuracies_and_verdicts(run_twice):
    lines, printed = run_twice(
        "phone_book",
        "--width 16 --num-layers 2 --window 12 --queries 1 --names 2 6 --tokens 32 --test-rows 8 "
        "--steps 2 --every 1 --warmup 1 --name-length 1 --number-length 2",
    )
    assert [line["tokens_of_a_row"] for line in lines] == [12] * 3 + [28] * 3
    assert "| 2 names, 0.666667 windows | 6 names, 2 windows |" in printed
    assert "NO: at least 95 % inside its window; NO: 30 points less of 6 names" in printed


def test_phone_book_guide_counts_whole_numbers_and_judges_models(guide):
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
        f"yes: {inside}; yes: 30 points less of 16 names"
    )
    assert book.judge("Griffin", bad, bad, size).startswith(f"NO: {inside}; yes")
    assert book.judge("Griffin", good, good, size).startswith(f"yes: {inside}; NO")
    assert book.judge("Hawk", bad, good, size).startswith("yes: below Griffin")
    assert book.judge("Hawk", good, good, size).startswith("NO")
    longer = dataclasses.replace(size, names=(8,))
    assert book.judge("Hawk", good, good, longer) == "none of these books fits into the window"
