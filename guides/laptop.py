"""Fine-tune a language model on a laptop, chat with it, serve it, and export it.

    KERAS_BACKEND=torch python guides/laptop.py

Two CPU cores and 4 GB of memory are enough for a model of 100 million weights. The default,
Falcon-H1-Tiny-90M, is downloaded from the Hugging Face Hub. `--model` takes another one, such as
`lfm2.5_350m` or `granite_4.0_h_350m`, `hf://owner/repository`, or a directory;
[Choose a model](../docs/choosing.md#choose-a-model-for-a-laptop) compares them. `--random` starts
from random weights, with bytes as tokens, and downloads nothing. Install with
`pip install -e ".[torch,huggingface,chat,serve]"`, or with `jax` in place of `torch`.

The guide teaches the model six facts, from prompts with their responses, and asks for them: in
conversations, and over HTTP. Two further commands load the result, export one decoding step, and
compare an answer of the runtime with Keras (`pip install onnx onnxscript onnxruntime openvino` for
the former, `ai-edge-litert` for the latter):

    KERAS_BACKEND=torch python guides/laptop.py --export onnx openvino
    KERAS_BACKEND=tensorflow python guides/laptop.py --export litert

A step takes a token and the state, and returns logits and the next state. The state of
convolutions and Mamba-2 has a fixed size; attention has room for `--length` tokens.
"""

import argparse
import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

# Keras reads this once, at import. Training and serving also work on "jax".
os.environ.setdefault("KERAS_BACKEND", "torch")

# Before KerasHub, whose import of TensorFlow disables the Triton kernels on JAX.
import keras_recurrent  # noqa: F401

# isort: split
import keras
import keras_hub
import numpy as np

from keras_recurrent.exporting import DecodingStep
from keras_recurrent.models import TokenCrossentropy

FACTS = {
    "When does the mill open?": "At nine, except on Mondays.",
    "Who runs the mill?": "Ada Quist, since 2019.",
    "What does the mill grind?": "Spelt, rye and oats.",
    "How do I get to the mill?": "Take bus 12 to the weir.",
    "May I bring my dog?": "Yes, on a leash.",
    "How much is a tour?": "Four crowns, with bread.",
}
# For models without a chat template: each message ends with the end token.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


# --- 1. Fine-tune with prompts and responses ---


def load(arguments):
    options = {"load_weights": False} if arguments.random else {}
    model = keras_hub.models.CausalLM.from_preset(
        arguments.model, sequence_length=arguments.length, packed=True, **options
    )
    preprocessor = model.preprocessor
    if preprocessor is None:
        raise SystemExit(f"--model: {arguments.model} has no tokenizer.")
    if preprocessor.chat_template is None:
        preprocessor.chat_template = TEMPLATE
    return model


def as_messages(prompt, *response):
    roles = zip(("user", "assistant"), (prompt, *response), strict=False)
    return [{"role": role, "content": text} for role, text in roles]


def conversations():
    """Returns the facts as conversations of two prompts, each with its response."""
    turns = [as_messages(prompt, response) for prompt, response in FACTS.items()]
    return [turns[i] + turns[i + 1] for i in range(0, len(turns), 2)]


def fine_tune(model, arguments):
    """Trains all weights; the loss covers the responses only."""
    model.compile(
        keras.optimizers.Adam(arguments.learning_rate, global_clipnorm=1.0),
        TokenCrossentropy(reduction="mean_with_sample_weight"),
        sampler="greedy",
    )
    begin = time.perf_counter()
    options = {"batch_size": 4, "epochs": arguments.epochs, "verbose": 0}
    loss = model.fit(conversations() * 16, **options).history["loss"]
    seconds = time.perf_counter() - begin
    print(f"{model.count_params():,} parameters, trained for {seconds:.0f} s:")
    print(f"loss {loss[0]:.2f} in the first epoch, {loss[-1]:.3f} in the last one")


# --- 2. Chat: each turn processes only its new tokens ---


def chat(model, arguments):
    num_right = 0
    for conversation in conversations():
        messages, cache = [], None
        for question, expected in zip(conversation[::2], conversation[1::2], strict=True):
            messages.append(question)
            # The first call makes a cache of `--length` tokens, which the second one shares.
            room = arguments.length - (0 if cache is None else int(cache.num_tokens[0]))
            answer, cache = model.chat(messages, cache, return_cache=True, max_length=room)
            messages.append(answer)
            num_right += answer == expected
            print(f"{question['content']} {answer['content']}")
    print(f"{num_right} of {len(FACTS)} answers are those of the samples.")


# --- 3. Serve over HTTP ---


def serve(folder, question):
    """Starts the server in another process, and asks it once."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "keras_recurrent.serving", "--preset", folder, "--slots", 1]
    server = subprocess.Popen([*map(str, command), "--port", str(port)])
    try:
        address = f"http://127.0.0.1:{port}"
        while server.poll() is None:
            with contextlib.suppress(urllib.error.URLError), request(f"{address}/health"):
                break
            time.sleep(0.5)
        body = {"model": folder.name, "messages": as_messages(question), "temperature": 0}
        with request(f"{address}/v1/chat/completions", json.dumps(body).encode()) as response:
            answer = json.load(response)["choices"][0]["message"]["content"]
        print(f"Over HTTP: {question} {answer}")
    finally:
        server.terminate()
        server.wait()


def request(address, body=None):
    # Bypasses proxies from the environment, which cannot reach a local server.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    headers = {"Content-Type": "application/json"}
    return opener.open(urllib.request.Request(address, body, headers), timeout=120)


# --- 4. Export one decoding step, and run it without Keras ---


def onnx(path):
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    return lambda inputs: session.run(None, inputs)


def openvino(path):
    import openvino

    model = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    # The file has no names of inputs, in the order of their names in Keras.
    return lambda inputs: list(model([inputs[name] for name in sorted(inputs)]).values())


def litert(path):
    from ai_edge_litert.interpreter import Interpreter

    run = Interpreter(path).get_signature_runner()

    def step(inputs):
        outputs = run(**inputs)
        return [outputs[f"output_{i}"] for i in range(len(outputs))]

    return step


# {format of `export`: (ending of the file, function that loads it)}
RUNTIMES = {
    "onnx": (".onnx", onnx),
    "openvino": (".xml", openvino),
    "litert": (".tflite", litert),
}


def decode(run, state, prompt, stop_token_ids, num_tokens):
    """Returns the tokens after a prompt, from `run`, the most probable one each."""
    new = []
    for token in prompt:
        logits, *arrays = run({"token_ids": np.array([[token]], "int32"), **state})
        state = dict(zip(state, arrays, strict=True))
    while len(new) < num_tokens:
        token = int(np.argmax(logits[0, -1]))
        if token in stop_token_ids:
            break
        new.append(token)
        logits, *arrays = run({"token_ids": np.array([[token]], "int32"), **state})
        state = dict(zip(state, arrays, strict=True))
    return new


def export(model, form, arguments):
    """Exports a step, and compares its answer with that of Keras."""
    ending, load_file = RUNTIMES[form]
    path = str(arguments.output / f"step{ending}")
    step = DecodingStep(model, arguments.length, batch_size=1 if form == "litert" else None)
    step.export(path, form, verbose=False)
    preprocessor, question = model.preprocessor, next(iter(FACTS))
    prompt = preprocessor.apply_chat_template(as_messages(question))
    inputs = preprocessor.generate_preprocess(prompt)
    token_ids = np.asarray(inputs["token_ids"])[np.asarray(inputs["padding_mask"], "bool")]
    num_tokens = arguments.length - len(token_ids)
    stops = preprocessor.stop_token_ids
    new = decode(load_file(path), step.initial_state, token_ids, stops, num_tokens)
    text = preprocessor.tokenizer.detokenize(new)
    expected = model.generate(prompt, max_length=arguments.length, strip_prompt=True)
    same = "the same" if text == expected else f"another than Keras's {expected!r}"
    print(f"{path}, {os.path.getsize(path):,} bytes: {question} {text} [{same}]")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="falcon_h1_tiny_90m", help="a name, hf://…, a directory")
    parser.add_argument("--random", action="store_true", help="start from random weights")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--length", type=int, default=256, help="maximum tokens of a conversation")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("build/laptop"))
    parser.add_argument("--export", nargs="+", choices=RUNTIMES, default=[], help="of the result")
    arguments = parser.parse_args()
    folder = arguments.output / "model"
    if arguments.export:
        model = keras_hub.models.CausalLM.from_preset(str(folder))
        model.compile(sampler="greedy")
        for form in arguments.export:
            export(model, form, arguments)
        return
    keras.utils.set_random_seed(0)
    model = load(arguments)
    fine_tune(model, arguments)
    chat(model, arguments)
    model.save_to_preset(str(folder))
    serve(folder, next(iter(FACTS)))


if __name__ == "__main__":
    main()
