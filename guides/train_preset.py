"""Train `griffin_tiny_text`, the preset whose weights come with the package.

    KERAS_BACKEND=jax python guides/train_preset.py --text shakespeare.txt

A small byte-level language model is trained on Python's documentation, which comes with Python, and
on the files of `--text`; for the preset, plays of Shakespeare. Nothing is downloaded. A run that is
interrupted and started again resumes. The learning rate is constant and falls to 0 in the last
`--decay-steps`, so a run may resume with fewer or more `--steps` until this decay has begun.
"""

import argparse
import collections
import itertools
import lzma
import math
import os
import pathlib
import zlib

# Keras reads this once, at import. "torch" and "tensorflow" also work.
os.environ.setdefault("KERAS_BACKEND", "jax")

# Before KerasHub, whose import of TensorFlow disables the Triton kernels on JAX.
import keras_recurrent

# isort: split
import keras
import keras_hub
import numpy as np
from keras import ops
from quickstart import load_documents

from keras_recurrent.callbacks import TrainingBackup
from keras_recurrent.evaluation import loss_by_position
from keras_recurrent.models import GriffinCausalLM

PRESET = "griffin_tiny_text"
SEED = 0
SEQUENCE_LENGTH, BATCH_SIZE = 512, 4
LEARNING_RATE, WARMUP_STEPS, WEIGHT_DECAY = 4e-3, 100, 0.1
EPOCH = 100  # steps between validations
PROMPTS = ("ROMEO:\n", "The statement")


# --- 1. The text ---


def load_texts(paths, topics=None):
    """Returns `{name: (training documents, held-out documents)}`, lists of strings.

    Every tenth topic of the documentation is held out, and the last tenth of each file.
    """
    texts = {"documentation": load_documents(topics)}
    for path in paths:
        text = path.read_text(encoding="utf-8")
        cut = text.rfind("\n\n", 0, round(0.9 * len(text))) + 2
        texts[path.stem] = (documents_of(text[:cut]), documents_of(text[cut:]))
    return texts


def documents_of(text):
    """Joins paragraphs into documents that fit into a training sequence.

    Training sequences then start at the beginning of a paragraph, where generation may start, too,
    and few start within one.
    """
    documents, length = [], SEQUENCE_LENGTH
    for paragraph in text.strip("\n").split("\n\n"):
        length += len(paragraph.encode()) + 2
        if length > SEQUENCE_LENGTH:
            documents.append([])
            length = len(paragraph.encode())
        documents[-1].append(paragraph)
    return ["\n\n".join(paragraphs) for paragraphs in documents]


# --- 2. The training ---


@keras.saving.register_keras_serializable("train_preset")
class ConstantThenLinear(keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate with linear warmup, a constant phase and linear decay to 0."""

    def __init__(self, learning_rate, warmup_steps, steps, decay_steps):
        super().__init__()
        self.learning_rate, self.warmup_steps = learning_rate, warmup_steps
        self.steps, self.decay_steps = steps, decay_steps

    def __call__(self, step):
        step = ops.cast(step, "float32")
        rising, falling = (step + 1) / self.warmup_steps, (self.steps - step) / self.decay_steps
        return self.learning_rate * ops.clip(ops.minimum(rising, falling), 0.0, 1.0)

    def get_config(self):
        names = ("learning_rate", "warmup_steps", "steps", "decay_steps")
        return {name: getattr(self, name) for name in names}


def train(model, texts, steps, decay_steps, output):
    """Trains the model and resumes an interrupted run."""
    rate = ConstantThenLinear(LEARNING_RATE, WARMUP_STEPS, steps, decay_steps)
    optimizer = keras.optimizers.AdamW(rate, weight_decay=WEIGHT_DECAY, clipnorm=1.0)
    keras_recurrent.exclude_from_weight_decay(optimizer, model)
    model.compile(optimizer, model.loss)
    # An eighth of the held-out text, to notice overfitting during training.
    glimpse = [document for _, held_out in texts.values() for document in held_out[::8]]
    model.fit(
        [document for training, _ in texts.values() for document in training],
        validation_data=(glimpse,),
        batch_size=BATCH_SIZE,
        steps_per_epoch=min(EPOCH, steps),
        epochs=max(1, steps // EPOCH),
        verbose=2,
        callbacks=[
            TrainingBackup(output / "run.backup", save_freq=50, delete_checkpoint=False),
            keras.callbacks.CSVLogger(output / "log.csv", append=True),
        ],
    )


# --- 3. Evaluation on held-out text ---


def model_bits(model, documents, piece=4096):
    """Returns bits per byte of documents, in pieces of at most `piece` tokens.

    Documents of similar length form a batch, padded to a power of two, so that few programs are
    compiled.
    """
    tokenizer = model.preprocessor.tokenizer
    rows = [
        [tokenizer.start_token_id, *tokens[begin : begin + piece]]
        for tokens in tokenizer(documents)
        for begin in range(0, len(tokens), piece)
    ]
    rows.sort(key=len)
    nats = 0.0
    for length, alike in itertools.groupby(rows, lambda row: 1 << len(row).bit_length()):
        group = list(alike)
        real = np.arange(length) < np.array([[len(row)] for row in group])
        token_ids = np.zeros(real.shape, "int32")
        token_ids[real] = np.concatenate(group)
        found = loss_by_position(model, token_ids, real)
        nats += np.nansum(found.loss * found.num_texts)
    return nats / (sum(map(len, rows)) - len(rows)) / math.log(2)


def n_gram_bits(training, held_out, order):
    """Returns bits per byte of an n-gram model of bytes with Witten-Bell smoothing.

    It interpolates the counts of all orders up to `order`, down to a uniform distribution. A
    document begins after the byte 255, which does not occur in UTF-8.
    """
    followers: dict = collections.defaultdict(collections.Counter)
    for contexts, byte in bytes_with_contexts(training, order):
        for context in contexts:
            followers[context][byte] += 1
    nats, count = 0.0, 0
    for contexts, byte in bytes_with_contexts(held_out, order):
        probability = 1 / 256
        for context in contexts:
            seen = followers.get(context)
            if seen is not None:
                total = seen.total() + len(seen)
                probability = (seen[byte] + len(seen) * probability) / total
        nats -= math.log(probability)
        count += 1
    return nats / count / math.log(2)


def bytes_with_contexts(documents, order):
    """Yields, for each byte, the contexts of 0, 1, … `order - 1` bytes before it, and the byte."""
    for document in documents:
        text = b"\xff" + document.encode()
        for i in range(1, len(text)):
            yield [text[i - length : i] for length in range(min(order, i + 1))], text[i]


def compressed_bits(compress, training, held_out):
    """Returns bits per byte that held-out text adds to the compressed training text."""
    before, text = ("\n\n".join(documents).encode() for documents in (training, held_out))
    return 8 * (len(compress(before + text)) - len(compress(before))) / len(text)


def report(model, texts):
    """Prints bits per byte of each held-out text, for the model and the baselines."""
    print(f"{'held-out bits a byte of':24}" + "".join(f"{name:>16}" for name in texts))
    everything = [document for training, _ in texts.values() for document in training]

    def line(name, bits):
        print(f"{name:24}" + "".join(f"{bits(*text):16.3f}" for text in texts.values()), flush=True)

    line(PRESET, lambda training, held_out: model_bits(model, held_out))
    for order in range(1, 8):
        line(
            f"n-grams of {order}", lambda _, held_out, n=order: n_gram_bits(everything, held_out, n)
        )
    for name, compress in (
        ("gzip", lambda text: zlib.compress(text, 9)),
        ("xz", lambda text: lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)),
    ):
        # The text's training part comes last, because gzip looks back only 32 KiB.
        line(
            name,
            lambda training, held_out, c=compress: compressed_bits(
                c, everything + training, held_out
            ),
        )
        line(f"{name}, alone", lambda _, held_out, c=compress: compressed_bits(c, [], held_out))


# --- 4. Main program ---


def save(model, path):
    """Saves the weights in bfloat16 and returns the model with these rounded weights."""
    rounded = GriffinCausalLM.from_preset(PRESET, load_weights=False, dtype="bfloat16")
    rounded.set_weights(model.get_weights())
    rounded.backbone.save_weights(path)
    print(f"{path}: {path.stat().st_size:,} bytes")
    return rounded


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=pathlib.Path, nargs="+", default=[], metavar="FILE")
    parser.add_argument("--topics", type=int, help="maximum number of topics to read")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--decay-steps", type=int, default=1500)
    parser.add_argument("--sample", type=int, default=400, help="length of a sample, in bytes")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("build/train_preset"))
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)

    keras.utils.set_random_seed(SEED)
    texts = load_texts(arguments.text, arguments.topics)
    for name, documents in texts.items():
        learned, held_out = ("\n\n".join(part).encode() for part in documents)
        print(f"{name}: {len(learned):,} bytes to learn, {len(held_out):,} held out")
    # Without end tokens every label is a byte of the text, and generation runs to the maximum.
    model = GriffinCausalLM.from_preset(
        PRESET,
        load_weights=False,
        packed=True,
        sequence_length=SEQUENCE_LENGTH,
        add_end_token=False,
    )
    train(model, texts, arguments.steps, arguments.decay_steps, arguments.output)
    model = save(model, arguments.output / f"{PRESET}.weights.h5")
    report(model, texts)
    model.compile(sampler=keras_hub.samplers.TopPSampler(p=0.9, temperature=0.8, seed=SEED))
    for text in model.generate(list(PROMPTS), max_length=arguments.sample):
        print(f"\n{text}")


if __name__ == "__main__":
    main()
