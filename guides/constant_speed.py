"""Training speed and memory by sequence length: Lightning Attention and softmax attention.

    KERAS_BACKEND=jax python guides/constant_speed.py

Every batch has the same number of tokens, in a few long sequences or many short ones. Softmax
attention compares each token with all earlier ones, so its cost per token grows with the length.
Lightning Attention (Qin et al. 2024, arXiv:2405.17381) carries a state of fixed size instead. This
guide repeats their figure 1 at a size that suits your machine, in minutes on two CPU cores.
"""

import argparse
import ctypes
import gc
import math
import os
import pathlib
import re
import time

# Keras reads this once, at import. "torch" and "tensorflow" also work.
os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import matplotlib.figure
import numpy as np

from keras_recurrent.layers import SGLU, LightningAttention, SimpleRMSNorm

BACKEND = keras.backend.backend()
VOCABULARY, LAYERS, HEADS = 256, 2, 4
SHORTEST = 512  # tokens of the shortest sequences
STEP = 5.0  # seconds per training step, without attention
BYTES = 160  # measured memory of a training step per token, block and channel


# --- 1. Two models that differ in their token mixer ---


def lightning_attention(width, layer):
    return LightningAttention(
        HEADS,
        head_dim=width // HEADS,
        layer_index=layer,
        num_layers=LAYERS,
        use_lrpe=layer == 0,
    )


def softmax_attention(width, layer):
    attention = keras.layers.MultiHeadAttention(HEADS, width // HEADS, use_bias=False)
    return lambda x: attention(x, x, use_causal_mask=True)


MODELS = {"Lightning Attention": lightning_attention, "softmax attention": softmax_attention}


def language_model(mixer, width):
    token_ids = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, width)(token_ids)
    for layer in range(LAYERS):
        x = x + mixer(width, layer)(SimpleRMSNorm()(x))
        x = x + SGLU(11 * width // 4)(SimpleRMSNorm()(x))
    logits = keras.layers.Dense(VOCABULARY)(SimpleRMSNorm()(x))
    model = keras.Model(token_ids, logits)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


# --- 2. A size for this machine ---


def multiplications_a_second(n=1024):
    """Returns the peak rate of multiplications in a float32 matrix product."""
    a = keras.random.normal((n, n))
    times = []
    for _ in range(4):
        start = time.perf_counter()
        keras.ops.convert_to_numpy(keras.ops.sum(keras.ops.matmul(a, a)))
        times.append(time.perf_counter() - start)
    return n**3 / min(times)


def tokens_a_batch(width):
    """Returns a power of two whose batch takes about `STEP` seconds and an eighth of the memory.

    Each weight is multiplied three times per token: forward, and for two gradients. Small products
    reach about half the speed of large ones. Attention at long lengths needs the remaining memory.
    """
    weights = LAYERS * (5 + 3 * 11 / 4) * width**2 + VOCABULARY * width
    in_time = STEP * 0.5 * multiplications_a_second() / (3 * weights)
    in_memory = room() / 8 / (BYTES * LAYERS * width)
    tokens = 2 ** int(math.log2(min(in_time, in_memory)))
    return min(max(tokens, 8 * SHORTEST), 2**17)


# --- 3. Time and memory of a training step ---


def measure(model, length, tokens):
    """Returns the seconds of a step and its peak memory, None if that is unavailable."""
    rows = np.random.default_rng(0).integers(0, VOCABULARY, (tokens // length, length + 1))
    x, y = rows[:, :-1].astype("int32"), rows[:, 1:].astype("int32")
    times, memory = times_and_memory(lambda: model.train_on_batch(x, y))
    return min(times), memory


def times_and_memory(step, repeats=2, clock=time.perf_counter):
    """Returns the seconds of each repeat of a step, and the peak memory above the baseline."""
    step()  # traces and compiles
    gc.collect()
    held = forget_peak()
    times = []
    for _ in range(repeats):
        start = clock()
        step()
        times.append(clock() - start)
    return times, None if held is None else peak() - held


def find_gpu():
    """Returns the framework's GPU, or None."""
    if BACKEND == "torch":
        import torch

        return torch.device("cuda") if torch.cuda.is_available() else None
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return "GPU:0" if tf.config.list_physical_devices("GPU") else None
    import jax

    device = jax.local_devices()[0]
    return device if device.platform == "gpu" else None


GPU = find_gpu()


def forget_peak():
    """Resets the peak and returns the bytes in use; None if memory cannot be measured."""
    if GPU is None:
        if not os.access("/proc/self/clear_refs", os.W_OK):
            return None  # not Linux
        ctypes.CDLL(None).malloc_trim(0)  # return free memory to the system
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        return proc("self/status", "VmRSS")
    if BACKEND == "torch":
        import torch

        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    if BACKEND == "tensorflow":
        import tensorflow as tf

        tf.config.experimental.reset_memory_stats(GPU)
        return tf.config.experimental.get_memory_info(GPU)["current"]
    return GPU.memory_stats()["bytes_in_use"]  # JAX cannot reset the peak: run small cases first


def peak():
    if GPU is None:
        return proc("self/status", "VmHWM")
    if BACKEND == "torch":
        import torch

        return torch.cuda.max_memory_allocated()
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.config.experimental.get_memory_info(GPU)["peak"]
    return GPU.memory_stats()["peak_bytes_in_use"]


def room():
    """Returns the available memory in bytes, infinity if it is unknown."""
    if GPU is None:
        return proc("meminfo", "MemAvailable") if os.path.exists("/proc/meminfo") else math.inf
    if BACKEND == "torch":
        import torch

        return torch.cuda.get_device_properties(GPU).total_memory
    return GPU.memory_stats()["bytes_limit"] if BACKEND == "jax" else math.inf


def proc(file, field):
    (kilobytes,) = re.findall(rf"{field}:\s+(\d+) kB", pathlib.Path("/proc", file).read_text())
    return 1024 * int(kilobytes)


def run(lengths, tokens, width, limit):
    """Returns `{model: [(length, tokens/s, bytes or None), ...]}`.

    Doubling the length at most doubles attention's time and memory. A model stops when that would
    exceed the limit.
    """
    results = {}
    for name, mixer in MODELS.items():
        results[name] = []
        model = language_model(mixer, width)
        for length in lengths:
            seconds, memory = measure(model, length, tokens)
            results[name].append((length, tokens / seconds, memory))
            shown = "" if memory is None else f", {memory / 2**20:,.0f} MiB"
            print(f"{name}, {length:,} tokens a row: {tokens / seconds:,.0f} a second{shown}")
            if 2 * seconds > limit or 2 * (memory or 0) > room():
                break
    return results


# --- 4. Figure and main program ---


def draw(results, tokens, path):
    figure = matplotlib.figure.Figure(figsize=(8, 3.5), layout="constrained")
    speed, memory = figure.subplots(1, 2)
    for name, points in results.items():
        lengths, speeds, sizes = zip(*points, strict=True)
        speed.plot(lengths, speeds, "o-", label=name)
        if None not in sizes:
            memory.plot(lengths, [size / 2**30 for size in sizes], "o-", label=name)
    speed.set(ylabel="tokens/s", ylim=(0, None))
    memory.set(ylabel="peak memory of a step, GiB", ylim=(0, None))
    for axes in (speed, memory):
        axes.set_xscale("log", base=2)
        axes.set(xlabel=f"sequence length ({tokens:,} tokens per batch)")
    speed.legend()
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, help="per batch; by default, fitted to this machine")
    width = 256 if GPU is None else 1024
    parser.add_argument("--width", type=int, default=width, help="of the models")
    parser.add_argument(
        "--shortest", type=int, default=SHORTEST, help="tokens of the shortest sequences"
    )
    parser.add_argument("--limit", type=float, default=40, help="seconds a step may take")
    parser.add_argument("--output", type=pathlib.Path, default="build/constant_speed")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    keras.utils.set_random_seed(0)

    tokens = arguments.tokens or tokens_a_batch(arguments.width)
    lengths = [tokens >> i for i in range(20) if tokens >> i >= arguments.shortest][::-1]
    print(f"{LAYERS} blocks of width {arguments.width}, batches of {tokens:,} tokens, on {BACKEND}")
    results = run(lengths, tokens, arguments.width, arguments.limit)

    fast, slow = (dict(point[:2] for point in results[name]) for name in MODELS)
    for length, speed in slow.items():
        print(f"At {length:,} tokens a row: {fast[length] / speed:.2f} times the speed")
    picture = arguments.output / "speed.png"
    draw(results, tokens, picture)
    print(f"Drawn in {picture}")


if __name__ == "__main__":
    main()
