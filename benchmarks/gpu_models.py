"""Times training of whole models on a CUDA GPU.

    python -m benchmarks.gpu_models               # or hgrn2, hypenet, recurrentgemma; --seconds 300

Compares HGRN2 1.3B with flash-linear-attention's and RecurrentGemma 2B with transformers' (`pip
install flash-linear-attention transformers`): same sizes and tokens, random weights in bfloat16,
forward and backward, eager. HypeNet 2B has no baseline. RecurrentGemma is also timed with an update
by Keras's AdamW (`BETA_2`) with bfloat16 slots, with the fused loss and with the loss of logits. If
activations do not fit into memory, blocks are recomputed in the backward pass, which the line says.

First, loss and gradients of this package's model are compared with plain torch. `--compiled`
measures only `train_on_batch` with `jit_compile=True`.
"""

import argparse
import datetime
import gc
import importlib.metadata
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import torch

import keras_recurrent
from benchmarks import peer_models, peers
from benchmarks.gpu_timing import line, times
from keras_recurrent.models import (
    GriffinCausalLM,
    HGRN2CausalLM,
    LightningHybridCausalLM,
    TokenCrossentropy,
)
from keras_recurrent.presets import griffin, hgrn2, lightning_hybrid

REPEATS, LEAST = 5, 3  # of a measurement; the second if it takes longer than `PATIENCE`
PATIENCE = 60  # seconds
SIZES = [(8, 2048), (1, 2048), (1, 65536)]
BETA_2 = 0.99  # in bfloat16, 0.999 rounds to 1, and Keras's AdamW changes no weight


class Pair(NamedTuple):
    """A model of this package and a baseline of the same sizes."""

    name: str
    family: type
    preset: str
    row: Any  # in the table of presets
    peer: str | None = None
    make_peer: Callable | None = None  # function of the arguments of this package's backbone
    peer_sizes: Sequence = ()  # sizes whose steps take less than minutes


MODELS = {
    "recurrentgemma": Pair(
        *("RecurrentGemma 2B", GriffinCausalLM, "recurrentgemma_2b"),
        griffin.SIZES["recurrentgemma_2b"],
        *("transformers", peer_models.transformers_gemma, SIZES[1:2]),
    ),
    "hypenet": Pair(
        *("HypeNet 2B", LightningHybridCausalLM, "hypenet_2b"),
        lightning_hybrid.SIZES["hypenet_2b"],
    ),
    "hgrn2": Pair(
        *("HGRN2 1.3B", HGRN2CausalLM, "hgrn2_1.3b_100b"),
        hgrn2.SIZES["hgrn2_1.3b_100b"],
        *("flash-linear-attention", peer_models.fla_hgrn2, SIZES),
    ),
}


def ours(pair, recomputing=False):
    with keras.RematScope(mode="full" if recomputing else None):
        return pair.family.from_preset(
            pair.preset, load_weights=False, preprocessor=None, dtype="bfloat16"
        )


def loss_of_hidden_states(model):
    """Returns the loss function from hidden states, as `fit` computes it by default."""

    def loss(token_ids):
        mask = torch.ones_like(token_ids, dtype=torch.bool)
        hidden = model.backbone({"token_ids": token_ids, "padding_mask": mask}, training=True)
        # The last token has no successor; its label, the first token, changes no timing.
        return model.loss_of_hidden_states(hidden, token_ids.roll(-1, 1))[0]

    return loss


def loss_of_logits(model):
    compute = TokenCrossentropy()

    def loss(token_ids):
        mask = torch.ones_like(token_ids, dtype=torch.bool)
        logits = model({"token_ids": token_ids, "padding_mask": mask}, training=True)
        return compute(token_ids.roll(-1, 1), logits)

    return loss


def their_loss(model):
    return lambda token_ids: model(input_ids=token_ids, labels=token_ids).loss


def weights_of(model):
    if isinstance(model, keras.Model):
        return [v.value for v in model.trainable_variables]
    return list(model.parameters())


def update_of(model):
    """Returns a function that updates the weights of the model by their gradients."""
    optimizer = keras.optimizers.AdamW(1e-4, beta_2=BETA_2)
    optimizer.build(model.trainable_variables)
    weights = weights_of(model)

    def update():
        with torch.no_grad():
            optimizer.apply([weight.grad for weight in weights])

    return update


def step_of(model, loss, update=lambda: None):
    """Returns a training step: a function of tokens that returns its loss."""
    weights = weights_of(model)

    def step(token_ids):
        for weight in weights:
            weight.grad = None
        found = loss(token_ids)
        found.backward()
        update()
        return found.detach()

    return step


def compare_with_plain(model, vocabulary):
    """Prints the differences of loss and gradients from plain torch."""
    token_ids = torch.randint(vocabulary, (2, 256), device="cuda")
    found = []
    for implementation in (None, "torch"):
        with keras_recurrent.implementation(implementation):
            value = step_of(model, loss_of_hidden_states(model))(token_ids)
        found.append((value.item(), [weight.grad.clone() for weight in weights_of(model)]))
    (value, gradients), (plain, expected) = found
    squares = [
        ((a.float() - b.float()).square().sum(), b.float().square().sum())
        for a, b in zip(gradients, expected, strict=True)
    ]
    wrong, size = (math.sqrt(sum(s.item() for s in of)) for of in zip(*squares, strict=True))
    print(f"\nLoss of 2×256 tokens {value:.4f}, in plain torch {plain:.4f}; gradients differ by")
    print(f"{wrong / size:.2%} of their norm.\n", flush=True)
    if not (abs(value - plain) < 0.01 * plain and wrong < 0.25 * size):
        sys.exit("the model is not that of plain torch")


def measure(name, passes, model, step, vocabulary, batch, length, seconds=PATIENCE):
    torch.manual_seed(0)
    token_ids = torch.randint(vocabulary, (batch, length), device="cuda")
    start = time.perf_counter()
    value = step(token_ids).item()
    first = time.perf_counter() - start
    if not math.isfinite(value):
        sys.exit(f"{name}: the loss is {value}")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    step(token_ids)
    torch.cuda.synchronize()
    calls = max(1, min(5, int(1 / (time.perf_counter() - start))))
    found, end = [], time.perf_counter() + seconds
    while len(found) < REPEATS and (len(found) < LEAST or time.perf_counter() < end):
        start = time.perf_counter()
        for _ in range(calls):
            step(token_ids)
        torch.cuda.synchronize()
        found.append(batch * length * calls / (time.perf_counter() - start))
    speeds = times(found)
    cells = [name, passes, f"{batch}×{length}", f"{speeds.median:,.0f}"]
    cells += [f"{speeds.lower:,.0f} to {speeds.upper:,.0f}", len(found)]
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(line([*cells, f"{peak:.1f}", f"{first:.1f}", f"{value:.2f}"]), flush=True)


HEADER = ["model", "passes", "batch×length", "tokens/s", "quartiles", "repeats", "peak GiB"]
HEADER += ["first step s", "loss"]


class Clock:
    """Tracks the time budget of the run."""

    def __init__(self, seconds):
        self.end = time.monotonic() + seconds

    def allows(self, what):
        late = time.monotonic() > self.end
        if late:
            print(f"not begun, as time is up: {what}", file=sys.stderr, flush=True)
        return not late


def measure_ours(pair, clock):
    model = ours(pair)
    vocabulary = model.backbone.vocabulary_size
    compare_with_plain(model, vocabulary)
    print(line(HEADER))
    print(line(["---"] * 3 + ["---:"] * (len(HEADER) - 3)), flush=True)
    if pair.family is GriffinCausalLM:
        update = update_of(model)
        for made_of, loss in (
            ("hidden states", loss_of_hidden_states(model)),
            ("logits", loss_of_logits(model)),
        ):
            if clock.allows(f"{pair.name}, an update, {made_of}"):
                passes = f"with update, loss of {made_of}"
                step = step_of(model, loss, update)
                attempt(pair.name, passes, model, step, vocabulary, *SIZES[0])
                del step
        del update, loss
        release()
    for size in SIZES:
        if not clock.allows(f"{pair.name}, {size}"):
            continue
        step = step_of(model, loss_of_hidden_states(model))
        if not attempt(pair.name, "forward, backward", model, step, vocabulary, *size):
            del model, step
            release()
            model = ours(pair, recomputing=True)
            step = step_of(model, loss_of_hidden_states(model))
            passes = "forward, backward, blocks recomputed"
            attempt(pair.name, passes, model, step, vocabulary, *size)


def measure_peer(pair, clock):
    sizes = pair.row.backbone_arguments
    model = pair.make_peer(sizes).train()
    count = sum(weight.numel() for weight in weights_of(model))
    if count != pair.row.parameters:
        sys.exit(f"{pair.peer}: {count:,} parameters, not the {pair.row.parameters:,} of ours")
    step = step_of(model, their_loss(model))
    for size in pair.peer_sizes:
        if clock.allows(f"{pair.peer}, {size}"):
            passes = "forward, backward"
            if not attempt(pair.peer, passes, model, step, sizes["vocabulary_size"], *size):
                model.gradient_checkpointing_enable()
                passes += ", blocks recomputed"
                attempt(pair.peer, passes, model, step, sizes["vocabulary_size"], *size)


def attempt(name, passes, model, step, vocabulary, batch, length):
    """Measures, and returns False if memory was exhausted."""
    try:
        measure(name, passes, model, step, vocabulary, batch, length)
    except torch.cuda.OutOfMemoryError:
        print(f"no memory: {name}, {passes}, {batch}×{length}", file=sys.stderr, flush=True)
        for weight in weights_of(model):
            weight.grad = None
        return False
    finally:
        release()
    return True


def measure_compiled(pair):
    """Times `train_on_batch`, the step of `fit`, compiled as one graph."""
    model = ours(pair)
    optimizer = keras.optimizers.AdamW(1e-4, beta_2=BETA_2)
    keras_recurrent.exclude_from_weight_decay(optimizer, model)
    model.compile(optimizer, jit_compile=True)

    def step(token_ids):
        x = {"token_ids": token_ids, "padding_mask": torch.ones_like(token_ids)}
        loss = model.train_on_batch(x, token_ids.roll(-1, 1))
        return torch.as_tensor(loss[0] if isinstance(loss, (list, tuple)) else loss)

    print(line(HEADER))
    print(line(["---"] * 3 + ["---:"] * (len(HEADER) - 3)), flush=True)
    vocabulary = model.backbone.vocabulary_size
    for size in (SIZES[1], SIZES[0]):
        attempt(pair.name, "with update, compiled", model, step, vocabulary, *size)


def release():
    """Frees memory. Only the garbage collector frees a Keras model's reference cycles."""
    gc.collect()
    torch.cuda.empty_cache()


def main(names, seconds, compiled, only):
    unknown = set(names) - set(MODELS)
    if unknown:
        sys.exit(f"no such model: {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    peers.compile_side_by_side()
    clock = Clock(seconds)
    packages = ("torch", "triton", "flash-linear-attention", "transformers", "keras")
    versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in packages)
    print(f"# Whole models on a GPU\n\n{torch.cuda.get_device_name()}, {datetime.date.today()}.")
    print(f"{versions}. bfloat16.", flush=True)
    for name in names or MODELS:
        pair = MODELS[name]
        if compiled:
            measure_compiled(pair)
            continue
        if only != "peer":
            measure_ours(pair, clock)
        release()
        if only != "ours" and pair.make_peer is not None:
            measure_peer(pair, clock)
        release()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--only", choices=["ours", "peer"])
    given = parser.parse_args()
    main(given.names, given.seconds, given.compiled, given.only)
