"""Measures Griffin on a CPU.

    python benchmarks/griffin.py

Compares a training step with transformers' RecurrentGemma with the same weights on torch (requires
`pip install transformers`), and decoding speed by text length for Hawk, Griffin and the Transformer
of the same size. Prints Markdown; ten minutes on an otherwise idle machine.
"""

import argparse
import functools
import importlib.util
import os
import pathlib
import sys
import tempfile

os.environ.setdefault("KERAS_BACKEND", "torch")
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import keras
import numpy as np

from benchmarks.cpu import machine, table
from benchmarks.training_step import medians
from keras_recurrent.models import GriffinBackbone, GriffinCausalLM, memory_sizes
from keras_recurrent.presets.griffin import embedding_scale

BATCH, LENGTH, WIDTH, LAYERS, WINDOW, VOCABULARY = 8, 512, 256, 6, 256, 256
TARGET = 2.5  # minimum speedup over transformers
RATE = 1e-3
LENGTHS = (1024, 2048, 4096, 8192, 16384)


def griffin(width=WIDTH, layers=LAYERS, window=WINDOW):
    """Builds Griffin with RecurrentGemma's architecture, which both libraries compute."""
    backbone = GriffinBackbone(
        vocabulary_size=VOCABULARY,
        num_layers=layers,
        hidden_dim=width,
        intermediate_dim=3 * width,
        lru_width=width,
        num_blocks=4,
        block_types=("recurrent", "recurrent", "local_attention"),
        num_query_heads=4,
        head_dim=width // 4,
        sliding_window=window,
        partial_rotary_factor=0.5,
        embedding_scale=embedding_scale(width),
        final_logit_soft_cap=30.0,
    )
    model = GriffinCausalLM(backbone)
    model.compile(
        keras.optimizers.SGD(RATE),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[],
    )
    return model


def peer(model):
    """Builds the transformers model with the same weights."""
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "checkpoint")
        model.export_to_transformers(path)
        return transformers.AutoModelForCausalLM.from_pretrained(path).train()


def training(batch, length):
    """Returns seconds per step by name, and both losses of the first step, which must agree."""
    import torch

    model = griffin()
    theirs = peer(model)
    token_ids = np.random.default_rng(0).integers(0, VOCABULARY, (batch, length + 1))
    x = {"token_ids": token_ids[:, :-1], "padding_mask": np.ones((batch, length), "int32")}
    inputs, labels = (torch.tensor(ids) for ids in (token_ids[:, :-1], token_ids[:, 1:]))
    optimizer = torch.optim.SGD(theirs.parameters(), lr=RATE)

    def our_step():
        return float(model.train_on_batch(x, token_ids[:, 1:]))

    def their_step():
        optimizer.zero_grad()
        logits = theirs(inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    losses = our_step(), their_step()
    return medians({"keras_recurrent": our_step, "transformers": their_step}), losses


def training_table(batch, length):
    seconds, (ours, theirs) = training(batch, length)
    # For sequences longer than the window, transformers' mask may differ from the model's.
    assert abs(ours - theirs) < 0.01 * theirs, (ours, theirs)
    rows = [
        [name, f"{1000 * time:.0f}", f"{batch * length / time:,.0f}", f"{loss:.4f}"]
        for (name, time), loss in zip(seconds.items(), (ours, theirs), strict=True)
    ]
    ratio = seconds["transformers"] / seconds["keras_recurrent"]
    return "\n".join(
        [
            "## A training step, compared with transformers\n",
            f"Griffin with {LAYERS} layers, width {WIDTH}, window {WINDOW}, on {batch}×{length} "
            "tokens, float32, on torch:\nforward, backward and update. Both start from the same "
            "weights; they take turns, the median counts.\n"
            f"{ratio:.1f}× the tokens a second (target {TARGET}×).\n",
            table(["", "ms", "tokens a second", "loss of the first step"], rows),
        ]
    )


def compiled_step(model):
    """Returns `(tokens, cache) -> (logits, cache)`, compiled as in `generate`."""

    def step(tokens, cache):
        logits, _, cache = model.call_with_cache(tokens, cache)
        return logits, cache

    if keras.backend.backend() == "torch":
        import torch

        return torch.no_grad()(step)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.function(step, jit_compile=True)
    import jax

    variables = model.variables

    @jax.jit
    def stateless(values, tokens, cache):
        with keras.StatelessScope(state_mapping=zip(variables, values, strict=True)):
            return step(tokens, cache)

    return functools.partial(stateless, [variable.value for variable in variables])


def full_cache(model, batch, length):
    """Returns a cache that claims to hold `length` - 1 tokens, which changes no timing."""
    cache = model.backbone.get_initial_state(batch, max_length=length)
    rng = np.random.default_rng(0)
    values = {"position": length - 1, "segment": 0}

    def fill(path, array):
        if path[-1] in values:
            return keras.ops.full_like(array, values[path[-1]])
        return keras.ops.convert_to_tensor(0.1 * rng.normal(size=array.shape), array.dtype)

    filled = [fill(path, array) for path, array in keras.tree.flatten_with_path(cache)]
    return keras.tree.pack_sequence_as(cache, filled)


def decoding_rows(size, lengths, batch):
    for kind in ("hawk", "griffin", "mqa"):
        model = GriffinCausalLM.from_preset(f"{kind}_{size}", preprocessor=None)
        step = compiled_step(model)
        tokens = keras.ops.ones((batch, 1), "int32")

        def one_more(step, tokens, cache):
            return keras.ops.convert_to_numpy(step(tokens, cache)[0])

        caches = {length: full_cache(model, batch, length) for length in lengths}
        times = medians(
            {
                length: functools.partial(one_more, step, tokens, cache)
                for length, cache in caches.items()
            }
        )
        sizes = [memory_sizes(model, batch, length).cache / 2**20 for length in lengths]
        yield [f"{kind}_{size}", *(f"{batch / times[length]:.1f}" for length in lengths)]
        yield ["cache, MiB", *(f"{size:.1f}" for size in sizes)]


def decoding_table(size, lengths, batch):
    return "\n".join(
        [
            "## Writing, by the length of the text\n",
            f"Tokens a second of one more step after so many tokens, batch {batch}, float32, on "
            f"{keras.backend.backend()}, and below it\nwhat the cache takes. Griffin's window is "
            "1,024 tokens.\n",
            table(["preset", *(f"{n:,}" for n in lengths)], decoding_rows(size, lengths, batch)),
        ]
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch", type=int, default=BATCH, help="rows of the training step")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of the training step")
    parser.add_argument("--size", default="100m", help="of the presets that write")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    arguments = parser.parse_args()
    print(f"# Griffin on the CPU\n\n{machine()}\n")
    if keras.backend.backend() == "torch" and importlib.util.find_spec("transformers"):
        print(training_table(arguments.batch, arguments.length), end="\n\n", flush=True)
    else:
        print("(No training step: it takes torch and transformers.)\n", flush=True)
    print(decoding_table(arguments.size, arguments.lengths, batch=1))


if __name__ == "__main__":
    main()
