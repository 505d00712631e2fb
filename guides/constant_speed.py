"""One speed at every length: training tokens a second and memory, beside softmax attention.

    KERAS_BACKEND=jax python guides/constant_speed.py

A batch always has the same number of tokens: few long rows or many short ones. Softmax attention
compares each token with all before it, so that a token costs more the longer its row is. Lightning
Attention (Qin et al. 2024, arXiv:2405.17381) carries a state of fixed size along the row instead.
Their figure 1, at a size that suits your machine; a few minutes on two CPU cores.
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
SHORTEST = 512  # tokens a row, to begin with
STEP = 5.0  # seconds that a training step may take without attention's share
BYTES = 160  # that a training step takes for each token, block and channel, as measured here


# --- 1. Two models: the same but for what mixes the tokens ---


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
    """Of a float32 matrix product, at its best."""
    a = keras.random.normal((n, n))
    times = []
    for _ in range(4):
        start = time.perf_counter()
        keras.ops.convert_to_numpy(keras.ops.sum(keras.ops.matmul(a, a)))
        times.append(time.perf_counter() - start)
    return n**3 / min(times)


def tokens_a_batch(width):
    """A power of two: a batch is learned in about `STEP` seconds, in an eighth of the memory.

    A weight is multiplied three times a token: forward, and for the two gradients. Half the speed
    of a large product is what small ones reach. Long rows of attention take the other memory.
    """
    weights = LAYERS * (5 + 3 * 11 / 4) * width**2 + VOCABULARY * width
    in_time = STEP * 0.5 * multiplications_a_second() / (3 * weights)
    in_memory = room() / 8 / (BYTES * LAYERS * width)
    tokens = 2 ** int(math.log2(min(in_time, in_memory)))
    return min(max(tokens, 8 * SHORTEST), 2**17)


# --- 3. Time and memory of a training step ---


def measure(model, length, tokens):
    """Seconds, and the most bytes above what was there before: None if nobody tells."""
    rows = np.random.default_rng(0).integers(0, VOCABULARY, (tokens // length, length + 1))
    x, y = rows[:, :-1].astype("int32"), rows[:, 1:].astype("int32")
    times, memory = times_and_memory(lambda: model.train_on_batch(x, y))
    return min(times), memory


def times_and_memory(step, repeats=2, clock=time.perf_counter):
    """The seconds of each repeat of a step, and the most bytes above what was there before."""
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
    """The framework's GPU, or None."""
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
    """The bytes in use now; from here on, `peak` tells the most. None if this machine does not."""
    if GPU is None:
        if not os.access("/proc/self/clear_refs", os.W_OK):
            return None  # not Linux
        ctypes.CDLL(None).malloc_trim(0)  # hand what is free back to the system
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
    return GPU.memory_stats()["bytes_in_use"]  # JAX forgets no peak: what needs least comes first


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
    """The bytes that a step may take, as far as anybody tells."""
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
    """`{model: [(length, tokens a second, bytes or None), ...]}`.

    At twice the length, attention takes at most twice the time and memory; a model for which that
    would be too much stops.
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


# --- 4. The picture ---


def draw(results, tokens, path):
    figure = matplotlib.figure.Figure(figsize=(8, 3.5), layout="constrained")
    speed, memory = figure.subplots(1, 2)
    for name, points in results.items():
        lengths, speeds, sizes = zip(*points, strict=True)
        speed.plot(lengths, speeds, "o-", label=name)
        if None not in sizes:
            memory.plot(lengths, [size / 2**30 for size in sizes], "o-", label=name)
    speed.set(ylabel="tokens a second", ylim=(0, None))
    memory.set(ylabel="peak memory of a step, GiB", ylim=(0, None))
    for axes in (speed, memory):
        axes.set_xscale("log", base=2)
        axes.set(xlabel=f"tokens a row, {tokens:,} a batch")
    speed.legend()
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, help="a batch; by itself, what suits this machine")
    width = 256 if GPU is None else 1024
    parser.add_argument("--width", type=int, default=width, help="of the models")
    parser.add_argument(
        "--shortest", type=int, default=SHORTEST, help="tokens a row, to begin with"
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
