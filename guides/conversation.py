"""Conversations with a state that is kept: read once, branch, continue after a restart.

    KERAS_BACKEND=jax python guides/conversation.py

What a recurrent model knows of a text has one size. So a prompt is read once and gone on from many
times, a turn of a conversation costs its own tokens and not those of all turns before, and what the
model knows is saved in a small file. This guide shows all three, and that they change nothing: the
texts are those that the model writes when it is given all of a conversation again.

The model is the preset whose weights come with the package. It has read plays and a manual, and
learns two conversations by heart first, half a minute on two CPU cores. `--model` takes another
one, as `save_to_preset` writes it.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import time

# Keras reads this once, at import. "torch" and "tensorflow" also work.
os.environ.setdefault("KERAS_BACKEND", "jax")

# First: KerasHub imports TensorFlow, behind which Triton's kernels are left out on JAX.
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
    """The preset, fine-tuned on nothing but the conversations above."""
    documents = [
        SYSTEM + "".join(f"{turn(question)} {answer}\n" for question, answer in chat.items())
        for chat in CHATS.values()
    ]
    model = GriffinCausalLM.from_preset("griffin_tiny_text", sequence_length=320)
    model.compile(keras.optimizers.Adam(3e-3), model.loss, sampler="greedy")
    # Each step sees each conversation once.
    model.fit(documents * steps, batch_size=len(documents), shuffle=False, verbose=0)
    return model


# --- 1. A prompt is read once ---


def read_system_prompt(model):
    start = model.prefill(SYSTEM)
    print(f"The system prompt: {start}, {start.nbytes:,} bytes.")
    return start


# --- 2. Two conversations branch from it ---


def talk(model, cache, questions):
    """Asks one question after another; returns all that was said, and the cache after it."""
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
        print(f"[{new} tokens in {seconds:.2f} s, behind {seen} that were not read again]")
    return said, cache


# --- 3. They go on after a restart ---


def restart(model, output, caches):
    """Saves model and caches, and lets another process ask the last question."""
    folder = output / "model"
    model.save_to_preset(str(folder))
    for name, cache in caches.items():
        path = output / f"{name}.safetensors"
        cache.save(path)
        print(f"{path.name}: {path.stat().st_size:,} bytes for {int(cache.num_tokens[0])} tokens")
    command = [sys.executable, __file__, "--model", folder, "--output", output, "--resume"]
    subprocess.run(list(map(str, command)), check=True)


def resume(model, output):
    """What the other process does."""
    for name, chat in CHATS.items():
        cache = GenerationCache.load(output / f"{name}.safetensors", model)
        said, _ = talk(model, cache, list(chat)[-1:])
        (output / f"{name}.txt").write_text(said, encoding="utf-8")


# --- 4. It is what the whole text gives ---


def compare(model, name, said):
    """Gives the model all of a conversation but its last answer."""
    question = turn(list(CHATS[name])[-1])
    before, _, answer = (SYSTEM + said).rpartition(question)
    room = 1 + len(model.preprocessor.tokenizer(before)) + LONGEST
    line_end = (model.preprocessor.tokenizer.token_to_id("\n"),)
    whole = model.generate(before + question, room, line_end, strip_prompt=True)
    same = "the same" if whole == answer else f"another: {whole!r}"
    print(f"{name}: from the whole text the last answer is {same}.")


# --- 5. How large a conversation is ---


def sizes():
    print("\nBytes of one conversation, whatever its length:")
    for preset in ("hgrn2_1.3b_100b", "recurrentgemma_2b"):
        short, long = (memory_sizes(preset, 1, length).cache for length in (4_096, 1_000_000))
        print(f"  {preset}: {short:,} after 4,096 tokens, {long:,} after a million")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a directory of save_to_preset")
    parser.add_argument("--steps", type=int, default=100, help="of learning, without --model")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("build/conversation"))
    parser.add_argument("--resume", action="store_true", help="what the second process does")
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
