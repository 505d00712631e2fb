"""Measures time and memory of `linear_scan` by sequence length, on one backend.

Prints JSON; `python benchmarks/cpu.py` runs it for every backend and makes a table. Forward and
backward; memory is the peak of the process as Linux reports it, including the allocator's.
"""

import ctypes
import gc
import json
import re
import statistics
import time

import keras
import numpy as np

from keras_recurrent.ops import linear_scan

BATCH, WIDTH = 1, 1024
LENGTHS = [1024 * 2**i for i in range(7)]
BACKEND = keras.backend.backend()


def loss(x, log_a):
    output, final_state = linear_scan(x, log_a)
    return keras.ops.sum(output * output) + keras.ops.sum(final_state)


if BACKEND == "jax":
    import jax

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))

    def forward_and_backward(x, log_a):
        jax.block_until_ready(gradients(x, log_a))

elif BACKEND == "torch":
    import torch

    def forward_and_backward(x, log_a):
        x, log_a = x.requires_grad_(), log_a.requires_grad_()
        torch.autograd.grad(loss(x, log_a), (x, log_a))

else:
    import tensorflow as tf

    @tf.function(reduce_retracing=True)
    def gradients(x, log_a):
        with tf.GradientTape() as tape:
            tape.watch((x, log_a))
            value = loss(x, log_a)
        return tape.gradient(value, (x, log_a))

    def forward_and_backward(x, log_a):
        gradients(x, log_a)[0].numpy()


def tensors(length):
    x = np.random.default_rng(0).normal(size=(BATCH, length, WIDTH)).astype("float32")
    return keras.ops.convert_to_tensor(x), keras.ops.convert_to_tensor(-np.abs(x))


def measure(length):
    """Returns seconds, and bytes beyond those of the process before its tensors are made."""
    forward_and_backward(*tensors(length))  # traces and compiles
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # returns free memory to the system
    held = status("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak
    arguments = tensors(length)
    times = []
    while len(times) < 3 or sum(times) < 1:
        start = time.perf_counter()
        forward_and_backward(*arguments)
        times.append(time.perf_counter() - start)
    return statistics.median(times), status("VmHWM") - held


def status(field):
    with open("/proc/self/status") as file:
        (kilobytes,) = re.findall(rf"{field}:\s+(\d+) kB", file.read())
    return 1024 * int(kilobytes)


def main():
    rows = []
    for length in LENGTHS:
        seconds, memory = measure(length)
        rows.append({"backend": BACKEND, "length": length, "seconds": seconds, "bytes": memory})
    print(json.dumps({"rows": rows, "shape": [BATCH, "T", WIDTH]}))


if __name__ == "__main__":
    main()
