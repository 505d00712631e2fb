"""Export a language model and serve it: text over HTTP, streamed as it is generated.

    KERAS_BACKEND=torch python guides/recipes/serving.py --model build/from_files/model
    python guides/recipes/serving.py --serve --port 8000

The first command exports a model, starts a server, sends one request, and compares the answer with
Keras. The second command serves the exported model until Ctrl-C, without Keras and without this
package. In another terminal:

    curl --no-buffer --data '{"prompt": "The statement"}' http://127.0.0.1:8000/generate

The export contains one decoding step: a token and a state in, logits and the next state out. The
state has a fixed size, so memory and time per token do not depend on the length of the text. On
TensorFlow the step is a SavedModel; on torch it is an ONNX file for onnxruntime (`pip install onnx
onnxscript onnxruntime`). On JAX, save the model with `save_to_preset` and export the directory with
one of the other backends. The default model is a tiny HGRN2 with random weights, which generates
noise.
"""

import argparse
import codecs
import contextlib
import http.server
import json
import os
import pathlib
import shutil
import threading
import urllib.request

import numpy as np

BYTES, SENTENCE_PIECE = "bytes", "tokenizer.model"
MOST_TOKENS, MOST_BYTES = 4096, 2**16  # limits of an answer and of a request


# --- 1. Export: a step, the initial state, and the tokenizer ---


def export(model, folder):
    """Writes a folder that `Writer` reads."""
    import keras

    from keras_recurrent.exporting import DecodingStep, state_names
    from keras_recurrent.tokenizers import ByteTokenizer

    backend = keras.config.backend()
    if backend == "jax":
        raise SystemExit("Export with KERAS_BACKEND=torch or tensorflow; see the first lines here.")
    preprocessor = model.preprocessor
    if preprocessor is None:
        raise SystemExit("--model has no tokenizer, which would make tokens of text.")
    tokenizer = preprocessor.tokenizer
    reads_bytes = isinstance(tokenizer, ByteTokenizer)
    if not reads_bytes and not hasattr(tokenizer, "proto"):
        raise SystemExit("This recipe serves models with bytes or SentencePiece only.")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if not reads_bytes:
        (folder / SENTENCE_PIECE).write_bytes(tokenizer.proto)
    state = model.backbone.get_initial_state(batch_size=1)
    names = state_names(state)
    arrays = map(keras.ops.convert_to_numpy, keras.tree.flatten(state))
    np.savez(folder / "state.npz", **dict(zip(names, arrays, strict=True)))
    about = {
        "tokenizer": BYTES if reads_bytes else SENTENCE_PIECE,
        "start": [tokenizer.start_token_id] if preprocessor.add_start_token else [],
        "end": tokenizer.end_token_id,
        "state": names,
        "reads_at_once": backend == "tensorflow",
    }
    (folder / "about.json").write_text(json.dumps(about), encoding="utf-8")
    if backend == "tensorflow":
        model.export(str(folder / "saved_model"), verbose=False)  # it has a signature `step`
    else:
        DecodingStep(model).export(str(folder / "step.onnx"), "onnx", verbose=False)


# --- 2. Inference without Keras ---


def onnx_step(path):
    """Returns a function of tokens [1, 1] and states that gives logits [1, 1, V] and states.

    States are dicts of arrays by name.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options)

    def step(tokens, state):
        logits, *after = session.run(None, {"token_ids": tokens, **state})
        return logits, dict(zip(state, after, strict=True))

    return step


def saved_model_step(path):
    import tensorflow as tf

    loaded = tf.saved_model.load(str(path))  # kept alive by `step`, with its weights

    def step(tokens, state):
        given = {name: tf.constant(array) for name, array in state.items()}
        found = loaded.signatures["step"](token_ids=tf.constant(tokens), **given)
        found = {name: array.numpy() for name, array in found.items()}
        return found.pop("logits"), found

    return step


class Writer:
    """Generates text with an exported model."""

    def __init__(self, folder):
        self.about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        arrays = np.load(folder / "state.npz")
        self.first_state = {name: arrays[name] for name in self.about["state"]}
        path = folder / "step.onnx"
        self.step = onnx_step(path) if path.exists() else saved_model_step(folder / "saved_model")
        if self.about["tokenizer"] != BYTES:
            import sentencepiece

            self.pieces = sentencepiece.SentencePieceProcessor(str(folder / SENTENCE_PIECE))

    def encode(self, text):
        if self.about["tokenizer"] == BYTES:
            return [byte + 3 for byte in text.encode()]  # 0 to 2 are special tokens
        return self.pieces.encode(text)

    def decode(self, tokens):
        if self.about["tokenizer"] == BYTES:
            return bytes(token - 3 for token in tokens if token > 2).decode("utf-8", "replace")
        return self.pieces.decode(tokens)

    def write(self, prompt, max_tokens, temperature, seed=None):
        """Yields pieces of text, without incomplete characters.

        Args:
            prompt: string.
            max_tokens: integer, the maximum number of tokens to generate.
            temperature: number; 0 selects the most probable token.
            seed: integer for reproducible text, or None.
        """
        rng = np.random.default_rng(seed)
        tokens, state = self.about["start"] + self.encode(prompt), self.first_state
        out = self.decode(tokens)
        parts = [tokens] if self.about["reads_at_once"] else [[token] for token in tokens]
        for part in parts:
            logits, state = self.step(np.array([part], "int32"), state)
        for _ in range(max_tokens):
            token = choose(logits[0, -1].astype("float64"), temperature, rng)
            if token == self.about["end"]:
                break
            tokens.append(token)
            text = self.decode(tokens)
            if not text.endswith("\ufffd"):  # otherwise it may be an incomplete character
                yield text[len(out) :]
                out = text
            logits, state = self.step(np.array([[token]], "int32"), state)
        yield self.decode(tokens)[len(out) :]


def choose(logits, temperature, rng):
    if temperature == 0:
        return int(logits.argmax())
    shares = np.exp((logits - logits.max()) / temperature)
    return int(rng.choice(len(shares), p=shares / shares.sum()))


# --- 3. A local server. For public access, add authentication and rate limits ---


def server(writer, port=0):
    """Returns a server on the loopback address; port 0 selects a free port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # supports chunked responses

        def do_POST(self):
            size = int(self.headers.get("Content-Length") or 0)
            if self.path != "/generate" or size > MOST_BYTES:
                self.close_connection = True  # the request body is not read
                self.send_error(404 if self.path != "/generate" else 413)
                return
            try:
                question = checked(json.loads(self.rfile.read(size)))
            except ValueError as error:
                self.send_error(400, explain=str(error))
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            try:
                for piece in writer.write(**question):
                    self.chunk(piece.encode("utf-8", "replace"))
                self.wfile.write(b"0\r\n\r\n")
            except ConnectionError:  # the client has disconnected
                self.close_connection = True

        def chunk(self, data):
            if data:  # an empty chunk would end the response
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

        def log_message(self, *args):
            """Disables the log of requests."""

    return http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)


def checked(question):
    """Validates a request and returns the arguments of `write`.

    Raises:
        ValueError: if the request is invalid.
    """
    if not isinstance(question, dict) or not isinstance(question.get("prompt"), str):
        raise ValueError('The question must be a JSON object with a string "prompt".')
    question["prompt"].encode()  # raises a ValueError for lone surrogates, which JSON allows
    max_tokens, temperature = question.get("max_tokens", 100), question.get("temperature", 0.8)
    if type(max_tokens) is not int or not 1 <= max_tokens <= MOST_TOKENS:
        raise ValueError(f'"max_tokens" must be an integer from 1 to {MOST_TOKENS}.')
    if type(temperature) not in (int, float) or not 0 <= temperature <= 10:
        raise ValueError('"temperature" must be a number from 0 to 10.')
    return {"prompt": question["prompt"], "max_tokens": max_tokens, "temperature": temperature}


# --- 4. A client ---


def ask(address, **question):
    """Yields pieces of the response as they arrive."""
    request = urllib.request.Request(f"{address}/generate", json.dumps(question).encode())
    whole_characters = codecs.getincrementaldecoder("utf-8")()
    # Bypasses proxies from the environment, which cannot reach a local server.
    directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with directly.open(request, timeout=60) as answer:
        while piece := answer.read1(4096):
            yield whole_characters.decode(piece)


def address_of(serving):
    return "http://{}:{}".format(*serving.server_address)


def try_out(folder, prompt, max_tokens):
    """Serves one request, prints the answer and the number of its pieces, and returns it."""
    with server(Writer(folder)) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        pieces = []
        for piece in ask(address_of(serving), prompt=prompt, max_tokens=max_tokens, temperature=0):
            print(piece, end="", flush=True)
            pieces.append(piece)
        serving.shutdown()
    print(f"\n[{len(pieces)} pieces over HTTP]")
    return "".join(pieces)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="hgrn2_tiny", help="a name or a directory")
    parser.add_argument("--prompt", default="The statement")
    parser.add_argument("--max-tokens", type=int, default=60)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("build/serving"))
    parser.add_argument("--serve", action="store_true", help="serve the export in --output")
    parser.add_argument("--port", type=int, default=8000, help="with --serve")
    arguments = parser.parse_args()
    if arguments.serve:
        if not (arguments.output / "about.json").exists():
            parser.error(f"--serve: nothing was exported to {arguments.output} yet")
        with server(Writer(arguments.output), arguments.port) as serving:
            print(f"{address_of(serving)}/generate, until Ctrl-C", flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                serving.serve_forever()
        return
    # Keras reads this once, at import.
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    import keras_recurrent  # noqa: F401  (registers its presets with KerasHub)

    # isort: split
    import keras_hub

    model = keras_hub.models.CausalLM.from_preset(arguments.model)
    model.compile(sampler="greedy")
    export(model, arguments.output)
    print(f"Exported to {arguments.output}. A server of it writes after {arguments.prompt!r}:")
    served = try_out(arguments.output, arguments.prompt, arguments.max_tokens)
    prompt_tokens = 1 + len(model.preprocessor.tokenizer(arguments.prompt))  # a start token first
    room = prompt_tokens + arguments.max_tokens
    written = model.generate(arguments.prompt, max_length=room, strip_prompt=True)
    same = "the same" if served == written else f"something else: {written!r}"
    print(f"From its beginning Keras writes {same}.")


if __name__ == "__main__":
    main()
