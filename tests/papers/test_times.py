"""Guides of the papers' claims on time and memory: runs at tiny sizes and verdicts."""

import functools
import re

import numpy as np
import pytest

from keras_recurrent.models import memory_sizes

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


OUT_OF_MEMORY = MemoryError("CUDA out of memory")


def test_throughput_guide_doubles_the_batch_until_memory_or_time_ends(guide, monkeypatch):
    throughput = guide("throughput")

    def take(rows_that_fit, milliseconds_a_row, error=OUT_OF_MEMORY):
        def seconds(model, rows, tokens):
            if rows > rows_that_fit:
                raise error
            return milliseconds_a_row * rows / 1000

        monkeypatch.setattr(throughput, "seconds_a_token", seconds)
        return throughput.doubled(None, tokens=100, first=4, longest=10)

    assert take(20, 1) == ([(4, 0.004), (8, 0.008), (16, 0.016)], "memory")
    assert take(1000, 1)[0][-1] == (64, 0.064)
    assert take(1000, 1)[1] == "time"
    with pytest.raises(SystemExit, match="4 rows of 100 tokens do not fit"):
        take(3, 1)
    with pytest.raises(ZeroDivisionError):
        take(4, 1, ZeroDivisionError())


def test_throughput_guide_chooses_the_batch_by_memory(guide):
    largest_batch = guide("throughput").largest_batch
    sizes = memory_sizes("mqa_tiny", 1, 256)  # whose cache has 100 tokens
    for rows, found in ((1, 1), (2, 2), (3.99, 2), (4, 4)):
        memory = sizes.parameters + rows * sizes.cache
        assert largest_batch("mqa_tiny", 100, memory) == found


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


def test_grouped_queries_guide_judges_times(guide):
    judge_times = guide("grouped_queries").judge_times
    found = {1: [1.0], 8: [1.2], 64: [3.0]}
    assert [line.split(": ")[1] for line in judge_times(found, 64)] == ["yes"] * 3
    found = {1: [1.0], 8: [2.0], 64: [1.9]}
    assert [line.split(": ")[1] for line in judge_times(found, 64)] == ["NO"] * 3


def test_training_speed_guide_prints_times(guide, call, run_twice):
    lines, printed = run_twice("training_speed", "--lengths 8 16 --tokens 16 --window 4")
    assert len(lines) == len(guide("training_speed").MODELS) * 2
    assert re.search(r"\| TNL \| 1.00 \| [\d.]+ \| \w+: within 10 % to 16; ", printed)
    with pytest.raises(SystemExit):
        call("training_speed", "--lengths 8 12 --tokens 16")


def test_training_speed_guide_judges_times(guide):
    judge, lengths = guide("training_speed").judge, (8, 16, 32, 64)

    def times(*ratios):
        return {n: np.array([ratio]) for n, ratio in zip(lengths, ratios, strict=False)}

    assert judge("Griffin", times(1, 1.02, 1.04, 1.07), lengths) == (
        "yes: within 5 % to 32; yes: within 8 % to 64"
    )
    assert judge("Griffin", times(1, 1.06, 1.04, 1.09), lengths) == (
        "NO: within 5 % to 32; NO: within 8 % to 64"
    )
    assert judge("MQA", times(1, 1.1, 1.3), lengths) == "rises: yes"
    assert judge("MQA", times(1, 1.1, 1.05), lengths) == "rises: NO"
