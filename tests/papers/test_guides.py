"""Each guide of a paper runs at tiny sizes, resumes, and prints its table and verdicts."""

import functools
import re
import types

import numpy as np
import pytest

pytestmark = pytest.mark.once

nightly = pytest.mark.nightly
# The others call the same code of the package, and run after a change of a guide or nightly.
EVERY_CHANGE = ("phone_book", "state_size", "lightning_ablations", "listops")
# Name of a guide, its arguments, the number of its results, and patterns of what it prints.
GUIDES = [
    (
        "extrapolation",
        "--width 16 --lru-width 16 --num-layers 3 --lengths 8 16 --longest 64 --windows 16 "
        "--tokens 32 --steps 3 --text {text}",
        *(
            8,
            [*(rf"\| {name} \|" for name in ("Hawk", "Griffin", "MQA RoPE")), "L minus loss at L"],
        ),
    ),
    (
        "synthetic_tasks",
        "--width 16 --num-layers 2 --rows 4 --test-rows 8 --every 1 --warmup 1 --longest 32 "
        "--copying-length 8 --copying-data 2 --copying-window 4 --copying-steps 2 "
        "--induction-length 8 --induction-window 4 --induction-steps 2",
        *(6, [r"(?s)\| Griffin \|.*\| Griffin \|", "NO: at least 99 % right"]),
    ),
    (
        "phone_book",
        "--width 16 --num-layers 2 --window 12 --queries 1 --names 2 6 --tokens 32 --test-rows 8 "
        "--steps 2 --every 1 --warmup 1 --name-length 1 --number-length 2",
        *(6, [r"names \| 2 \| 6 \|", "NO: 30 points lower for 6"]),
    ),
    # Expansions, and ratios below, that do not divide the width are left out.
    (
        "recall",
        "--lengths 8 16 --pairs 2 3 --vocabulary 16 --widths 8 --expansions 4 16 "
        "--rates 0.01 0.02 --rows 4 --test-rows 8 --steps 2 --every 1",
        *(2 * 2 * 2, [r"\| 3 pairs in 16 tokens: recalled, % by width \| 8 \|"]),
    ),
    (
        "state_size",
        "--width 12 --num-layers 2 --ratios 1 4 5 --length 8 --tokens 16 --steps 2 --windows 8 "
        "--text {text}",
        *(2 + 3, ["below 1 by more than 2 deviations", r"\| HGRN, complex, 2 d \|"]),
    ),
    (
        "lightning_ablations",
        "--width 8 --num-heads 2 --num-layers 2 --length 8 --tokens 16 --steps 2 --windows 4 "
        "--only 'as released' 'no gate' LayerNorm",
        *(3, [r"\| worse: 2.263, not 2.248 \|", r"\| LayerNorm \|"]),
    ),
    (
        "listops",
        "--width 16 --num-layers 2 --shortest 2 --longest 12 --length 16 --examples 20 "
        "--test-rows 8 --rows 4 --steps 2 --every 2",
        *(3, [r"RecurrentBlock \| [\d.]+ \| 8 examples; the paper has 32.34, Griffin; NO"]),
    ),
    (
        "scaling",
        "--widths 8 16 --num-layers 3 --length 8 --window 4 --windows 8 --bytes-per-weight 0.02 "
        "--text {text}",
        *(2 * 3, [r"\| MQA, width 16 \|", r"(?s)minus MQA's by FLOPs .*by FLOPs of w.*NO: below"]),
    ),
    (
        "grouped_queries",
        "--width 16 --head-dim 2 --length 8 --steps 8 --rows 8 --heads 4 --timed-width 16 "
        "--timed-length 16 --repeats 1 --groups 2",
        *(3 + 4, [r"(?s)\| 2 groups, .*\| (mean|first|random) \|", r"cache [\d., ]+0.00 MiB"]),
    ),
    (
        *("large_models", "--only TNL '2 groups' '1 groups'"),
        *(3, [r"\| TNL \| 4 \| ", r"- 2 groups take [\d.]+ times as long as 1 groups"]),
    ),
    (
        *("training_speed", "--lengths 8 16 --tokens 16 --window 4"),
        *(5 * 2, [r"\| TNL \| 1.00 \| [\d.]+ \| \w+: within 10 % to 16; "]),
    ),
]


@pytest.mark.parametrize(
    ("name", "arguments", "count", "patterns"),
    [pytest.param(*row, marks=() if row[0] in EVERY_CHANGE else nightly) for row in GUIDES],
)
def test_guide_of_a_paper_prints_its_results(run_twice, tmp_path, name, arguments, count, patterns):
    """A guide fails, trains fewer models, or loses results of an interrupted run."""
    text = tmp_path / "text"
    text.write_bytes(bytes(range(32, 127)) * 20)
    lines, printed = run_twice(name, arguments.format(text=text))
    assert len(lines) == count
    assert [pattern for pattern in patterns if not re.search(pattern, printed)] == []
    if name == "state_size":  # it compares models of equal size
        parameters = [line["parameters"] for line in lines]
        assert max(parameters) < 1.02 * min(parameters)


def test_scaling_guide_reads_packages_once(guide, tmp_path):
    """Held-out text is trained on, or a file counts twice."""
    scaling = guide("scaling")
    held_out = next(
        name for name in map("package_{}".format, range(99)) if scaling.is_held_out(name)
    )
    files = {
        held_out: {"a.py": "1", "b.txt": "22"},
        "known": {"c.py": "22", "d.md": "333", "e.json": "4444", "_vendor/f.py": "55555"},
    }
    for name, texts in files.items():
        for file, text in texts.items():
            (tmp_path / name / file).parent.mkdir(exist_ok=True, parents=True)
            (tmp_path / name / file).write_text(text)
        folder = tmp_path / f"{name}-1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (folder / "RECORD").write_text("".join(f"{name}/{file},,\n" for file in texts))
    training, found, corpus = scaling.read_packages([str(tmp_path)])
    assert (training.tobytes(), found.tobytes()) == (b"333", b"122")
    assert corpus["held_out"] == [held_out]
    assert (corpus["bytes"], corpus["held_out_bytes"]) == (3, 3)


def test_scaling_guide_compares_losses_at_equal_compute(guide):
    """Power laws are compared at different compute, or extrapolated."""
    scaling = guide("scaling")
    flops = np.array([1e3, 1e4, 1e5])
    one = [(flops, 10 * flops**-0.1), (flops, 11 * flops**-0.1)]
    other = [(2 * flops, 20 * (2 * flops) ** -0.2)] * 2
    budgets = scaling.budgets([one, other])
    np.testing.assert_allclose(budgets, [2e3, np.sqrt(2e8), 1e5])
    expected = np.outer([10, 11], budgets**-0.1)
    np.testing.assert_allclose(scaling.losses_at(one, budgets), expected)
    np.testing.assert_allclose(scaling.losses_at(other, budgets)[0], 20 * budgets**-0.2)
    exponents, error = scaling.power_law(one)
    np.testing.assert_allclose(exponents, [-0.1, -0.1])
    assert error < 1e-9
    size = types.SimpleNamespace(**{name: small for name, (small, _) in scaling.SIZES.items()})
    model = scaling.build("Griffin", size, 12, 0)
    every, of_weights = scaling.flops_per_byte(model, 128)
    assert of_weights == 6 * model.count_params()
    keys = (sum(range(1, 65)) + 64 * 64) / 128  # the window has 64
    assert every - of_weights == 12 * 12 * keys  # one layer of attention, of width 12


def test_gates_guide_finds_a_wrong_gate(guide, call, tmp_path, monkeypatch):
    assert "Measured gates and closed forms agree to 1e-06" in call("gates")
    assert (tmp_path / "gates.png").stat().st_size > 0
    wrong = guide("gates").MEASURED | {"Mamba": lambda a, r, x, h: (1 - r) * h + r * x}
    monkeypatch.setattr(guide("gates"), "MEASURED", wrong)
    (tmp_path / "gates.jsonl").unlink()
    assert "DO NOT AGREE" in call("gates")


def test_verdicts_of_guides_require_two_deviations(guide):
    """A result of one seed, or within two deviations, counts as a reproduction."""
    clear, one = guide("runs").clear, np.array([1.0])
    assert clear(np.array([1.0, 1.1]), np.array([1.5, 1.6]))
    assert not clear(np.array([1.0, 1.1]), np.array([1.1, 1.2]))
    assert not clear(one, one + 1)
    judge = guide("lightning_ablations").judge
    assert judge(np.array([0.1, 0.11])) == "worse"
    assert judge(np.array([-0.1, -0.11])) == "better"
    assert judge(np.array([0.1, -0.05])) == "within 2 deviations"


@nightly
def test_throughput_guide_prints_tokens_per_second(guide, call, run_twice, tmp_path, monkeypatch):
    throughput = guide("throughput")
    monkeypatch.setattr(throughput, "roofline", functools.cache(throughput.roofline))
    monkeypatch.setattr(throughput, "LENGTHS", [512, 1024, 2048, 4096])
    make_model = functools.partial(throughput.make_model, num_layers=1)
    monkeypatch.setattr(throughput, "make_model", make_model)
    sizes = "--tokens 8 --latency-tokens 4 --latency-rows 8 --prompts 0 --window 4"
    lines, printed = run_twice("throughput", f"{sizes} --memory 1200000")
    assert len(lines) == 6
    assert lines[-1]["model"] == "mqa"
    assert "| Griffin, bytes and operations | 0.98 | 1.08 | 1.30 | 1.81 |" in printed
    for name in ("Hawk", "Griffin", "MQA"):
        assert f"| {name} | " in printed
        assert f"| {name}, after 0 | " in printed
    assert "above Griffin by 2 deviations: 8 " in printed
    with pytest.raises(SystemExit, match="are more than a memory of 1,000 bytes"):
        call("throughput", f"--memory 1000 --output {tmp_path}/none")
