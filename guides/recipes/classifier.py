"""# Classify texts

Train a classifier of texts: a recurrent network reads the tokens, and a linear layer predicts the
class from its last hidden state. With `bidirectional=True` the network also reads the text
backwards, and the linear layer uses both states.

    KERAS_BACKEND=jax python guides/recipes/classifier.py

In this example the texts are paragraphs of documentation and the classes are the Python packages
they come from. Pass `--data file.csv`, with the columns `text` and `label`, to use your own texts.
The recipe trains a forward and a bidirectional model, in minutes on two CPU cores.

Install with `pip install -e ".[jax]"`; replace `jax` by `torch` or `tensorflow` for other backends.
"""

# %% [markdown]
# ## Settings
#
# Keras reads `KERAS_BACKEND` once, at import: `"jax"`, `"torch"` or `"tensorflow"`.

# %%
import argparse
import ast
import collections
import csv
import importlib.util
import os
import pathlib
import sys

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np

from keras_recurrent import exclude_from_weight_decay
from keras_recurrent.models import GriffinTextClassifier, HGRN2TextClassifier

FAMILIES = {"griffin": GriffinTextClassifier, "hgrn2": HGRN2TextClassifier}

parser = argparse.ArgumentParser(description="Train a classifier of texts.")
parser.add_argument("--family", choices=FAMILIES, default="griffin")
parser.add_argument("--model", help="a name or a directory; by default hawk_tiny or hgrn2_tiny")
parser.add_argument("--data", type=pathlib.Path, help="CSV with the columns text and label")
parser.add_argument(
    "--packages", nargs="+", default=["asyncio", "email", "keras", "numpy"], help="without --data"
)
parser.add_argument("--most", type=int, default=600, help="maximum texts per class without --data")
parser.add_argument("--sequence-length", type=int, default=256, help="maximum tokens of a text")
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--learning-rate", type=float, default=3e-3)
parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("build/classifier"))
# In a notebook, which has no command line, change the defaults above.
arguments = parser.parse_args([] if "ipykernel" in sys.modules else None)
arguments.output.mkdir(parents=True, exist_ok=True)

# %% [markdown]
# ## Prepare texts and labels
#
# Training needs a list of strings and a list of integers, the class of each text, starting at 0. A
# random fifth of the texts is held out.


# %%
def paragraphs(package):
    """Returns the unique paragraphs of a package's docstrings, without importing it."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise SystemExit(f"--packages: no package {package!r} is installed.")
    texts = {}
    for file in sorted(pathlib.Path(found.submodule_search_locations[0]).rglob("*.py")):
        if "tests" in file.parts or file.name.endswith("_test.py"):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                parts = (ast.get_docstring(node) or "").split("\n\n")
                texts.update((" ".join(part.split()), package) for part in parts)
    return [text for text in texts if len(text) > 60]  # shorter texts carry little information


def read(path):
    """Returns pairs of text and label."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        if not {"text", "label"} <= set(rows.fieldnames or ()):
            raise SystemExit(f"--data: {path} has no columns 'text' and 'label' in its first line.")
        return [(row["text"], row["label"]) for row in rows]


rng = np.random.default_rng(0)
if arguments.data:
    pairs = read(arguments.data)
else:
    pairs = [
        (str(text), package)
        for package in arguments.packages
        for text in rng.permutation(paragraphs(package))[: arguments.most]
    ]
names = sorted({name for _, name in pairs})
order = rng.permutation(len(pairs))
texts = [pairs[i][0] for i in order]
labels = [names.index(pairs[i][1]) for i in order]
cut = len(texts) // 5
held_out_texts, held_out_labels = texts[:cut], np.array(labels[:cut])
texts, labels = texts[cut:], labels[cut:]
print(
    f"{len(texts)} texts to learn, {cut} held out: {dict(collections.Counter(n for _, n in pairs))}"
)

# %% [markdown]
# ## Compute baselines
#
# The first baseline always predicts the most frequent training class. The second is a naive Bayes
# classifier: it treats words as independent and multiplies their probabilities in each class. With
# fewer than a few thousand texts it is hard to beat, because it does not have to learn words.


# %%
def naive_bayes(texts, labels, others):
    counts = [collections.Counter() for _ in names]
    for text, label in zip(texts, labels, strict=True):
        counts[label].update(text.split())
    vocabulary = len(set().union(*counts))
    prior = np.log(np.bincount(labels, minlength=len(names)) + 1)

    def scores(text):
        return [
            sum(np.log((count[word] + 1) / (count.total() + vocabulary)) for word in text.split())
            for count in counts
        ]

    return np.array([np.argmax(prior + scores(text)) for text in others])


most_frequent = np.bincount(labels).argmax()
print(f"The most frequent class: {(held_out_labels == most_frequent).mean():.1%} right")
counted = naive_bayes(texts, labels, held_out_texts)
print(f"Naive Bayes: {(held_out_labels == counted).mean():.1%} right")

# %% [markdown]
# ## Train two models
#
# `hawk_tiny` is Hawk, Griffin without attention, with 0.9 million random weights. It reads bytes
# and must learn words from letters. To start from a pretrained language model, pass a directory
# written by `save_to_preset`, or a published model such as `recurrentgemma_2b` or
# `hgrn2_1.3b_100b`, as `--model`, with `--learning-rate 5e-5` or so.
#
# `dropout` hides a random part of the hidden state from the linear layer in each training step,
# which reduces overfitting.


# %%
def train(bidirectional):
    keras.utils.set_random_seed(0)
    default = {"griffin": "hawk_tiny", "hgrn2": "hgrn2_tiny"}[arguments.family]
    model = FAMILIES[arguments.family].from_preset(
        arguments.model or default,
        num_classes=len(names),
        bidirectional=bidirectional,
        dropout=0.2,
        sequence_length=arguments.sequence_length,
    )
    steps = arguments.epochs * -(-len(texts) // arguments.batch_size)
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, steps, warmup_target=arguments.learning_rate, warmup_steps=max(1, steps // 20)
    )
    optimizer = keras.optimizers.AdamW(rate, weight_decay=0.1, global_clipnorm=1.0)
    exclude_from_weight_decay(optimizer, model)  # keeps weight decay from shortening the memory
    model.compile(optimizer, metrics=["accuracy"])
    name = "In both directions" if bidirectional else "Forwards"
    print(f"\n{name}: {model.count_params():,} weights")
    model.fit(
        texts,
        labels,
        validation_data=(held_out_texts, held_out_labels),
        batch_size=arguments.batch_size,
        epochs=arguments.epochs,
        verbose=2,
    )
    return model


forwards = train(bidirectional=False)
model = train(bidirectional=True)

# %% [markdown]
# ## Evaluate
#
# `evaluate` returns the loss and the accuracy on held-out texts. The confusion matrix shows which
# classes are mistaken for which: each row is a true class, each column a predicted one.

# %%
for name, one in (("Forwards", forwards), ("In both directions", model)):
    found = one.evaluate(
        held_out_texts,
        held_out_labels,
        batch_size=arguments.batch_size,
        return_dict=True,
        verbose=0,
    )
    print(f"{name}: {found['accuracy']:.1%} of held-out texts right, loss {found['loss']:.3f}")

logits = model.predict(held_out_texts, batch_size=arguments.batch_size, verbose=0)
said = logits.argmax(axis=1)
print(f"\n{'':12}" + "".join(f"{name:>12}" for name in names))
for i, name in enumerate(names):
    row = np.bincount(said[held_out_labels == i], minlength=len(names))
    print(f"{name:12}" + "".join(f"{count:12}" for count in row))

# %% [markdown]
# The outputs are logits; `softmax` converts them to probabilities. These are the wrong predictions
# with the highest probability:

# %%
probabilities = keras.ops.convert_to_numpy(keras.ops.softmax(logits))
wrong = np.flatnonzero(said != held_out_labels)
for i in wrong[np.argsort(-probabilities[wrong].max(axis=1))][:3]:
    print(f"{names[said[i]]} with {probabilities[i].max():.0%}, but {names[held_out_labels[i]]}:")
    print(f"    {held_out_texts[i][:200]}")

# %% [markdown]
# ## Save and load
#
# `save_to_preset` writes a directory with the weights, the tokenizer and the number of classes;
# `from_preset` loads it. The names of the classes are not part of it, so save them as well.

# %%
folder = arguments.output / "classifier"
model.save_to_preset(str(folder))
(folder / "classes.txt").write_text("\n".join(names), encoding="utf-8")
loaded = FAMILIES[arguments.family].from_preset(str(folder))
again = loaded.predict(held_out_texts, batch_size=arguments.batch_size, verbose=0)
print(f"Saved to {folder} and loaded: the logits differ by {np.abs(again - logits).max()}")
