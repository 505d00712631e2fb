"""Guides of Griffin's figures 5 to 7 and 10: runs at tiny sizes."""

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


def test_phone_book_guide_prints_accuracies_and_verdicts(run_twice):
    lines, printed = run_twice(
        "phone_book",
        "--width 16 --num-layers 2 --window 12 --queries 1 --names 2 6 --tokens 32 --test-rows 8 "
        "--steps 2 --every 1 --warmup 1 --name-length 1 --number-length 2",
    )
    assert [line["tokens_of_a_row"] for line in lines] == [12] * 3 + [28] * 3
    assert "| 2 names, 0.666667 windows | 6 names, 2 windows |" in printed
    assert "NO: at least 95 % inside its window; NO: 30 points less of 6 names" in printed
