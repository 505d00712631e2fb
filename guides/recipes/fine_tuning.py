"""# Fine-tune a published language model

Adapt a pretrained language model to the style and subject of your texts. *LoRA* (low-rank
adaptation, [Hu et al. 2021](https://arxiv.org/abs/2106.09685)) freezes the pretrained weights and
trains small additional matrices, with at most a hundredth of the parameters.

    KERAS_BACKEND=jax python guides/recipes/fine_tuning.py

The default model, HGRN2 with 1.3 billion parameters, is a download of 2.7 GB from the Hugging Face
Hub and needs a GPU with at least 16 GB. `--model` selects another one: a name such as
`recurrentgemma_2b` (which requires a login, `hf auth login`), `hf://owner/repository`, or a
directory. To try the recipe on two CPU cores, in minutes, use a tiny model:

    KERAS_BACKEND=jax python guides/recipes/fine_tuning.py --model hawk_tiny --dtype float32

Its frozen weights are random, so it learns little.

Install with `pip install -e ".[jax,huggingface]"`; replace `jax` by `torch` or `tensorflow` for
other backends.
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
parser.add_argument("--text", nargs="+", help="files: a document per line, or .jsonl with 'text'")
parser.add_argument("--most", type=int, help="maximum number of documents")
parser.add_argument("--sequence-length", type=int, default=512, help="tokens of a sequence")
parser.add_argument("--batch-size", type=int, default=4, help="sequences per step")
parser.add_argument("--epochs", type=int, default=5, help="maximum number of epochs")
parser.add_argument("--rank", type=int, default=8, help="of the low-rank matrices")
parser.add_argument("--learning-rate", type=float, default=2e-4)
parser.add_argument("--prompt", default="The statement")
parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("build/fine_tuning"))
# In a notebook, which has no command line, change the defaults above.
arguments = parser.parse_args([] if "ipykernel" in sys.modules else None)
arguments.output.mkdir(parents=True, exist_ok=True)

# %% [markdown]
# ## Prepare texts
#
# Training needs a list of strings. Without `--text` the recipe uses Python's help topics, such as
# `help("while")`, which every installation has. Every tenth document is held out, to detect
# overfitting. Topics share paragraphs; duplicates are removed.


# %%
def read(paths):
    """Yields documents: the lines of text files, and the "text" of `.jsonl` lines."""
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
# ## Load the model
#
# `from_preset` loads the weights and the tokenizer.
#
# - `dtype="mixed_bfloat16"` computes in 16 bits and stores weights in 32 bits, here 5.5 GB.
#   `"bfloat16"` also stores them in 16 bits, half of that; LoRA trains only its own weights, which
#   stay in 32 bits. On a CPU `"float32"` is fastest.
# - `packed=True` puts several documents into one sequence, so that no computation is spent on
#   padding. The model keeps the documents apart.


# %%
def load():
    keras.utils.set_random_seed(0)  # makes models without published weights reproducible
    return keras_hub.models.CausalLM.from_preset(
        arguments.model,
        dtype=arguments.dtype,
        packed=True,
        sequence_length=arguments.sequence_length,
    )


model = load()
print(f"{model.count_params():,} parameters on {keras.config.backend()}")

# %% [markdown]
# ## Enable LoRA
#
# Low-rank matrices are added to the projections of the token mixers; `target_layer_names` selects
# other layers. The second matrix of each pair starts at zero, so the model is unchanged before
# training. Compile after `enable_lora`. Greedy decoding makes the texts below comparable.

# %%
model.backbone.enable_lora(arguments.rank)
model.compile(
    keras.optimizers.AdamW(arguments.learning_rate, weight_decay=0.0, global_clipnorm=1.0),
    sampler="greedy",
)
trained = sum(math.prod(weight.shape) for weight in model.trainable_weights)
print(f"{trained:,} of them are trained, {trained / model.count_params():.2%}")

# %% [markdown]
# ## Evaluate before training
#
# `evaluate` returns the loss on the held-out documents, in nats, and the accuracy of predicted
# tokens. The loss is the mean over all positions of the packed sequences; padding counts as 0.


# %%
def report(when):
    found = model.evaluate(held_out, batch_size=arguments.batch_size, return_dict=True, verbose=0)
    accuracy = found["sparse_categorical_accuracy"]
    print(f"{when}: loss {found['loss']:.3f}, accuracy {accuracy:.1%}")
    print(model.generate(arguments.prompt, max_length=60) + "\n")


report("Before training")

# %% [markdown]
# ## Train, with early stopping and backups
#
# - `EarlyStopping` ends training when the held-out loss stops improving.
# - `BestAdapters` saves the low-rank matrices to a small file after each epoch that is the best so
#   far. Keras's `ModelCheckpoint` is no substitute: it merges the matrices into the saved weights.
#   Training cannot continue from these, and the matrices cannot be saved separately.
# - `TrainingBackup` saves the state of training. After an interruption, start the script again with
#   unchanged arguments: it resumes at the last backup, including the state of `EarlyStopping`, and
#   ends with the same weights as an uninterrupted run.
#
# The backup is deleted when training has ended; the next run starts from the beginning.

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
# ## Evaluate after training
#
# Load the adapters of the best epoch, which may not be the last one.

# %%
model.backbone.load_lora_weights(str(adapters))
report("After training")

# %% [markdown]
# ## Save and load
#
# The adapter file is small and works together with the published model. To save the whole model,
# call `save_to_preset`. `model.export_to_transformers(path)` writes a directory that the
# transformers library loads, with the low-rank matrices merged into the weights.

# %%
print(f"{adapters}: {adapters.stat().st_size:,} bytes")

# %% [markdown]
# Load the published model and the adapters again; the generated text is equal.

# %%
again = load()
again.backbone.load_lora_weights(str(adapters))
again.compile(sampler="greedy")
texts = [one.generate(arguments.prompt, max_length=60) for one in (model, again)]
print(
    f"Loaded again it writes {'the same' if texts[0] == texts[1] else f'something else: {texts}'}."
)
