"""Train Hawk on Python's documentation and generate text, in minutes on two CPU cores.

    make quickstart                           # or, with the package installed:
    KERAS_BACKEND=jax python guides/quickstart.py

Hawk is a language model without attention. Its memory of the text is a state of fixed size, which a
gated linear recurrence updates at each token (De et al. 2024, arXiv:2402.19427).
"""

import argparse
import collections
import math
import os
import pathlib
import pydoc_data.topics

# Keras reads this once, at import. "torch" and "tensorflow" also work.
os.environ.setdefault("KERAS_BACKEND", "jax")

# Before KerasHub, whose import of TensorFlow disables the Triton kernels on JAX.
import keras_recurrent

# isort: split
import keras
import keras_hub
import matplotlib.figure
import numpy as np

from keras_recurrent.models import GriffinCausalLM

PROMPT = "The statement"
BATCH_SIZE = 4
LEARNING_RATE = 6e-3


# --- 1. The text: Python's help topics, such as `help("while")` ---


def load_documents(topics):
    """Returns training and validation documents, as lists of strings.

    Topics share paragraphs; each is kept once, so that no validation text occurs in training.
    """
    documents, seen = [], set()
    for topic in list(pydoc_data.topics.topics.values())[:topics]:
        paragraphs = [p for p in dict.fromkeys(topic.split("\n\n")) if p not in seen]
        seen.update(paragraphs)
        if paragraphs:
            documents.append("\n\n".join(paragraphs))
    training = [d for i, d in enumerate(documents) if i % 10]
    return training, documents[::10]


# --- 2. Baselines: counts of bytes and of pairs ---


def unigram_and_bigram(training, validation):
    """Returns bits per byte of unigrams and bigrams, counted on the training text.

    The unigram uses add-one smoothing. The bigram uses Witten-Bell smoothing: it relies on its
    counts more when a byte is frequent and has few different followers, otherwise on the unigram.
    The byte before a document is None.
    """
    bytes_seen, followers = collections.Counter(), collections.defaultdict(collections.Counter)
    for before, byte in pairs(training):
        bytes_seen[byte] += 1
        followers[before][byte] += 1

    def unigram(byte):
        return (bytes_seen[byte] + 1) / (bytes_seen.total() + 256)

    def bigram(before, byte):
        counts = followers[before]
        if not counts:
            return unigram(byte)
        return (counts[byte] + len(counts) * unigram(byte)) / (counts.total() + len(counts))

    held_out = list(pairs(validation))
    return (
        -sum(math.log2(unigram(byte)) for _, byte in held_out) / len(held_out),
        -sum(math.log2(bigram(*pair)) for pair in held_out) / len(held_out),
    )


def pairs(documents):
    for document in documents:
        text = document.encode()
        yield from zip([None, *text], text, strict=False)


# --- 3. The model ---


def bits_per_byte(labels, logits):
    """Returns the loss in bits; every label is a byte."""
    nats = keras.ops.sparse_categorical_crossentropy(labels, logits, from_logits=True)
    return nats / math.log(2)


def compile_for_training(model, steps):
    """Compiles with AdamW, short warmup and cosine decay to 0.

    Decay parameters are excluded from weight decay, which would shorten the model's memory.
    """
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, steps, warmup_target=LEARNING_RATE, warmup_steps=max(1, steps // 20)
    )
    optimizer = keras.optimizers.AdamW(rate, weight_decay=0.1, clipnorm=1.0)
    keras_recurrent.exclude_from_weight_decay(optimizer, model)
    model.compile(
        optimizer=optimizer,
        weighted_metrics=[bits_per_byte],
        sampler=keras_hub.samplers.TopPSampler(p=0.9, temperature=0.8),
    )


class Report(keras.callbacks.Callback):
    """Prints the validation loss after each epoch and records the losses for the figure."""

    def __init__(self, unigram, bigram):
        super().__init__()
        self.counted = f"bigrams {bigram:.3f}, unigrams {unigram:.3f}"
        self.training, self.validation = [], []

    def on_epoch_begin(self, epoch, logs=None):
        self.total = 0.0

    def on_train_batch_end(self, batch, logs=None):
        # Keras reports the mean of the epoch so far; recover the value of this step.
        total = (batch + 1) * logs["bits_per_byte"]
        self.training.append(total - self.total)
        self.total = total

    def on_epoch_end(self, epoch, logs=None):
        bits = logs["val_bits_per_byte"]
        self.validation.append((len(self.training), bits))
        print(f"Validation, bits per byte: Hawk {bits:.3f}, {self.counted}")


def draw(report, unigram, bigram, path):
    figure = matplotlib.figure.Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(report.training, color="tab:blue", alpha=0.4, linewidth=0.8, label="Hawk, training")
    axes.plot(*zip(*report.validation, strict=True), "o-", color="tab:blue", label="validation")
    axes.axhline(bigram, color="tab:orange", linestyle="--", label="bigrams")
    axes.axhline(unigram, color="tab:red", linestyle="--", label="unigrams")
    axes.set(xlabel="training step", ylabel="bits per byte")
    axes.set_ylim(0, 8)
    axes.legend()
    figure.savefig(path, dpi=120)


# --- 4. Main program ---


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--topics", type=int, help="maximum number of topics to read")
    parser.add_argument("--sample", type=int, default=300, help="length of a sample, in bytes")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("build/quickstart"))
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    keras.utils.set_random_seed(0)

    training, validation = load_documents(arguments.topics)
    unigram, bigram = unigram_and_bigram(training, validation)
    print(
        f"{sum(map(len, training)):,} characters to learn, {sum(map(len, validation)):,} held out"
    )

    # Several documents are packed into a sequence, and the model keeps them apart. Without end
    # tokens, every label is a byte of the text.
    model = GriffinCausalLM.from_preset("hawk_tiny", packed=True, add_end_token=False)
    print(f"Hawk with {model.count_params():,} parameters on {keras.backend.backend()}\n")

    rows = len(model.preprocessor(training)[1])
    compile_for_training(model, steps=arguments.epochs * math.ceil(rows / BATCH_SIZE))
    print(f"Before training it writes:\n{model.generate(PROMPT, max_length=arguments.sample)}\n")

    report = Report(unigram, bigram)
    model.fit(
        training,
        validation_data=(validation,),
        batch_size=BATCH_SIZE,
        epochs=arguments.epochs,
        callbacks=[keras.callbacks.ProgbarLogger(), report],  # prints the report below the bar
    )
    print(f"\nAfter training it writes:\n{model.generate(PROMPT, max_length=arguments.sample)}\n")

    picture = arguments.output / "loss.png"
    draw(report, unigram, bigram, picture)
    print(f"The loss is drawn in {picture}")

    preset = arguments.output / "hawk"
    model.save_to_preset(str(preset))
    loaded = GriffinCausalLM.from_preset(str(preset))
    inputs, _, _ = model.preprocessor(validation[:1])
    difference = np.abs(to_numpy(model(inputs)) - to_numpy(loaded(inputs))).max()
    print(f"Saved to {preset} and loaded back: the logits differ by {difference}")


def to_numpy(tensor):
    return keras.ops.convert_to_numpy(tensor)


if __name__ == "__main__":
    main()
