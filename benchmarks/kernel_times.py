"""Shows where the time of decoding steps, of chunks of prompts and of a busy engine goes.

    KERAS_BACKEND=torch python -m benchmarks.kernel_times hgrn2 --slots 128

Needs torch and an NVIDIA GPU; models as in `benchmarks.writing`. Prints, from torch's profiler:

- the kernels of a step by name, and those of each program of chunks, with its time;
- of an engine with a queue, the time between two steps on the device, and the work of the engine's
  thread in the longest of these gaps. The profiler slows the host down by about a half.
"""

import argparse
import collections
import functools
import itertools
import json
import os
import statistics
import tempfile
import time

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.decoding import seconds_a_token, warm_up
from benchmarks.writing import MODELS, make_model
from keras_recurrent.generation.batch import Batch
from keras_recurrent.generation.scheduler import Scheduler
from keras_recurrent.serving import Engine

PROMPT, ANSWER = (256, 768), (128, 384)  # tokens, the ranges of random lengths
STEPS, KERNELS, GAPS = 64, 16, 8  # steps of a trace, and lines of the tables
STEP_KERNELS = 100  # a step has more, a part of a program of chunks fewer


def trace(function):
    """Returns the events of the profiler while a function runs, sorted by time."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        function()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        found.export_chrome_trace(path)
        with open(path) as file:
            events = json.load(file)["traceEvents"]
    return sorted((e for e in events if "dur" in e), key=lambda e: e["ts"])


def device_events(events):
    return [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]


def print_kernels(title, events, count):
    """Prints times of kernels, as means of `count` repeats of the same work."""
    by_name = collections.defaultdict(list)
    for event in device_events(events):
        by_name[event["name"]].append(event["dur"])
    total = sum(map(sum, by_name.values()))
    print(f"\n{title}: kernels {total / count:,.0f} µs")
    for name, times in sorted(by_name.items(), key=lambda pair: -sum(pair[1]))[:KERNELS]:
        line = f"{sum(times) / count:9.1f} µs = {len(times) / count:6.1f} x"
        print(f"{line} {statistics.median(times):7.2f}  {name[:80]}")


def milliseconds(run, count=20):
    """Returns the mean time of `count` runs."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        run()
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - start) / count


def annotate(cls, name):
    """Makes a method an event of the trace."""
    method = getattr(cls, name)

    @functools.wraps(method)
    def annotated(*arguments, **options):
        with record_function(f"engine: {name}"):
            return method(*arguments, **options)

    setattr(cls, name, annotated)


def print_gaps(events):
    """Prints the time between two graphs of steps, and what the host did in the longest gaps."""
    graphs = collections.defaultdict(list)
    for e in device_events(events):
        graphs[e["args"].get("correlation")].append((e["ts"], e["ts"] + e["dur"]))
    spans = [(found[0][0], max(found)[1]) for found in graphs.values() if len(found) > STEP_KERNELS]
    host = [e for e in events if e["name"].startswith("engine: ")]
    lengths = [end - begin for begin, end in spans]
    gaps = [(after[0] - before[1], before[1]) for before, after in itertools.pairwise(spans)]
    tenths = np.quantile([gap for gap, _ in gaps], (0.1, 0.5, 0.9)).round()
    print(f"\n{len(spans)} steps, median {statistics.median(lengths):,.0f} µs")
    print(f"gaps in µs, quantiles 0.1, 0.5 and 0.9: {tenths}")
    for gap, begin in sorted(gaps, reverse=True)[:GAPS]:
        work = [e for e in host if e["ts"] < begin + gap and e["ts"] + e["dur"] > begin]
        texts = (f"{e['name'][8:]} {e['ts'] - begin:+,.0f} for {e['dur']:,.0f}" for e in work)
        print(f"  {gap:,.0f} µs: {'; '.join(texts)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--prefill-chunk", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=0.5, help="duration of the engine's trace")
    arguments = parser.parse_args()
    for cls, name in (
        *((Scheduler, name) for name in ("_process_chunks", "_finish", "_process", "_end")),
        *((Batch, name) for name in ("insert", "step")),
    ):
        annotate(cls, name)
    model = make_model(arguments.model)
    model.compile(sampler="greedy")
    warm_up(model, arguments.slots, STEPS)
    events = trace(lambda: seconds_a_token(model, arguments.slots, STEPS))
    print_kernels(f"a step of {arguments.slots} sequences", events, STEPS - 1)

    length = PROMPT[1] + ANSWER[1]
    options = {"prefill_chunk": arguments.prefill_chunk, "prefix_cache_bytes": 0}
    with Engine(model, arguments.slots, length, max_queued=10**4, **options) as engine:
        chunks = engine._chunks
        for size in chunks._sizes:
            run = functools.partial(chunks._run_example, size)
            print_kernels(f"a program of {chunks.num_prompts}x{size} tokens", trace(run), 1)
            print(
                f"alone {milliseconds(run):.3f} ms, share of the bound per part", chunks.cost(size)
            )
        rng, vocabulary = np.random.default_rng(0), model.backbone.vocabulary_size
        for _ in range(4 * arguments.slots):
            prompt = rng.integers(1, vocabulary, rng.integers(*PROMPT))
            new = int(rng.integers(*ANSWER))
            engine.submit(prompt, max_new_tokens=new, stop_token_ids=None)
        time.sleep(2)
        print_gaps(trace(lambda: time.sleep(arguments.seconds)))
        engine.close(wait=False)


if __name__ == "__main__":
    main()
