"""Times training steps of whole models, next to models of other libraries.

    python -m benchmarks.training hgrn2 --backend torch             # forward and backward
    python -m benchmarks.training recurrentgemma --update --backend jax
    python -m benchmarks.training hgrn2 --update --mixed --backend torch
    python -m benchmarks.training griffin_small --update --sizes 8x512 --backend torch   # CPU

Models of this package have the fused loss of hidden states, or with `--logits` the loss of logits.
Without `--update`, a step on torch is forward and backward, eager; with it, and always on other
backends, it is `train_on_batch` with `keras_recurrent.optimizers.AdamW`, compiled by JAX and
TensorFlow, and on torch with `--jit`. Baselines run on torch, with torch's fused AdamW, and have as
many parameters. Small models use float32 and SGD; others use random bfloat16 weights, or with
`--mixed` float32 weights and computations in bfloat16.

On torch, loss and gradients of this package's model are first compared with the plain
implementations. Blocks are recomputed in the backward pass if activations do not fit into the
memory, or with `--remat`.
"""

import functools
import math
import statistics
import sys
import time

import keras
from keras import ops

import keras_recurrent
from benchmarks import make_parser, peers
from benchmarks.models import MODELS, make_model
from benchmarks.timing import (
    BACKEND,
    has_gpu,
    is_out_of_memory,
    peak_bytes,
    print_header,
    print_results,
    random_tokens,
    reset_peak,
    wait,
)
from keras_recurrent.models import TokenCrossentropy

if BACKEND == "torch":
    import torch

REPEATS, LEAST = 5, 3  # of a measurement; the second if it takes longer than `PATIENCE`
PATIENCE = 60  # seconds


class LossOfLogits(TokenCrossentropy):
    """A `TokenCrossentropy` from logits, as the fused loss is for that very class only."""


def is_small(name):
    return name.endswith("_small")


def build(arguments, remat):
    keras.utils.set_random_seed(0)
    with keras.RematScope(mode="full" if remat else None):
        return make_model(arguments.model, "mixed_bfloat16" if arguments.mixed else "bfloat16")


def weights_of(model):
    if isinstance(model, keras.Model):
        return [v.value for v in model.trainable_variables]
    return list(model.parameters())


def gradient_step(model, loss, update=None):
    """Returns a function without arguments: a training step on torch that returns the loss."""
    weights = weights_of(model)

    def step():
        for weight in weights:
            weight.grad = None
        found = loss()
        found.backward()
        if update is not None:
            update()
        return found.detach()

    return step


def our_loss(model, token_ids, of_logits=False):
    """Returns a function without arguments: the loss on torch."""
    compute = TokenCrossentropy()
    inputs = {"token_ids": token_ids, "padding_mask": torch.ones_like(token_ids, dtype=torch.bool)}
    labels = token_ids.roll(-1, 1)  # the label of the last token changes no timing

    def loss():
        if of_logits:
            return compute(labels, model(inputs, training=True))
        hidden = model.backbone(inputs, training=True)
        return model.loss_of_hidden_states(hidden, labels)[0]

    return loss


def our_step(model, token_ids, arguments):
    """Returns a training step of this package's model, a function without arguments."""
    if BACKEND == "torch" and not arguments.update:
        return gradient_step(model, our_loss(model, token_ids, arguments.logits))
    optimizer = keras.optimizers.SGD(1e-3)
    if not is_small(arguments.model):
        optimizer = keras_recurrent.optimizers.AdamW(1e-4)
        keras_recurrent.exclude_from_weight_decay(optimizer, model)
    loss = {"loss": LossOfLogits()} if arguments.logits else {}
    model.compile(optimizer, weighted_metrics=[], jit_compile=arguments.jit or "auto", **loss)
    x = {"token_ids": token_ids, "padding_mask": ops.ones_like(token_ids)}
    return functools.partial(model.train_on_batch, x, ops.roll(token_ids, -1, 1))


def baseline_step(model, token_ids, arguments):
    """Returns a training step of a model of another library, a function without arguments."""
    update = None
    if arguments.update and is_small(arguments.model):
        update = torch.optim.SGD(model.parameters(), 1e-3).step
    elif arguments.update:
        update = torch.optim.AdamW(model.parameters(), 1e-4, fused=has_gpu()).step
    token_ids = token_ids.long()

    def loss():
        with torch.autocast(token_ids.device.type, torch.bfloat16, enabled=arguments.mixed):
            return model(input_ids=token_ids, labels=token_ids).loss

    return gradient_step(model, loss, update)


def compare_with_plain(model):
    """Prints the differences of loss and gradients from plain torch."""
    tokens, found = random_tokens(model.backbone.vocabulary_size, 2, 256), []
    loss = our_loss(model, ops.convert_to_tensor(tokens))
    for implementation in (None, "torch"):
        with keras_recurrent.implementation(implementation):
            value = gradient_step(model, loss)()
        found.append((value.item(), [weight.grad.clone() for weight in weights_of(model)]))
    (value, gradients), (plain, expected) = found
    squares = [
        ((a.float() - b.float()).square().sum(), b.float().square().sum())
        for a, b in zip(gradients, expected, strict=True)
    ]
    wrong, size = (math.sqrt(sum(s.item() for s in of)) for of in zip(*squares, strict=True))
    print(f"Loss of 2×256 tokens {value:.4f}, in plain torch {plain:.4f}; gradients differ by")
    print(f"{wrong / size:.2%} of their norm.", flush=True)
    if not (abs(value - plain) < 0.01 * plain and wrong < 0.25 * size):
        sys.exit("the model is not that of plain torch")


def measure(step, num_tokens):
    """Returns the measurements of a training step, a dictionary."""
    start = time.perf_counter()
    value = float(step())
    first = time.perf_counter() - start
    if not math.isfinite(value):
        sys.exit(f"The loss is {value}.")
    reset_peak()
    start = time.perf_counter()
    wait(step())
    calls = max(1, min(5, int(1 / (time.perf_counter() - start))))
    speeds, end = [], time.perf_counter() + PATIENCE
    while len(speeds) < REPEATS and (len(speeds) < LEAST or time.perf_counter() < end):
        start = time.perf_counter()
        for _ in range(calls):
            result = step()
        wait(result)
        speeds.append(num_tokens * calls / (time.perf_counter() - start))
    lower, median, upper = statistics.quantiles(speeds, n=4, method="inclusive")
    return {
        "tokens/s": round(median),
        "quartiles": f"{lower:,.0f} to {upper:,.0f}",
        "repeats": len(speeds),
        "peak GiB": round(peak_bytes() / 2**30, 1),
        "first step s": round(first, 1),
        "loss": round(value, 4),
    }


def attempt(make_step, batch, length, vocabulary):
    """Returns the measurements, or None if memory was exhausted."""
    token_ids = ops.convert_to_tensor(random_tokens(vocabulary, batch, length))
    try:
        return measure(make_step(token_ids), batch * length)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    return None


def measure_sizes(key, make_step, recompute, sizes, vocabulary):
    """Yields the results of a model; calls `recompute` if activations do not fit."""
    for batch, length in sizes:
        found = attempt(make_step, batch, length, vocabulary)
        if found is None and key["blocks"] == "kept":
            reset_peak()
            recompute()
            key = {**key, "blocks": "recomputed"}
            found = attempt(make_step, batch, length, vocabulary)
        yield {**key, "batch×length": f"{batch}×{length}", **(found or {"tokens/s": "no memory"})}


def measure_ours(arguments, key):
    model = build(arguments, arguments.remat)
    if BACKEND == "torch":
        compare_with_plain(model)

    def recompute():
        nonlocal model
        model = None
        reset_peak()
        model = build(arguments, remat=True)

    vocabulary = model.backbone.vocabulary_size
    yield from measure_sizes(
        {"implementation": BACKEND, **key, "blocks": "recomputed" if arguments.remat else "kept"},
        lambda token_ids: our_step(model, token_ids, arguments),
        recompute,
        arguments.sizes,
        vocabulary,
    )


def measure_baseline(arguments, key):
    reset_peak()
    baseline = MODELS[arguments.model].baseline
    model = build(arguments, remat=False)
    peer, vocabulary = baseline.make(model).train(), model.backbone.vocabulary_size
    if arguments.mixed:
        peer.float()
    ours, theirs = (sum(w.numel() for w in weights_of(m)) for m in (model, peer))
    if ours != theirs:
        sys.exit(f"{ours:,} parameters, and {theirs:,} in {baseline.library}")
    del model
    yield from measure_sizes(
        {"implementation": baseline.library, **key, "loss of": "logits", "blocks": "kept"},
        lambda token_ids: baseline_step(peer, token_ids, arguments),
        peer.gradient_checkpointing_enable,
        arguments.sizes,
        vocabulary,
    )


def measure_all(arguments):
    gradients_only = BACKEND == "torch" and not arguments.update
    key = {
        "model": arguments.model,
        "pass": "forward, backward" if gradients_only else "with update",
        "loss of": "logits" if arguments.logits else "hidden states",
    }
    if arguments.only != "baseline":
        yield from measure_ours(arguments, key)
    baseline = MODELS[arguments.model].baseline
    if arguments.only == "ours" or BACKEND != "torch" or baseline is None:
        return
    if peers.is_installed(baseline.module):
        yield from measure_baseline(arguments, key)
    else:
        print(f"{baseline.library} is not installed", file=sys.stderr)


def main():
    parser = make_parser(__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--sizes", nargs="+", type=read_size, help="such as 8x2048 1x65536")
    parser.add_argument("--update", action="store_true", help="with an optimizer's update")
    parser.add_argument("--mixed", action="store_true", help="weights in float32")
    parser.add_argument("--logits", action="store_true", help="loss of logits")
    parser.add_argument("--jit", action="store_true", help="`jit_compile=True`, with --update")
    parser.add_argument("--remat", action="store_true", help="recompute blocks")
    parser.add_argument("--only", choices=("ours", "baseline"))
    arguments = parser.parse_args()
    arguments.sizes = arguments.sizes or [(8, 2048), (1, 2048)]
    if BACKEND == "torch" and has_gpu():
        peers.compile_side_by_side()
    dtype = "mixed_bfloat16" if arguments.mixed else "bfloat16"
    print_header("float32" if is_small(arguments.model) else dtype)
    print_results(measure_all(arguments))


def read_size(text):
    batch, length = map(int, text.split("x"))
    return batch, length


if __name__ == "__main__":
    main()
