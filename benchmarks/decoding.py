"""Times decoding in large batches, and single steps with long caches.

    python -m benchmarks.decoding batches --backend torch    # GPU
    python -m benchmarks.decoding cache --backend torch      # CPU
    python -m benchmarks.decoding heads --backend jax        # CPU, two minutes

- batches: figures 1b and 4 of De et al. 2024 (arXiv:2402.19427), for Hawk, Griffin and MQA, with
  `generate`, random weights and greedy decoding. Throughput: sequences of 512 to 4,096 tokens from
  an empty prompt, here a start token; the batch is doubled until memory is exhausted or a call
  would take longer than `--seconds`. Latency: the time per token at batch size 16, from an empty
  prompt and after a prompt of 4,096 tokens. The roofline of each is the least time that its bytes
  and operations can take (the paper's appendix F, `decoding_time`) at the
  measured rates of this device. The KV cache of global attention has the capacity that `generate`
  allocates: 64, 256, 1,024 tokens and then powers of two. With `--memory`, the batch is the largest
  power of two whose weights and caches fit; on a CPU, this argument is required.
- cache: a step of the same models, layer by layer, by the number of tokens in the cache.
- heads: figure 6 of arXiv:2305.13245 for KerasHub's GPT-2, converted to fewer key and value heads:
  a step by the number of heads, in turns, and the bytes of the cache.
"""

import argparse
import functools
import math
import statistics
import time

import keras
import keras_hub
import numpy as np
from keras import ops

from benchmarks import OPTIONS
from benchmarks.timing import (
    BACKEND,
    device_rates,
    has_gpu,
    is_out_of_memory,
    medians,
    print_header,
    print_results,
    random_tokens,
)
from keras_recurrent import which_generation
from keras_recurrent.checks.dtypes import bytes_of
from keras_recurrent.conversion import convert_to_gqa
from keras_recurrent.generation.prompts import bucket
from keras_recurrent.layers import LocalAttention
from keras_recurrent.models import GriffinCausalLM, memory_sizes
from keras_recurrent.models.memory import get_backbone

KINDS = {"hawk": "Hawk", "griffin": "Griffin", "mqa": "MQA"}
PLACES = 4  # positions in a sequence; the roofline is their mean, as caches grow linearly


def build(kind, size, dtype=None, **sizes):
    """Builds a language model with random weights; `sizes` override those of the preset."""
    model = GriffinCausalLM.from_preset(
        f"{kind}_{size}", load_weights=False, preprocessor=None, dtype=dtype, **sizes
    )
    model.compile(sampler="greedy")
    return model


# --- Time ---


def seconds_of_call(model, batch, given, length, clock=time.perf_counter):
    """Times `generate` for sequences with `given` of `length` tokens."""
    token_ids = random_tokens(model.backbone.vocabulary_size, batch, length)
    mask = np.broadcast_to(np.arange(length) < given, token_ids.shape)
    inputs = {"token_ids": token_ids * mask, "padding_mask": mask}
    start = clock()
    results = model.generate(inputs, stop_token_ids=None)
    ops.convert_to_numpy(results["token_ids"])
    return clock() - start


def warm_up(model, batch, tokens, prompt=0):
    """Compiles the programs of `seconds_a_token`, with the fewest tokens of the same capacity."""
    given, length = max(prompt, 1), prompt + tokens
    shortest = length
    while shortest > given + 1 and bucket(shortest - 1) == bucket(length):
        shortest -= 1
    seconds_of_call(model, batch, given, shortest)
    if prompt and bucket(given + 1) != bucket(length):
        seconds_of_call(model, batch, given, given + 1)


def seconds_a_token(model, batch, tokens, prompt=0, clock=time.perf_counter):
    """Returns the time per decoding step of the batch.

    After a prompt, the time of prefill and one token is subtracted.
    """
    given = max(prompt, 1)
    seconds = seconds_of_call(model, batch, given, prompt + tokens, clock)
    if prompt:
        seconds -= seconds_of_call(model, batch, given, given + 1, clock)
    return seconds / (tokens - 1)


def decoding_time(model, batch_size, length, *, bytes_per_second, flops_per_second):
    """Returns lower bounds of the seconds of a decoding step, for weights and for the cache.

    De et al. 2024 (arXiv:2402.19427, section 4.2 and appendix F): a step reads each weight and the
    cache of each sequence once, and takes two operations per weight and sequence, per number of a
    recurrent state, and per query head of a number of a key or value. Writes, norms, activations
    and an embedding that is not shared with the logits are not counted.

    Args:
        model: a language model, a backbone or the name of a preset, as in `memory_sizes`.
        batch_size, length: integers, sequences, and tokens of each before the step.
        bytes_per_second, flops_per_second: numbers, the rates of the device.
    """
    model, operations = get_backbone(model, None), 0
    weights, embedding = list(model.weights), model.token_embedding
    if not embedding.tie_weights:
        weights = [w for w in weights if w is not embedding.embeddings]
    for block in model.transformer_layers:
        mixer, state = block.temporal_block, block.own_initial_state(1, length)
        is_shared = isinstance(mixer, LocalAttention)
        uses = mixer.num_query_heads // mixer.num_key_value_heads if is_shared else 1
        operations += uses * sum(math.prod(array.shape) for array in keras.tree.flatten(state))
    return tuple(
        max(size / bytes_per_second, 2 * batch_size * count / flops_per_second)
        for size, count in (
            (sum(map(bytes_of, weights)), sum(math.prod(w.shape) for w in weights)),
            (memory_sizes(model, batch_size, length).cache, operations),
        )
    )


def least_seconds_a_token(model, batch, tokens, prompt=0, **rates):
    """Returns the roofline, the mean of `decoding_time` along the sequence."""
    places = prompt + tokens * (np.arange(PLACES) + 0.5) / PLACES
    times = (decoding_time(model, batch, max(1, int(place)), **rates) for place in places)
    return statistics.mean(map(sum, times))


# --- Batch size ---


def largest_batch(model, tokens, memory):
    """Returns the largest power of two whose weights and caches fit into `memory` bytes."""
    sizes = memory_sizes(model, 1, bucket(tokens))
    fit = int((memory - sizes.parameters) // sizes.cache)
    if fit < 1:
        raise SystemExit(
            f"Weights of {sizes.parameters:,} bytes and a cache of {sizes.cache:,} for a single "
            f"row of {tokens:,} tokens are more than a memory of {memory:,.0f} bytes: take more "
            "--memory, or shorter rows."
        )
    return 1 << fit.bit_length() - 1


def doubled(model, tokens, first, longest):
    """Returns `([(batch, seconds per token), ...], reason to stop)`: "memory" or "time".

    "time": a call with twice the batch may take longer than `longest` seconds. "memory": weights
    and caches of twice the batch exceed the device's memory, or the framework raised an error.
    """
    memory = device_memory()

    def fits(batch):
        return memory is None or memory_sizes(model, batch, bucket(tokens)).total < memory

    found, batch = [], first
    while fits(batch):
        try:
            warm_up(model, batch, tokens)
            seconds = seconds_a_token(model, batch, tokens)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            break
        found.append((batch, seconds))
        batch *= 2
        if fits(batch) and 2 * seconds * tokens > longest:
            return found, "time"
    if not found:
        raise SystemExit(f"{first} rows of {tokens:,} tokens do not fit: begin with fewer rows.")
    return found, "memory"


def device_memory():
    """Returns the bytes of the GPU's memory, or None if unknown."""
    if BACKEND == "torch" and has_gpu():
        import torch

        return torch.cuda.get_device_properties().total_memory
    if BACKEND == "jax" and has_gpu():
        import jax

        return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return None


def measure_batches(arguments):
    rates = device_rates(arguments.dtype)
    print(
        f"It copies at {rates['bytes_per_second'] / 1e9:,.0f} GB/s and multiplies at "
        f"{rates['flops_per_second'] / 1e12:,.2f} TFLOP/s."
    )
    for kind in arguments.kinds:
        model = build(kind, arguments.size, arguments.dtype)
        name = f"{KINDS[kind]} {arguments.size}"
        for tokens in arguments.tokens:
            yield {"model": name, **throughput(model, tokens, arguments, rates)}
        for prompt in arguments.prompts:
            for tokens in arguments.tokens:
                yield {"model": name, **latency(model, prompt, tokens, arguments, rates)}
        print(f"{name}: {which_generation(model)}")


def throughput(model, tokens, arguments, rates):
    """Returns the batch with the highest tokens/s, the largest one, and the roofline."""
    if arguments.memory:
        batch = largest_batch(model, tokens, arguments.memory * 2**30)
        warm_up(model, batch, tokens)
        found, ended = [(batch, seconds_a_token(model, batch, tokens))], "--memory"
    else:
        found, ended = doubled(model, tokens, arguments.rows, arguments.seconds)
    batch, seconds = max(found, key=lambda pair: pair[0] / pair[1])
    least = least_seconds_a_token(model, batch, tokens, **rates)
    return {
        "tokens": tokens,
        "largest batch": found[-1][0],
        "ended by": ended,
        "best batch": batch,
        "tokens/s": round(batch / seconds),
        "roofline tokens/s": round(batch / least),
    }


def latency(model, prompt, tokens, arguments, rates):
    """Returns the median milliseconds per token, and the roofline."""
    batch = arguments.latency_rows
    warm_up(model, batch, tokens, prompt)
    times = [seconds_a_token(model, batch, tokens, prompt) for _ in range(arguments.repeats)]
    least = least_seconds_a_token(model, batch, tokens, prompt, **rates)
    return {
        "prompt": prompt,
        "tokens": tokens,
        "rows": batch,
        "ms a token": round(1000 * statistics.median(times), 3),
        "roofline ms": round(1000 * least, 3),
    }


# --- Single steps ---


def compile_step(model, donate=()):
    """Returns a step from tokens, cache and further arguments to logits and cache.

    It is compiled on JAX and TensorFlow, and eager on torch. `donate`: 2 if JAX may overwrite the
    cache.
    """

    def step(*arguments):
        logits, _, cache = model.call_with_cache(*arguments)
        return logits, cache

    if BACKEND == "jax":
        import jax

        def step_of_weights(weights, *arguments):
            with keras.StatelessScope(zip(model.variables, weights, strict=True)):
                return step(*arguments)

        # Weights are arguments, because a compiler would copy constants of gigabytes.
        weights = [variable.value for variable in model.variables]
        return functools.partial(jax.jit(step_of_weights, donate_argnums=donate), weights)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.function(step, jit_compile=True)
    import torch

    return torch.no_grad()(step)


def full_cache(model, length):
    """Returns a cache that claims to hold `length` - 1 tokens, which changes no timing."""
    cache = model.backbone.get_initial_state(1, max_length=length)
    rng = np.random.default_rng(0)
    values = {"position": length - 1, "segment": 0}

    def fill(path, array):
        if path[-1] in values:
            return ops.full_like(array, values[path[-1]])
        return ops.convert_to_tensor(0.1 * rng.normal(size=array.shape), array.dtype)

    filled = [fill(path, array) for path, array in keras.tree.flatten_with_path(cache)]
    return keras.tree.pack_sequence_as(cache, filled)


def measure_cache(arguments):
    """Yields tokens/s of a step at batch size 1 by the number of tokens in the cache."""
    tokens = ops.ones((1, 1), "int32")

    def run(step, cache):
        return ops.convert_to_numpy(step(tokens, cache)[0])

    for kind in arguments.kinds:
        model = GriffinCausalLM.from_preset(f"{kind}_{arguments.size}", preprocessor=None)
        step = compile_step(model)
        caches = {length: full_cache(model, length) for length in arguments.tokens}
        steps = {length: functools.partial(run, step, cache) for length, cache in caches.items()}
        for length, seconds in medians(steps).items():
            mebibytes = memory_sizes(model, 1, length).cache / 2**20
            yield {
                "preset": f"{kind}_{arguments.size}",
                "tokens": length,
                "tokens/s": round(1 / seconds, 1),
                "cache, MiB": round(mebibytes, 1),
            }


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


def convert_to_groups(model, num_heads):
    """Returns `{groups: model}` for all heads, then half as many until one is left."""
    groups = [num_heads >> i for i in range(num_heads.bit_length())]
    return {count: convert_to_gqa(model, count) for count in groups}


def seconds_by_groups(models, arguments, clock=time.perf_counter):
    """Returns `[(groups, seconds, bytes of the cache), ...]`; models take turns."""
    tokens = ops.zeros((arguments.batch, 1), "int32")
    index = ops.convert_to_tensor(arguments.length - 1)
    steps, caches, times = {}, {}, {groups: [] for groups in models}
    for groups, model in models.items():
        steps[groups] = compile_step(model, donate=2)
        # A cache of the model's layout and this length; zeros, as values change no timing.
        _, cache = model._build_cache(ops.zeros((arguments.batch, 2), "int32"))
        full = (*cache.shape[:3], arguments.length, *cache.shape[4:])
        caches[groups] = ops.zeros(full, cache.dtype)
    for repeat in range(arguments.repeats + 2):  # the first two compile and warm up
        for groups, step in steps.items():
            start = clock()
            logits, caches[groups] = step(tokens, caches[groups], index)
            ops.convert_to_numpy(logits)
            if repeat >= 2:
                times[groups].append(clock() - start)
    sizes = {groups: 4 * math.prod(cache.shape) for groups, cache in caches.items()}  # float32
    whole = sizes[arguments.heads]
    assert all(size * arguments.heads == whole * groups for groups, size in sizes.items()), sizes
    return [(groups, statistics.median(times[groups]), sizes[groups]) for groups in models]


def measure_heads(arguments):
    models = convert_to_groups(multi_head_model(arguments), arguments.heads)
    found = seconds_by_groups(models, arguments)
    for groups, seconds, size in found:
        yield {
            "key-value heads": groups,
            "ms a token and sample": round(1000 * seconds / arguments.batch, 2),
            "times faster": round(found[0][1] / seconds, 2),
            "cache, MiB": round(size / 2**20, 2),
        }


# --- Main program ---


def read_arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    works = parser.add_subparsers(dest="work", required=True)
    batches, cache, heads = (
        works.add_parser(work, parents=[OPTIONS]) for work in ("batches", "cache", "heads")
    )
    for work in batches, cache:
        work.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
        work.add_argument("--size", help="of the presets, such as tiny or 100m")
        work.add_argument("--tokens", type=int, nargs="+")
    batches.set_defaults(measure=measure_batches, size="1.3b", tokens=[512, 1024, 2048, 4096])
    batches.add_argument("--dtype", default="bfloat16")
    batches.add_argument("--prompts", type=int, nargs="*", default=[0, 4096], help="of latency")
    batches.add_argument("--latency-rows", type=int, default=16)
    batches.add_argument("--rows", type=int, default=64, help="batch size to start doubling at")
    batches.add_argument("--seconds", type=float, default=60, help="limit of a call")
    batches.add_argument("--memory", type=float, help="GiB, instead of what the device has")
    batches.add_argument("--repeats", type=int, default=3, help="of latency")
    tokens = [1024, 2048, 4096, 8192, 16384]
    cache.set_defaults(measure=measure_cache, size="100m", tokens=tokens, dtype="float32")
    heads.set_defaults(measure=measure_heads, dtype="float32")
    heads.add_argument("--length", type=int, default=4096, help="tokens in the cache")
    heads.add_argument("--batch", type=int, default=8)
    heads.add_argument("--heads", type=int, default=16, help="of queries, a power of two")
    heads.add_argument("--layers", type=int, default=4)
    heads.add_argument("--width", type=int, default=512)
    heads.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    if arguments.work == "batches" and min(arguments.tokens) < 2:
        parser.error("--tokens must be at least 2, of which the first is given")
    if arguments.work == "batches" and not arguments.memory and not has_gpu():
        parser.error("on a CPU, --memory must say how much of it to take, in GiB")
    return arguments


def main():
    arguments = read_arguments()
    print_header(arguments.dtype)
    print_results(arguments.measure(arguments))


if __name__ == "__main__":
    main()
