"""Times decoding with a long cache, by the number of key and value heads.

    python -m benchmarks.gqa

Figure 6 of arXiv:2305.13245, for a causal language model of KerasHub with random weights: the time
per token and sample, and the bytes of the cache by its shape and dtype. It takes two minutes on an
otherwise idle machine.
"""

import argparse
import functools
import json
import math
import time

import keras
import keras_hub
import numpy as np

from keras_recurrent.conversion import convert_to_gqa


def groups_of(heads):
    """Returns the numbers of groups: all heads, then half as many until one is left."""
    return [heads >> i for i in range(heads.bit_length())]


def multi_head_model(arguments):
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=256,
        num_layers=arguments.layers,
        num_heads=arguments.heads,
        hidden_dim=arguments.width,
        intermediate_dim=arguments.width,
        max_sequence_length=arguments.length,
    )
    return keras_hub.models.GPT2CausalLM(backbone)


def decoder(model):
    """Returns a decoding step from tokens, cache and position to logits and cache.

    It is compiled on JAX and TensorFlow, and eager on torch.
    """

    def step(tokens, cache, index):
        logits, _, cache = model.call_with_cache(tokens, cache, index)
        return logits, cache

    if keras.backend.backend() == "jax":
        import jax

        def step_of_weights(weights, *arguments):
            with keras.StatelessScope(zip(model.variables, weights, strict=True)):
                return step(*arguments)

        # Weights are arguments, because a compiler would copy constants of gigabytes.
        weights = [variable.value for variable in model.variables]
        return functools.partial(jax.jit(step_of_weights, donate_argnums=2), weights)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.function(step, jit_compile=True)
    import torch

    return torch.no_grad()(step)


def measure(models, arguments, clock=time.perf_counter):
    """Returns the measurements by number of groups; models take turns."""
    tokens = keras.ops.zeros((arguments.batch, 1), "int32")
    index = keras.ops.convert_to_tensor(arguments.length - 1)
    steps, caches, times = {}, {}, {groups: [] for groups in models}
    for groups, model in models.items():
        steps[groups] = decoder(model)
        # A cache of the model's layout and this length; zeros, as values change no timing.
        shape = (arguments.batch, 2)
        _, cache = model._build_cache(keras.ops.zeros(shape, "int32"))
        full = (*cache.shape[:3], arguments.length, *cache.shape[4:])
        caches[groups] = keras.ops.zeros(full, cache.dtype)
    for repeat in range(arguments.repeats + 2):  # the first two compile and warm up
        for groups, step in steps.items():
            start = clock()
            logits, caches[groups] = step(tokens, caches[groups], index)
            keras.ops.convert_to_numpy(logits)
            if repeat >= 2:
                times[groups].append(clock() - start)
    whole = bytes_of(caches[arguments.heads])
    rows = []
    for groups, seconds in times.items():
        size = bytes_of(caches[groups])
        assert size * arguments.heads == whole * groups, (size, whole, groups)
        rows.append({"groups": groups, "seconds": float(np.median(seconds)), "bytes": size})
    return rows


def bytes_of(tensor):
    itemsize = np.dtype(keras.backend.standardize_dtype(tensor.dtype)).itemsize
    return math.prod(tensor.shape) * itemsize


def table(rows, arguments):
    lines = [
        f"GPT-2 of {arguments.layers} layers, width {arguments.width}, {arguments.heads} query "
        f"heads; {arguments.batch} samples, {arguments.length:,} tokens cached; "
        f"{keras.backend.backend()}, float32.\n",
        "| key-value heads | ms a token and sample | times faster | cache, MiB | of all heads |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    first = rows[0]
    for row in rows:
        lines.append(
            f"| {row['groups']} | {1000 * row['seconds'] / arguments.batch:.2f} "
            f"| {first['seconds'] / row['seconds']:.2f} | {row['bytes'] / 2**20:.2f} "
            f"| {row['bytes'] / first['bytes']:.4f} |"
        )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--length", type=int, default=4096, help="tokens in the cache")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--heads", type=int, default=16, help="of queries, a power of two")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    model = multi_head_model(arguments)
    models = {groups: convert_to_gqa(model, groups) for groups in groups_of(arguments.heads)}
    rows = measure(models, arguments)
    print(table(rows, arguments))
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
