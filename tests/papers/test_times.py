"""Guides of the papers' claims on time and memory: runs at tiny sizes."""

import functools
import re

import pytest

pytestmark = [pytest.mark.nightly, pytest.mark.once]


def test_throughput_guide_prints_tokens_per_second(guide, call, run_twice, tmp_path, monkeypatch):
    throughput = guide("throughput")
    monkeypatch.setattr(throughput, "compute", functools.cache(throughput.compute))
    monkeypatch.setattr(throughput, "LENGTHS", [512, 1024, 2048, 4096])
    make_model = functools.partial(throughput.make_model, num_layers=1)
    monkeypatch.setattr(throughput, "make_model", make_model)
    sizes = "--tokens 8 --latency-tokens 4 --latency-rows 8 --prompts 0 --window 4"
    lines, printed = run_twice("throughput", f"{sizes} --memory 1200000")
    assert len(lines) == 6
    assert lines[-1]["model"] == "mqa"
    assert "| Griffin, 4,096 tokens | 4,096 | 38,346 | 1.81 |" in printed
    for name in ("Hawk", "Griffin", "MQA"):
        assert f"| {name}, 8 tokens |" in printed
    assert "8 tokens: Hawk above Griffin by 2 deviations: " in printed
    with pytest.raises(SystemExit, match="are more than a memory of 1,000 bytes"):
        call("throughput", f"--memory 1000 --output {tmp_path}/none")


def test_grouped_queries_guide_prints_times(run_twice):
    lines, printed = run_twice(
        "grouped_queries",
        "--width 16 --head-dim 2 --length 8 --steps 8 --rows 8 --heads 4 --timed-width 16 "
        "--timed-length 16 --repeats 1 --groups 2",
    )
    assert len(lines) == 3 + 4  # times by groups, and trained models
    for name in ("2 groups, mean", "2 groups, first", "2 groups, random", "8 groups, all heads"):
        assert f"| {name} |" in printed
    assert re.search(r"\| 4 groups \| [\d.]+ \| [\d.]+ \| 0.00 \|", printed)


def test_training_speed_guide_prints_times(guide, call, run_twice):
    lines, printed = run_twice("training_speed", "--lengths 8 16 --tokens 16 --window 4")
    assert len(lines) == len(guide("training_speed").MODELS) * 2
    assert re.search(r"\| TNL \| 1.00 \| [\d.]+ \| \w+: within 10 % to 16; ", printed)
    with pytest.raises(SystemExit):
        call("training_speed", "--lengths 8 12 --tokens 16")
