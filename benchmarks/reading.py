"""Compares `prefill` of a long prompt with a forward pass.

    KERAS_BACKEND=torch python -m benchmarks.reading hgrn2           # hgrn2 8192 32768 for lengths

Tokens/s of `prefill` of one sequence of 131,072 tokens, random weights in bfloat16, and its memory
in addition to weights and state; of the forward pass of the same backbone on this sequence; and of
its forward pass on 8 sequences of 2,048 tokens, as in training.
"""

import json
import statistics
import sys
import time

import keras
import numpy as np

from benchmarks.writing import make_model

TRAINING = 8, 2048  # batch size and sequence length in training
RUNS = 3


def measure(name, lengths=(131_072,), dtype="bfloat16"):
    model = make_model(name, dtype=dtype)
    vocabulary = model.backbone.vocabulary_size
    for length in lengths:
        row = np.random.default_rng(0).integers(1, vocabulary, (1, length)).astype("int32")
        inputs = {"token_ids": row, "padding_mask": np.ones_like(row)}

        def read(inputs=inputs, length=length):
            cache = model.prefill(inputs, max_length=length)
            keras.ops.convert_to_numpy(cache.state["segment"])
            return cache

        cache, before = read(), _held()
        times = [_seconds(read) for _ in range(RUNS)]
        peak = _peak()
        forward = _forward_pass(model.backbone, inputs)
        forward()
        passes = [_seconds(forward) for _ in range(RUNS)]
        yield {
            "model": name,
            "backend": keras.config.backend(),
            "tokens": length,
            "tokens/s": round(length / statistics.median(times)),
            "slowest and fastest": [round(length / t) for t in (max(times), min(times))],
            "forward pass, tokens/s": round(length / statistics.median(passes)),
            "GiB beside weights and state": peak and round((peak - before) / 2**30, 2),
            "bytes of state": cache.nbytes,
        }
    rows = np.ones(TRAINING, "int32")
    inputs = {"token_ids": rows, "padding_mask": rows}
    forward = _forward_pass(model.backbone, inputs)
    forward()
    times = [_seconds(forward) for _ in range(RUNS)]
    yield {"forward pass, tokens/s": round(rows.size / statistics.median(times))}


def _forward_pass(backbone, inputs):
    """Returns a function that runs the forward pass and waits for its end."""
    if keras.config.backend() == "torch":
        import torch

        run = torch.no_grad()(lambda: backbone(inputs))
    elif keras.config.backend() == "jax":
        import jax

        program = jax.jit(lambda weights, inputs: backbone.stateless_call(weights, [], inputs)[0])
        run = lambda: program([v.value for v in backbone.trainable_variables], inputs)  # noqa: E731
    else:
        import tensorflow as tf

        program = tf.function(backbone)
        run = lambda: program(inputs)  # noqa: E731
    return lambda: keras.ops.convert_to_numpy(run()[0, 0, 0])


def _seconds(call):
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _held():
    """Returns the bytes in use on the device, before a peak is measured; None on a CPU."""
    if keras.config.backend() == "torch":
        import torch

        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated()
    if keras.config.backend() == "jax":
        stats = _jax_memory_stats()
        return stats and stats["bytes_in_use"]
    return None


def _peak():
    """Returns the peak bytes on the device; on JAX since the process started."""
    if keras.config.backend() == "torch":
        import torch

        if torch.cuda.is_available():
            return torch.cuda.max_memory_allocated()
    if keras.config.backend() == "jax":
        stats = _jax_memory_stats()
        return stats and stats["peak_bytes_in_use"]
    return None


def _jax_memory_stats():
    import jax

    return jax.local_devices()[0].memory_stats()


if __name__ == "__main__":
    for line in measure(sys.argv[1], [int(n) for n in sys.argv[2:]] or (131_072,)):
        print(json.dumps(line), flush=True)
