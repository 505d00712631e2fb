"""Times training steps of whole models, next to models of other libraries.

Argument: a model of `benchmarks.models` or a preset.

Models of this package have the fused loss of hidden states, or with `--logits` the loss of logits.
Without `--update`, a step on torch is forward and backward, eager; with it, and always on other
backends, it is `train_on_batch` with `keras_recurrent.optimizers.AdamW`, compiled by JAX and
TensorFlow. On torch, `--jit` also measures it with `jit_compile=True`. Baselines run on torch, with
torch's fused AdamW, and have as many parameters. Small models use float32 and SGD; others use
random bfloat16 weights, or with `--mixed` float32 weights and computations in bfloat16.

With `--remat`, blocks are recomputed in the backward pass.

With `--losses`, a model is trained from scratch on the bytes of a text, with weights in float32, in
float32 with computations in bfloat16, and in bfloat16. All runs begin with the same weights and
take the same batches; their losses are compared.
"""

import functools
import math
import pathlib
import sys
import time

import keras
import numpy as np
from keras import ops

import keras_recurrent
from benchmarks import make_parser, peers, read_shape
from benchmarks.models import BASELINES, MODEL, make_model
from benchmarks.timing import (
    BACKEND,
    has_gpu,
    is_out_of_memory,
    peak_bytes,
    print_header,
    print_results,
    quartiles,
    random_tokens,
    reset_peak,
    seconds,
)
from guides.papers.runs import read_text, text_batches
from keras_recurrent.models import TokenCrossentropy

if BACKEND == "torch":
    import torch

REPEATS, LEAST, LONG = 5, 3, 12  # of a measurement; the second for steps of so many seconds
LAST, HELD_OUT = 200, 60  # steps whose losses are reported, of training and of held-out text


class LossOfLogits(TokenCrossentropy):
    """A `TokenCrossentropy` from logits, as the fused loss is for that very class only."""


def is_small(name):
    return name.endswith("_small")


def dtype_of(arguments):
    large = "mixed_bfloat16" if arguments.mixed else "bfloat16"
    return "float32" if is_small(arguments.model) else large


def build(arguments):
    keras.utils.set_random_seed(0)
    with keras.RematScope(mode="full" if arguments.remat else None):
        return make_model(arguments.model, dtype_of(arguments))


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


def our_loss(model, token_ids):
    """Returns a function without arguments: the loss on torch."""
    inputs = {"token_ids": token_ids, "padding_mask": torch.ones_like(token_ids, dtype=torch.bool)}
    labels = token_ids.roll(-1, 1)  # the label of the last token changes no timing

    def loss():
        hidden = model.backbone(inputs, training=True)
        return model.loss_of_hidden_states(hidden, labels)[0]

    return loss


def our_step(model, arguments, jit_compile, token_ids):
    """Returns a training step of this package's model, a function without arguments."""
    if BACKEND == "torch" and not arguments.update:
        return gradient_step(model, our_loss(model, token_ids))
    optimizer = keras.optimizers.SGD(1e-3)
    if not is_small(arguments.model):
        optimizer = keras_recurrent.optimizers.AdamW(1e-4)
        keras_recurrent.exclude_from_weight_decay(optimizer, model)
    loss = {"loss": LossOfLogits()} if arguments.logits else {}
    model.compile(optimizer, weighted_metrics=[], jit_compile=jit_compile, **loss)
    x = {"token_ids": token_ids, "padding_mask": ops.ones_like(token_ids)}
    return functools.partial(model.train_on_batch, x, ops.roll(token_ids, -1, 1))


def baseline_step(model, arguments, token_ids):
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


def measure(step, num_tokens):
    """Returns the measurements of a training step, a dictionary."""
    start = time.perf_counter()
    value = float(step())
    first = time.perf_counter() - start
    if not math.isfinite(value):
        sys.exit(f"The loss is {value}.")
    reset_peak()
    seconds(step)  # captures a CUDA graph if the step is compiled on torch
    second = seconds(step)
    calls, repeats = max(1, min(5, int(1 / second))), REPEATS if second < LONG else LEAST
    speeds = quartiles([num_tokens / seconds(step, calls) for _ in range(repeats)])
    return {
        "tokens/s": round(speeds.median),
        "quartiles": f"{speeds.lower:,.0f} to {speeds.upper:,.0f}",
        "repeats": repeats,
        "peak GiB": round(peak_bytes() / 2**30, 1),
        "first step s": round(first, 1),
        "loss": round(value, 4),
    }


def measure_sizes(key, make_step, arguments, vocabulary):
    """Yields the results of a model; `make_step` returns a training step on token ids."""
    for batch, length in arguments.sizes:
        token_ids = ops.convert_to_tensor(random_tokens(vocabulary, batch, length))
        try:
            found = measure(make_step(token_ids), batch * length)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            found = {"tokens/s": "no memory"}
        yield {**key, "batch×length": f"{batch}×{length}", **found}


def measure_ours(arguments, key):
    model = build(arguments)
    key = {**key, "loss of": "logits" if arguments.logits else "hidden states"}
    vocabulary = model.backbone.vocabulary_size
    for jit_compile in ("auto", True) if arguments.jit else ("auto",):
        name = f"{BACKEND}, `jit_compile=True`" if jit_compile is True else BACKEND
        step = functools.partial(our_step, model, arguments, jit_compile)
        yield from measure_sizes({"implementation": name, **key}, step, arguments, vocabulary)


def measure_baseline(arguments, key):
    library, _, make = BASELINES[arguments.model]
    model = build(arguments)
    peer, vocabulary = make(model).train(), model.backbone.vocabulary_size
    peer.config.use_cache = False
    if arguments.mixed:
        peer.float()
    if arguments.remat:
        peer.gradient_checkpointing_enable()
    ours, theirs = (sum(w.numel() for w in weights_of(m)) for m in (model, peer))
    if ours != theirs:
        sys.exit(f"{ours:,} parameters, and {theirs:,} in {library}")
    del model
    step = functools.partial(baseline_step, peer, arguments)
    key = {"implementation": library, **key, "loss of": "logits"}
    return measure_sizes(key, step, arguments, vocabulary)


def measure_all(arguments):
    gradients_only = BACKEND == "torch" and not arguments.update
    key = {
        "model": arguments.model,
        "pass": "forward, backward" if gradients_only else "with update",
        "blocks": "recomputed" if arguments.remat else "kept",
    }
    if arguments.only != "baseline":
        yield from measure_ours(arguments, key)
    if arguments.only == "ours" or BACKEND != "torch" or arguments.model not in BASELINES:
        return
    library, module, _ = BASELINES[arguments.model]
    if not peers.is_installed(module):
        print(f"{library} is not installed", file=sys.stderr)
        return
    reset_peak()
    yield from measure_baseline(arguments, key)


def measure_losses(arguments):
    """Yields the losses of a model that is trained with weights of several dtypes."""
    texts = read_text(arguments.losses, held_out=0.1)
    batch, length = arguments.sizes[0]
    keras.utils.set_random_seed(0)
    weights = make_model(arguments.model, "float32").get_weights()
    for dtype in ("float32", "mixed_bfloat16", "bfloat16"):
        model = make_model(arguments.model, dtype)
        model.set_weights(weights)
        rate = keras.optimizers.schedules.CosineDecay(
            0.0, arguments.steps - 100, warmup_target=arguments.learning_rate, warmup_steps=100
        )
        optimizer = keras_recurrent.optimizers.AdamW(rate, weight_decay=0.1, clipnorm=1.0)
        keras_recurrent.exclude_from_weight_decay(optimizer, model)
        model.compile(optimizer, weighted_metrics=[])
        calls = (model.train_on_batch, arguments.steps), (model.test_on_batch, HELD_OUT)
        training, held_out = (
            [
                float(call({"token_ids": x, "padding_mask": np.ones_like(x)}, y))
                for (x,), (y,) in text_batches(text, [0], steps, length, batch * length)
            ]
            for text, (call, steps) in zip(texts, calls, strict=True)
        )
        yield {
            "dtype policy": dtype,
            "steps": arguments.steps,
            "loss": round(float(np.mean(training[-LAST:])), 4),
            "held-out loss": round(float(np.mean(held_out)), 4),
        }


def main():
    parser = make_parser(__doc__)
    parser.add_argument("model", help=MODEL)
    parser.add_argument("--sizes", nargs="+", type=read_shape, help="such as 8x2048 1x65536")
    parser.add_argument("--update", action="store_true", help="with an optimizer's update")
    parser.add_argument("--mixed", action="store_true", help="weights in float32")
    parser.add_argument("--logits", action="store_true", help="loss of logits, with --update")
    parser.add_argument("--jit", action="store_true", help="also `jit_compile=True`, with --update")
    parser.add_argument("--remat", action="store_true", help="recompute blocks")
    parser.add_argument("--only", choices=("ours", "baseline"))
    parser.add_argument("--losses", type=pathlib.Path, metavar="TEXT", help="by dtype of weights")
    parser.add_argument("--steps", type=int, default=2000, help="of --losses, more than 100")
    parser.add_argument("--learning-rate", type=float, default=4e-3, help="peak of --losses")
    arguments = parser.parse_args()
    if arguments.jit and not (BACKEND == "torch" and arguments.update):
        parser.error("--jit requires the backend torch and --update")
    arguments.sizes = arguments.sizes or [(8, 2048), (1, 2048)]
    if BACKEND == "torch" and has_gpu():
        peers.compile_side_by_side()
    print_header("several dtypes" if arguments.losses else dtype_of(arguments))
    print_results((measure_losses if arguments.losses else measure_all)(arguments))


if __name__ == "__main__":
    main()
