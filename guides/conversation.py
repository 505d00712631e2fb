"""Conversations with a saved state: prefill once, branch, continue after a restart.

    KERAS_BACKEND=jax python guides/conversation.py

The state of a recurrent model has a fixed size. A prompt is therefore processed once and continued
many times, a turn of a conversation costs only its own tokens, and the state is saved in a small
file. This guide shows all three, and that the answers equal those from the whole conversation.

The model is the preset whose weights come with the package, trained on plays and a manual. It is
first trained to repeat two conversations, half a minute on two CPU cores. `--model` takes another
model, saved by `save_to_preset`.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import time

# Keras reads this once, at import. "torch" and "tensorflow" also work.
os.environ.setdefault("KERAS_BACKEND", "jax")

# Before KerasHub, whose import of TensorFlow disables the Triton kernels on JAX.
import keras_recurrent  # noqa: F401

# isort: split
import keras
import keras_hub

from keras_recurrent.models import GenerationCache, GriffinCausalLM, memory_sizes

SYSTEM = (
    "A talk between a reader and the author of a manual. The author answers in short sentences.\n"
)
CHATS = {
    "lists": {
        "How do I sort a list?": "Call sorted on it.",
        "And in reverse?": "Pass reverse=True.",
        "Which of both keeps the list?": "sorted returns a new one.",
    },
    "files": {
        "How do I read a file?": "Open it, and call read.",
        "Line by line?": "Write a for loop over it.",
        "Who closes it?": "The with statement.",
    },
}
LONGEST = 80  # tokens of a question and its answer


def turn(question):
    return f"Reader: {question}\nAuthor:"


def learned_by_heart(steps):
    """Returns the preset, fine-tuned on the conversations above only."""
    documents = [
        SYSTEM + "".join(f"{turn(question)} {answer}\n" for question, answer in chat.items())
        for chat in CHATS.values()
    ]
    model = GriffinCausalLM.from_preset("griffin_tiny_text", sequence_length=320)
    model.compile(keras.optimizers.Adam(3e-3), model.loss, sampler="greedy")
    # Each step sees each conversation once.
    model.fit(documents * steps, batch_size=len(documents), shuffle=False, verbose=0)
    return model


# --- 1. Process the prompt once ---


def read_system_prompt(model):
    start = model.prefill(SYSTEM)
    print(f"The system prompt: {start}, {start.nbytes:,} bytes.")
    return start


# --- 2. Branch into two conversations ---


def talk(model, cache, questions):
    """Asks the questions in turn; returns the conversation and the cache after it."""
    said, line_end = "", (model.preprocessor.tokenizer.token_to_id("\n"),)
    for question in questions:
        begin, seen = time.perf_counter(), int(cache.num_tokens[0])
        stream = model.stream(turn(question), LONGEST, stop_token_ids=line_end, cache=cache)
        print(turn(question), end="", flush=True)
        said += turn(question)
        for piece in stream:
            print(piece, end="", flush=True)
            said += piece
        cache = stream.cache
        new, seconds = int(cache.num_tokens[0]) - seen, time.perf_counter() - begin
        print(f"[{new} tokens in {seconds:.2f} s, after {seen} that were not read again]")
    return said, cache


# --- 3. Continue after a restart ---


def restart(model, output, caches):
    """Saves model and caches, and asks the last question in another process."""
    folder = output / "model"
    model.save_to_preset(str(folder))
    for name, cache in caches.items():
        path = output / f"{name}.safetensors"
        cache.save(path)
        print(f"{path.name}: {path.stat().st_size:,} bytes for {int(cache.num_tokens[0])} tokens")
    command = [sys.executable, __file__, "--model", folder, "--output", output, "--resume"]
    subprocess.run(list(map(str, command)), check=True)


def resume(model, output):
    """Asks the last question of each conversation, in the second process."""
    for name, chat in CHATS.items():
        cache = GenerationCache.load(output / f"{name}.safetensors", model)
        said, _ = talk(model, cache, list(chat)[-1:])
        (output / f"{name}.txt").write_text(said, encoding="utf-8")


# --- 4. Compare with the whole text ---


def compare(model, name, said):
    """Compares the last answer with one generated from the whole conversation."""
    question = turn(list(CHATS[name])[-1])
    before, _, answer = (SYSTEM + said).rpartition(question)
    room = 1 + len(model.preprocessor.tokenizer(before)) + LONGEST
    line_end = (model.preprocessor.tokenizer.token_to_id("\n"),)
    whole = model.generate(before + question, room, line_end, strip_prompt=True)
    same = "the same" if whole == answer else f"another: {whole!r}"
    print(f"{name}: from the whole text the last answer is {same}.")


# --- 5. Size of a conversation ---


def sizes():
    print("\nBytes of one conversation, at any length:")
    for preset in ("hgrn2_1.3b_100b", "recurrentgemma_2b"):
        short, long = (memory_sizes(preset, 1, length).cache for length in (4_096, 1_000_000))
        print(f"  {preset}: {short:,} after 4,096 tokens, {long:,} after a million")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a directory of save_to_preset")
    parser.add_argument("--steps", type=int, default=100, help="of learning, without --model")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("build/conversation"))
    parser.add_argument("--resume", action="store_true", help="used by the second process")
    arguments = parser.parse_args()
    output = arguments.output
    output.mkdir(parents=True, exist_ok=True)

    keras.utils.set_random_seed(0)
    if arguments.model:
        model = keras_hub.models.CausalLM.from_preset(arguments.model)
        model.compile(sampler="greedy")
    else:
        model = learned_by_heart(arguments.steps)
    if arguments.resume:
        resume(model, output)
        return
    start = read_system_prompt(model)
    talks = {name: talk(model, start, list(chat)[:-1]) for name, chat in CHATS.items()}
    restart(model, output, {name: cache for name, (_, cache) in talks.items()})
    for name, (said, _) in talks.items():
        last = (output / f"{name}.txt").read_text(encoding="utf-8")
        compare(model, name, said + last)
    sizes()


if __name__ == "__main__":
    main()
