"""Export a language model, and serve it: text over HTTP, as it is written.

    KERAS_BACKEND=torch python guides/recipes/serving.py --model build/from_files/model
    python guides/recipes/serving.py --serve --port 8000

The first command exports a model, starts a server, asks it once, and compares the answer with what
Keras writes. The second one serves what was exported until Ctrl-C, without Keras and without this
package. Meanwhile, elsewhere:

    curl --no-buffer --data '{"prompt": "The statement"}' http://127.0.0.1:8000/generate

What is exported is one step: the next token and a state in, logits and the next state out. A state
has one size, so a server needs the same memory and time for a token however long a text is. On
TensorFlow a step is a SavedModel, which TensorFlow runs; on torch it is an ONNX file, which
onnxruntime runs (`pip install onnx onnxscript onnxruntime`). From JAX, save the model with
`save_to_preset`, and export the directory with one of the two: it is the same for all backends.
Without `--model` a tiny HGRN2 with random weights writes noise.
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
MOST_TOKENS, MOST_BYTES = 4096, 2**16  # of an answer, and of a question


# --- 1. Export: a step, the state before the first token, and what makes tokens of text ---


def export(model, folder):
    """Writes a folder that `Writer` reads."""
    import keras

    from keras_recurrent.exporting import state_names
    from keras_recurrent.tokenizers import ByteTokenizer

    backend = keras.config.backend()
    if backend == "jax":
        raise SystemExit("Export with KERAS_BACKEND=torch or tensorflow; see the first lines here.")
    preprocessor = model.preprocessor
    if preprocessor is None:
        raise SystemExit("--model has no tokenizer, which would make tokens of text.")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tokenizer = preprocessor.tokenizer
    reads_bytes = isinstance(tokenizer, ByteTokenizer)
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
        export_step(model, state, names, folder / "step.onnx")


def export_step(model, state, names, path):
    """An ONNX file of one token and a state, in any number of rows."""
    import keras

    class Step(keras.Model):
        def call(self, inputs):
            before = keras.tree.pack_sequence_as(state, [inputs[name] for name in names])
            logits, _, after = model.call_with_cache(inputs["token_ids"], before)
            return [logits, *keras.tree.flatten(after)]

    step = Step()
    step.language_model = model  # whose weights are thereby those of the step
    parts = dict(zip(names, keras.tree.flatten(state), strict=True))
    signature = {
        name: keras.InputSpec(
            keras.backend.standardize_dtype(part.dtype), (None, *part.shape[1:]), name=name
        )
        for name, part in parts.items()
    }
    signature["token_ids"] = keras.InputSpec("int32", (None, 1), name="token_ids")
    step({"token_ids": np.ones((1, 1), "int32"), **parts})  # Keras exports what was called
    step.export(str(path), format="onnx", input_signature=[signature], verbose=False)


# --- 2. What serves needs no Keras ---


def onnx_step(path):
    """A function `(tokens [1, 1], {name: array})` to `(logits [1, 1, V], {name: array})`."""
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

    loaded = tf.saved_model.load(str(path))  # to be kept, with its weights, as long as the step

    def step(tokens, state):
        given = {name: tf.constant(array) for name, array in state.items()}
        found = loaded.signatures["step"](token_ids=tf.constant(tokens), **given)
        found = {name: array.numpy() for name, array in found.items()}
        return found.pop("logits"), found

    return step


class Writer:
    """Text from an exported model."""

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
            return [byte + 3 for byte in text.encode()]  # 0 to 2 stand for no text
        return self.pieces.encode(text)

    def decode(self, tokens):
        if self.about["tokenizer"] == BYTES:
            return bytes(token - 3 for token in tokens if token > 2).decode("utf-8", "replace")
        return self.pieces.decode(tokens)

    def write(self, prompt, max_tokens, temperature, seed=None):
        """Pieces of text, as soon as they are certain.

        Args:
            prompt: string.
            max_tokens: integer, the most tokens to write.
            temperature: number; 0 takes the most probable token each time.
            seed: integer, for the same text again; None: another one each time.
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
            if not text.endswith("\ufffd"):  # else it may be half a character
                yield text[len(out) :]
                out = text
            logits, state = self.step(np.array([[token]], "int32"), state)
        yield self.decode(tokens)[len(out) :]


def choose(logits, temperature, rng):
    if temperature == 0:
        return int(logits.argmax())
    shares = np.exp((logits - logits.max()) / temperature)
    return int(rng.choice(len(shares), p=shares / shares.sum()))


# --- 3. A server, for this machine alone: others belong behind one with keys and limits ---


def server(writer, port=0):
    """A server on the loopback address; port 0 takes one that is free."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # which has answers in pieces

        def do_POST(self):
            size = int(self.headers.get("Content-Length") or 0)
            if self.path != "/generate" or size > MOST_BYTES:
                self.close_connection = True  # what was sent is not read
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
            except ConnectionError:  # nobody listens any more
                self.close_connection = True

        def chunk(self, data):
            if data:  # an empty one would end the answer
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

        def log_message(self, *args):
            """Says nothing of each request."""

    return http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)


def checked(question):
    """The arguments of `write`.

    Raises:
        ValueError: a question that is not as it should be.
    """
    if not isinstance(question, dict) or not isinstance(question.get("prompt"), str):
        raise ValueError('The question must be a JSON object with a string "prompt".')
    question["prompt"].encode()  # a ValueError for halves of characters, as JSON may hold them
    max_tokens, temperature = question.get("max_tokens", 100), question.get("temperature", 0.8)
    if type(max_tokens) is not int or not 1 <= max_tokens <= MOST_TOKENS:
        raise ValueError(f'"max_tokens" must be an integer from 1 to {MOST_TOKENS}.')
    if type(temperature) not in (int, float) or not 0 <= temperature <= 10:
        raise ValueError('"temperature" must be a number from 0 to 10.')
    return {"prompt": question["prompt"], "max_tokens": max_tokens, "temperature": temperature}


# --- 4. A client ---


def ask(address, **question):
    """Pieces of the answer, as they come."""
    request = urllib.request.Request(f"{address}/generate", json.dumps(question).encode())
    whole_characters = codecs.getincrementaldecoder("utf-8")()
    # Not by a proxy of the environment, which does not know this machine's own servers.
    directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with directly.open(request, timeout=60) as answer:
        while piece := answer.read1(4096):
            yield whole_characters.decode(piece)


def address_of(serving):
    return "http://{}:{}".format(*serving.server_address)


def try_out(folder, prompt, max_tokens):
    """What a server answers, and in how many pieces it came."""
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
    parser.add_argument("--serve", action="store_true", help="serve what --output has, and stay")
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
    # Keras reads this once, when it is imported.
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    import keras_recurrent  # noqa: F401  (whose presets KerasHub then knows)

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
