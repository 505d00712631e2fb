"""Process a document of any length in chunks, save the state, and continue from it many times.

    KERAS_BACKEND=jax python guides/recipes/long_documents.py

Griffin's attention covers a window of the last tokens; earlier tokens are summarized in the state
of its recurrent blocks. Both have a fixed size. A document much longer than the window or the
training sequences is therefore processed in chunks with constant memory. Its state is saved in a
small file, and questions and continuations start from it.

The model is a small Griffin with a window of 64 bytes. It is first trained on Python's
documentation, in sequences of 256 bytes, which takes minutes on two CPU cores. `--model` selects
another model by name or directory, and `--document` a text file.
"""

import argparse
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
import numpy as np

from keras_recurrent.evaluation import loss_by_position
from keras_recurrent.models import GenerationCache, GriffinCausalLM

BEGINNINGS = ("\n\nThe statement", "\n\nNote: ", "\n\n   >>> ")


def documents():
    """Returns topics of Python's documentation, and one that shares no paragraph with them."""
    topics, seen = list(pydoc_data.topics.topics.values()), set()
    longest = max(topics, key=len)
    seen.update(longest.split("\n\n"))
    others = ["\n\n".join(p for p in t.split("\n\n") if p not in seen) for t in topics]
    return [text for text in others if text], longest


def trained(texts, epochs, sequence_length):
    model = GriffinCausalLM.from_preset(
        "griffin_tiny", packed=True, sequence_length=sequence_length
    )
    optimizer = keras.optimizers.AdamW(4e-3, global_clipnorm=1.0)
    keras_recurrent.exclude_from_weight_decay(optimizer, model)
    model.compile(optimizer)
    model.fit(texts, batch_size=16, epochs=epochs, verbose=2)
    return model


# --- 1. Process in chunks ---


def pieces_of(path, size):
    """Yields strings of at most `size` characters, without loading the whole file."""
    with path.open(encoding="utf-8") as file:
        while piece := file.read(size):
            yield piece


def read(model, path, size):
    """Returns the model's cache after the whole file."""
    cache = None
    for piece in pieces_of(path, size):
        cache = model.prefill(piece, cache=cache)
        print(f"{int(cache.num_tokens[0]):8,} tokens read, {cache.nbytes:,} bytes kept")
    if cache is None:
        raise SystemExit(f"--document: {path} is empty.")
    return cache


# --- 2. Load the state and continue ---


def continuations(model, path):
    """Generates a continuation for each beginning, from the saved state."""
    cache = GenerationCache.load(path, model)
    rows = cache.repeat(len(BEGINNINGS))  # one batch row for each, after the same document
    return model.generate(list(BEGINNINGS), max_length=60, cache=rows)


# --- 3. Loss by position: does distant context help? ---


def loss_by_octave(model, path, most):
    """Returns `(position, loss)` for tokens 1 to 2, 2 to 4 and so on.

    Parts of a document differ in difficulty, so the loss is the mean over windows from sixteen
    starts, which wrap around at the document's end.
    """
    tokens = np.array(model.preprocessor.tokenizer(path.read_text(encoding="utf-8")))
    length = min(most, len(tokens))
    starts = np.linspace(0, len(tokens), 16, endpoint=False).astype(int)
    windows = np.stack([np.roll(tokens, -start)[:length] for start in starts])
    loss, ends = loss_by_position(model, windows).loss, [2]
    while ends[-1] < length:
        ends.append(min(2 * ends[-1], length))
    return [
        (end, loss[begin - 1 : end - 1].mean())
        for begin, end in zip([1, *ends], ends, strict=False)
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a name or a directory of save_to_preset")
    parser.add_argument("--document", type=pathlib.Path, help="a text file")
    parser.add_argument("--epochs", type=int, default=3, help="of learning, without --model")
    parser.add_argument("--topics", type=int, help="maximum number of topics to train on")
    parser.add_argument("--sequence-length", type=int, default=256, help="of training sequences")
    parser.add_argument("--piece", type=int, default=4096, help="characters per chunk")
    parser.add_argument("--most", type=int, default=4096, help="tokens whose losses are reported")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("build/long_documents"))
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)

    keras.utils.set_random_seed(0)
    texts, unseen = documents()
    if arguments.model:
        model = keras_hub.models.CausalLM.from_preset(arguments.model)
    else:
        model = trained(texts[: arguments.topics], arguments.epochs, arguments.sequence_length)
    model.compile(sampler="greedy")
    document = arguments.document
    if document is None:
        document = arguments.output / "document.txt"
        document.write_text(unseen, encoding="utf-8")

    cache = read(model, document, arguments.piece)
    path = arguments.output / "document.safetensors"
    cache.save(path)
    print(f"{path}: {path.stat().st_size:,} bytes for a document of {document.stat().st_size:,}")
    for beginning, text in zip(BEGINNINGS, continuations(model, path), strict=True):
        print(f"\nAfter {beginning!r}: {text!r}")
    print("\nLoss per token in nats, by position:")
    for place, loss in loss_by_octave(model, document, arguments.most):
        print(f"  to {place:6,}: {loss:.3f}")


if __name__ == "__main__":
    main()
