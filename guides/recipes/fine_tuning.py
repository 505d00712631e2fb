"""# Fine-tune a published language model

A language model that was trained on a great deal of text learns the style and the subject of a
little text of yours. Not all of its weights have to change for that: *LoRA* (low-rank adaptation,
[Hu et al. 2021](https://arxiv.org/abs/2106.09685)) freezes them, and trains small matrices beside
them, a hundredth of their number or less.

    KERAS_BACKEND=jax python guides/recipes/fine_tuning.py

This takes HGRN2 of 1.3 billion parameters from the Hugging Face Hub, 2.7 GB, and a GPU of 16 GB or
more. `--model` takes another model: a name such as `recurrentgemma_2b` (which asks for a login at
the Hub, `hf auth login`), `hf://owner/repository`, or a directory. On two CPU cores,

    KERAS_BACKEND=jax python guides/recipes/fine_tuning.py --model hawk_tiny --dtype float32

goes through all steps in minutes, with a model that starts from random weights and therefore learns
little: nearly all of it stays frozen.

It needs `pip install -e ".[jax,huggingface]"`, or `torch` or `tensorflow` in place of `jax`.
"""

# %% [markdown]
# ## Settings
#
# Keras reads `KERAS_BACKEND` once, at import: `"jax"`, `"torch"` or `"tensorflow"`.

# %%
import argparse
import json
import math
import os
import pathlib
import pydoc_data.topics
import sys

os.environ.setdefault("KERAS_BACKEND", "jax")

# Before KerasHub, whose import of TensorFlow disables the Triton kernels on JAX.
import keras_recurrent  # noqa: F401

# isort: split
import keras
import keras_hub

from keras_recurrent.callbacks import TrainingBackup

parser = argparse.ArgumentParser(description="Fine-tune a published language model.")
parser.add_argument("--model", default="hgrn2_1.3b_100b", help="a name, hf://owner/repository, …")
parser.add_argument("--dtype", default="mixed_bfloat16", help="float32 on a CPU")
parser.add_argument("--text", nargs="+", help="files: a document a line, or .jsonl with 'text'")
parser.add_argument("--most", type=int, help="read only so many documents")
parser.add_argument("--sequence-length", type=int, default=512, help="tokens a row")
parser.add_argument("--batch-size", type=int, default=4, help="rows a step")
parser.add_argument("--epochs", type=int, default=5, help="at most")
parser.add_argument("--rank", type=int, default=8, help="of the low-rank matrices")
parser.add_argument("--learning-rate", type=float, default=2e-4)
parser.add_argument("--prompt", default="The statement")
parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("build/fine_tuning"))
# A notebook has no command line: change the defaults above there.
arguments = parser.parse_args([] if "ipykernel" in sys.modules else None)
arguments.output.mkdir(parents=True, exist_ok=True)

# %% [markdown]
# ## Texts
#
# A list of strings is all that training needs. Without `--text` they are Python's own
# documentation, which `help("while")` and its like show: it is there wherever Python is. Every
# tenth document is held out. The model never learns from it, so that it can tell when the model
# stops to learn what is true of other texts, too, and begins to learn these by heart. Topics share
# paragraphs, and a paragraph of which there is a copy is kept once.


# %%
def read(paths):
    """The documents of files: lines of `.txt`, and the "text" of lines of `.jsonl`."""
    for path in map(pathlib.Path, paths):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.strip():
                yield json.loads(line)["text"] if path.suffix == ".jsonl" else line


def documentation():
    seen = set()
    for topic in pydoc_data.topics.topics.values():
        new = [p for p in dict.fromkeys(topic.split("\n\n")) if p not in seen]
        seen.update(new)
        if new:
            yield "\n\n".join(new)


documents = list(read(arguments.text) if arguments.text else documentation())[: arguments.most]
if len(documents) < 2:
    raise SystemExit(f"--text: two documents are needed at least, and there are {len(documents)}.")
training, held_out = [d for i, d in enumerate(documents) if i % 10], documents[::10]
print(f"{len(training)} documents to learn, {len(held_out)} held out")

# %% [markdown]
# ## The model
#
# `from_preset` brings the weights and the tokenizer.
#
# - `dtype="mixed_bfloat16"` computes in 16 bits and keeps weights in 32: 5.5 GB of weights here.
#   `"bfloat16"` keeps them in 16 as well, half of that; small updates are then rounded away, so it
#   is for lack of memory alone. On a CPU `"float32"` is fastest.
# - `packed=True` puts several documents into a row, which the model keeps apart, so that no
#   computation is spent on padding.


# %%
def load():
    keras.utils.set_random_seed(0)  # a model without published weights is the same each time, too
    return keras_hub.models.CausalLM.from_preset(
        arguments.model,
        dtype=arguments.dtype,
        packed=True,
        sequence_length=arguments.sequence_length,
    )


model = load()
print(f"{model.count_params():,} parameters on {keras.config.backend()}")

# %% [markdown]
# ## LoRA
#
# Low-rank matrices are added to the linear maps that mix tokens; `target_layer_names` names others.
# The second of each pair starts at zero, so the model is what it was until training begins. After
# `enable_lora`, and before training, a model is compiled: that says the optimizer, and here also
# that text is continued by the most probable token (`"greedy"`), for the sake of comparison.

# %%
model.backbone.enable_lora(arguments.rank)
model.compile(
    keras.optimizers.AdamW(arguments.learning_rate, weight_decay=0.0, global_clipnorm=1.0),
    sampler="greedy",
)
trained = sum(math.prod(weight.shape) for weight in model.trainable_weights)
print(f"{trained:,} of them are trained, {trained / model.count_params():.2%}")

# %% [markdown]
# ## Before
#
# `evaluate` gives the loss on the held-out documents, in nats, and how many of their tokens the
# model would have said itself. The loss is a mean over all places of the rows; the few at their
# ends that hold no token count as 0.


# %%
def report(when):
    found = model.evaluate(held_out, batch_size=arguments.batch_size, return_dict=True, verbose=0)
    accuracy = found["sparse_categorical_accuracy"]
    print(f"{when}: loss {found['loss']:.3f}, accuracy {accuracy:.1%}")
    print(model.generate(arguments.prompt, max_length=60) + "\n")


report("Before training")

# %% [markdown]
# ## Training, which can be broken off
#
# - `EarlyStopping` ends the training when an epoch makes the held-out loss no better.
# - `BestAdapters` writes the low-rank matrices after each epoch that is the best so far, into a
#   small file. Keras's `ModelCheckpoint` writes all weights instead, with the matrices added to
#   them: that is what a model without LoRA loads, but one with LoRA then has matrices of zeros,
#   which neither train on nor can be saved alone.
# - `TrainingBackup` keeps all that is needed to go on: stop this script at any moment, by Ctrl-C
#   or because the machine goes down, and start it again with the same arguments. It continues at
#   the last backup, and ends in the same weights as if nothing had happened. What
#   `EarlyStopping` remembers is kept, too.
#
# When training has ended, the backup is deleted, and another start begins from the beginning.

# %%
adapters = arguments.output / "adapters.lora.h5"
patience = keras.callbacks.EarlyStopping(monitor="val_loss", patience=1, verbose=1)


class BestAdapters(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if patience.best_epoch == epoch:
            self.model.backbone.save_lora_weights(str(adapters))


backup = TrainingBackup(arguments.output / "run.backup", save_freq=100, callbacks=[patience])
model.fit(
    training,
    validation_data=held_out,
    batch_size=arguments.batch_size,
    epochs=arguments.epochs,
    callbacks=[patience, BestAdapters(), backup],  # in this order
    verbose=2,
)

# %% [markdown]
# ## After
#
# The last epoch need not be the best.

# %%
model.backbone.load_lora_weights(str(adapters))
report("After training")

# %% [markdown]
# ## What to keep
#
# The low-rank matrices alone are a small file, for whoever has the published model.
# `save_to_preset` writes a directory with everything, and `model.export_to_transformers(path)` one
# that the transformers library reads, with the low-rank matrices added to the weights.

# %%
print(f"{adapters}: {adapters.stat().st_size:,} bytes")

# %% [markdown]
# Whoever has the published model makes the fine-tuned one of it, and it writes the same.

# %%
again = load()
again.backbone.load_lora_weights(str(adapters))
again.compile(sampler="greedy")
texts = [one.generate(arguments.prompt, max_length=60) for one in (model, again)]
print(
    f"Loaded again it writes {'the same' if texts[0] == texts[1] else f'something else: {texts}'}."
)
