"""# Train from scratch on files, with a tokenizer of your own

A language model does not read letters but *tokens*, pieces of text from a fixed vocabulary. Which
pieces these are is learned from text, too: SentencePiece
([Kudo and Richardson 2018](https://arxiv.org/abs/1808.06226)) joins what often stands together. A
vocabulary from your own text makes it shorter in tokens, so that a step reads more of it.

    KERAS_BACKEND=jax python guides/recipes/from_files.py

trains the vocabulary and then a small Hawk on Python's own documentation, in minutes on two CPU
cores. `--text corpus/*.txt` takes files of your own, of any size: a document a line, or
`.jsonl`, where a line is an object with the document as its "text".

It needs `pip install -e ".[jax]" sentencepiece`, or `torch` or `tensorflow` in place of `jax`.
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
parser.add_argument("--sequence-length", type=int, default=256, help="tokens a row")
parser.add_argument("--batch-size", type=int, default=8, help="rows a step")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--steps-per-epoch", type=int, default=100)
parser.add_argument("--learning-rate", type=float, default=6e-3)
parser.add_argument("--prompt", default="The statement")
parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("build/from_files"))
# A notebook has no command line: change the defaults above there.
arguments = parser.parse_args([] if "ipykernel" in sys.modules else None)
arguments.output.mkdir(parents=True, exist_ok=True)
if (arguments.text is None) != (arguments.held_out is None):
    raise SystemExit("--text and --held-out: give both, or neither for Python's documentation.")
keras.utils.set_random_seed(0)

# %% [markdown]
# ## Files
#
# Without `--text`, Python's documentation is written to two files, every tenth topic into the one
# that is held out. Their documents have several lines, so the files are `.jsonl`. Topics share
# paragraphs; each is kept once, so that nothing that is held out was learned.


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
    """What `PackedText` reads of the files, one after another."""
    for path in paths:
        with path.open(encoding="utf-8") as file:
            for line in filter(str.strip, file):
                yield json.loads(line)["text"] if path.suffix == ".jsonl" else line.rstrip("\n")


# %% [markdown]
# ## The vocabulary
#
# SentencePiece reads the files once and writes a file. What is not left at its defaults:
#
# - Text comes back from its tokens exactly as it was: nothing is normalized
#   (`normalization_rule_name="identity"`), no blanks are merged or put before a text.
# - A character that is not in the vocabulary is written as its bytes (`byte_fallback`), for which
#   256 tokens are set aside, so that no text is unknown.
# - Four tokens stand for no text: padding, start and end of a document, and unknown.
#
# Of a large corpus it need not read all: `input_sentence_size=1_000_000` draws as many lines.

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
        max_sentence_length=2**24,  # bytes of a document; longer ones would be left out
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
# ## The model
#
# A backbone of a size of your own, around the vocabulary; `GriffinBackbone.from_preset("hawk_100m",
# vocabulary_size=...)` takes a published size instead. `block_types` makes it Hawk, whose blocks
# are all recurrent; Griffin has `("recurrent", "recurrent", "local_attention")`, and
# `HGRN2Backbone` is another family with the same interface.
#
# The preprocessor packs documents into rows of `sequence_length` tokens, and the model keeps them
# apart there. A document that is longer than a row goes on in the next, without memory of the one
# before.

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
# ## Training
#
# `PackedText` reads the files while the model learns; they need not fit into memory. With a `seed`
# it shuffles them, in each pass anew, and it never ends, so that `steps_per_epoch` says how long an
# epoch is. Held-out text is read once and in order (`passes=1`).
#
# `TrainingBackup` keeps what is needed to go on, the place in the files included: stop this script
# at any moment and start it again with the same arguments, and it continues inside the epoch.
#
# The loss is in nats a token. Models with different vocabularies are compared in bits a byte of
# text: the nats of all tokens, over log 2 and the number of bytes. An end token is read and
# predicted after each document, too.


# %%
def bits_per_byte(nats_a_token):
    return nats_a_token * (num_tokens + len(held_out)) / num_bytes / math.log(2)


steps = arguments.epochs * arguments.steps_per_epoch
rate = keras.optimizers.schedules.CosineDecay(
    0.0, steps, warmup_target=arguments.learning_rate, warmup_steps=max(1, steps // 20)
)
optimizer = keras.optimizers.AdamW(rate, weight_decay=0.1, global_clipnorm=1.0)
exclude_from_weight_decay(optimizer, model)  # weight decay would shorten the memory
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
# ## Writing, and keeping the model
#
# `save_to_preset` writes a directory with weights, vocabulary and settings.

# %%
print(model.generate(arguments.prompt, max_length=100))
folder = arguments.output / "model"
model.save_to_preset(str(folder))
loaded = GriffinCausalLM.from_preset(str(folder))
found = [one.preprocessor.tokenizer(arguments.prompt).tolist() for one in (model, loaded)]
print(f"Saved to {folder}: {arguments.prompt!r} is {found[1]}, as it was: {found[0] == found[1]}")
