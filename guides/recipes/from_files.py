"""# Train from scratch on files, with a custom tokenizer

Train a SentencePiece vocabulary
([Kudo and Richardson 2018](https://arxiv.org/abs/1808.06226)) on your text, and a language model
with it. A vocabulary made from this text encodes it with fewer tokens, so that each training step
covers more of it.

    KERAS_BACKEND=jax python guides/recipes/from_files.py

This trains the vocabulary and a small Hawk on Python's documentation, in minutes on two CPU cores.
`--text corpus/*.txt` selects files of any size, with one document per line; in `.jsonl` files, each
line is an object whose "text" is the document.

Install with `pip install -e ".[jax]" sentencepiece`; replace `jax` by `torch` or `tensorflow` for
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

import keras

from keras_recurrent import exclude_from_weight_decay
from keras_recurrent.callbacks import TrainingBackup
from keras_recurrent.datasets import PackedText
from keras_recurrent.models import GriffinBackbone, GriffinCausalLM, GriffinCausalLMPreprocessor
from keras_recurrent.tokenizers import SentencePieceTokenizer

try:
    import sentencepiece
except ImportError as error:
    raise SystemExit("This recipe trains a vocabulary with `pip install sentencepiece`.") from error

parser = argparse.ArgumentParser(description="Train a language model on files.")
parser.add_argument("--text", nargs="+", type=pathlib.Path, help="files to learn")
parser.add_argument("--held-out", nargs="+", type=pathlib.Path, help="files to test on, of --text")
parser.add_argument("--vocabulary-size", type=int, default=2000)
parser.add_argument("--width", type=int, default=128, help="of the network")
parser.add_argument("--num-layers", type=int, default=4)
parser.add_argument("--sequence-length", type=int, default=256, help="tokens of a sequence")
parser.add_argument("--batch-size", type=int, default=8, help="sequences per step")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--steps-per-epoch", type=int, default=100)
parser.add_argument("--learning-rate", type=float, default=6e-3)
parser.add_argument("--prompt", default="The statement")
parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("build/from_files"))
# In a notebook, which has no command line, change the defaults above.
arguments = parser.parse_args([] if "ipykernel" in sys.modules else None)
arguments.output.mkdir(parents=True, exist_ok=True)
if (arguments.text is None) != (arguments.held_out is None):
    raise SystemExit("--text and --held-out: give both, or neither for Python's documentation.")
keras.utils.set_random_seed(0)

# %% [markdown]
# ## Prepare files
#
# Without `--text`, Python's documentation is written to two files, with every tenth topic in the
# held-out one. The documents have several lines, so the files are `.jsonl`. Topics share
# paragraphs; each is kept once, so that no held-out paragraph occurs in training.


# %%
def documentation():
    seen = set()
    for topic in pydoc_data.topics.topics.values():
        new = [p for p in dict.fromkeys(topic.split("\n\n")) if p not in seen]
        seen.update(new)
        if new:
            yield "\n\n".join(new)


def write(path, documents):
    lines = [json.dumps({"text": document}) + "\n" for document in documents]
    path.write_text("".join(lines), encoding="utf-8")
    return [path]


if arguments.text is None:
    topics = list(documentation())
    training = [topic for i, topic in enumerate(topics) if i % 10]
    arguments.text = write(arguments.output / "training.jsonl", training)
    arguments.held_out = write(arguments.output / "held_out.jsonl", topics[::10])


def documents(paths):
    """Yields the documents that `PackedText` reads from the files."""
    for path in paths:
        with path.open(encoding="utf-8") as file:
            for line in filter(str.strip, file):
                yield json.loads(line)["text"] if path.suffix == ".jsonl" else line.rstrip("\n")


# %% [markdown]
# ## Train the vocabulary
#
# SentencePiece reads the files once and writes a vocabulary file. These settings differ from its
# defaults:
#
# - Decoding restores the text exactly: no normalization (`normalization_rule_name="identity"`), and
#   no blanks are merged or added.
# - `byte_fallback` encodes characters outside the vocabulary as bytes, with 256 reserved tokens.
# - Four tokens are special: padding, start and end of a document, and unknown.
#
# For a large corpus, `input_sentence_size=1_000_000` samples that many lines.

# %%
vocabulary = arguments.output / "tokenizer.model"
with vocabulary.open("wb") as file:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=documents(arguments.text),
        model_writer=file,
        vocab_size=arguments.vocabulary_size,
        model_type="bpe",
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        byte_fallback=True,
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        max_sentence_length=2**24,  # bytes of a document; longer ones would be skipped
        minloglevel=1,
    )
tokenizer = SentencePieceTokenizer(vocabulary.read_bytes())

held_out = list(documents(arguments.held_out))
tokens = tokenizer(held_out)
assert tokenizer.detokenize(tokens) == held_out  # nothing is lost
num_tokens = sum(map(len, tokens))
num_bytes = sum(len(text.encode()) for text in held_out)
print(f"{tokenizer.vocabulary_size():,} tokens, {num_bytes / num_tokens:.2f} bytes each")

# %% [markdown]
# ## Build the model
#
# The arguments of the backbone set its size. For a published size, use
# `GriffinBackbone.from_preset("hawk_100m", vocabulary_size=...)`. `block_types=("recurrent",)`
# makes the model a Hawk; Griffin has `("recurrent", "recurrent", "local_attention")`.
# `HGRN2Backbone` is another family with the same interface.
#
# The preprocessor packs documents into sequences of `sequence_length` tokens, and the model keeps
# the documents apart. A longer document is split over several sequences, which do not share
# their state.

# %%
backbone = GriffinBackbone(
    vocabulary_size=tokenizer.vocabulary_size(),
    num_layers=arguments.num_layers,
    hidden_dim=arguments.width,
    intermediate_dim=3 * arguments.width,
    lru_width=arguments.width * 4 // 3 // 8 * 8,
    num_blocks=8,
    block_types=("recurrent",),
)
preprocessor = GriffinCausalLMPreprocessor(
    tokenizer, sequence_length=arguments.sequence_length, packed=True
)
model = GriffinCausalLM(backbone, preprocessor)
print(f"{model.count_params():,} parameters on {keras.config.backend()}")

# %% [markdown]
# ## Train
#
# `PackedText` reads the files during training, so they need not fit into memory. With a `seed` it
# shuffles them in each pass and repeats without end; `steps_per_epoch` sets the length of an epoch.
# Held-out text is read once and in order (`passes=1`).
#
# `TrainingBackup` saves the state of training, including the position in the files. After an
# interruption, start the script again with unchanged arguments: it resumes within the epoch.
#
# The loss is in nats per token. To compare models with different vocabularies, convert it to bits
# per byte: the nats of all tokens, including the end token of each document, divided by log 2 and
# by the number of bytes.


# %%
def bits_per_byte(nats_a_token):
    return nats_a_token * (num_tokens + len(held_out)) / num_bytes / math.log(2)


steps = arguments.epochs * arguments.steps_per_epoch
rate = keras.optimizers.schedules.CosineDecay(
    0.0, steps, warmup_target=arguments.learning_rate, warmup_steps=max(1, steps // 20)
)
optimizer = keras.optimizers.AdamW(rate, weight_decay=0.1, global_clipnorm=1.0)
exclude_from_weight_decay(optimizer, model)  # keeps weight decay from shortening the memory
model.compile(
    optimizer,
    weighted_metrics=[keras.metrics.SparseCategoricalCrossentropy(from_logits=True, name="nats")],
    sampler="top_p",
)
paths = list(map(str, arguments.text))
rows = PackedText(paths, preprocessor, arguments.batch_size, seed=0)
validation = PackedText(
    list(map(str, arguments.held_out)), preprocessor, arguments.batch_size, passes=1
)
backup = TrainingBackup(arguments.output / "run.backup", save_freq=100, data=rows)
history = model.fit(
    rows,
    validation_data=validation,
    steps_per_epoch=arguments.steps_per_epoch,
    epochs=arguments.epochs,
    callbacks=[backup],
    verbose=2,
)
for epoch, nats in zip(history.epoch, history.history["val_nats"], strict=True):
    print(f"Epoch {epoch + 1}: {bits_per_byte(nats):.3f} bits a byte of held-out text")

# %% [markdown]
# ## Generate, save and load
#
# `save_to_preset` writes a directory with weights, vocabulary and settings.

# %%
print(model.generate(arguments.prompt, max_length=100))
folder = arguments.output / "model"
model.save_to_preset(str(folder))
loaded = GriffinCausalLM.from_preset(str(folder))
found = [one.preprocessor.tokenizer(arguments.prompt).tolist() for one in (model, loaded)]
print(f"Saved to {folder}: {arguments.prompt!r} is {found[1]}, as it was: {found[0] == found[1]}")
