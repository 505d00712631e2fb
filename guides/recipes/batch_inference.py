"""Generates answers to many prompts with Ray Data, from JSONL files to JSONL files.

    pip install ".[torch]" "ray[data]"
    KERAS_BACKEND=torch python guides/recipes/batch_inference.py \
      --preset griffin_tiny_text --input prompts.jsonl --output answers

Each line of an input has a `"prompt"`: a string, or a list of messages if the preset has a chat
template. The lines are divided into parts of `--lines` lines. An actor is a process with one
engine. It writes the answers of a part to a file, such as `answers/prompts-000000000.jsonl`, in the
order of the lines. Each line keeps its keys and gets a `"text"`, or an `"error"` if its prompt is
invalid.

A part is complete if its file exists. When it is started again, the program generates the missing
parts, with the same random numbers as an uninterrupted run. All files then equal those of an
uninterrupted run, unless rounding changes the tokens. Ray restarts an actor that dies, with its
part. On several machines, inputs and outputs must be on a shared disk.
"""

import argparse
import itertools
import json
import os
import pathlib


def missing_parts(paths, folder, lines):
    """Yields the parts of JSONL files without an output: dictionaries, which Ray passes to actors.

    Args:
        paths: the input files, whose names must differ.
        folder: the folder of outputs.
        lines: integer, number of lines in a part.
    """
    for path in paths:
        with path.open("rb") as file:
            for first in itertools.count(0, lines):
                offset = file.tell()
                size = sum(map(len, itertools.islice(file, lines)))
                if not size:
                    break
                output = folder / f"{path.stem}-{first:09}.jsonl"
                if not output.exists():
                    place = {"input": str(path), "offset": offset, "size": size, "first": first}
                    yield {**place, "output": str(output)}


def read_line(text):
    """Returns the JSON object in a line, or one without a prompt if the line has none."""
    try:
        line = json.loads(text)
    except ValueError:
        line = None
    return line if isinstance(line, dict) else {"line": text}


class Generator:
    """Generates the answers of parts, with one engine.

    Args:
        preset, dtype: strings, the preset and the dtype of the model.
        options: dictionary, options of `Engine`.
        sampling: dictionary, options of `SamplingParams` with a `seed`, to which the number of
            each prompt is added.
        max_new_tokens: integer, maximum number of tokens of an answer.
    """

    def __init__(self, preset, dtype, options, sampling, max_new_tokens):
        import keras_hub

        from keras_recurrent.serving import Engine

        model = keras_hub.models.CausalLM.from_preset(preset, dtype=dtype)
        self.engine = Engine(model, **options)
        self.sampling, self.max_new_tokens = sampling, max_new_tokens

    def __call__(self, part):
        """Writes the answers of a part; returns the numbers of answers and of errors."""
        with open(part["input"], "rb") as file:
            file.seek(part["offset"])
            text = file.read(part["size"]).decode()
        lines = [read_line(line) for line in text.split("\n") if line.strip()]
        requests = [self.submit(line, part["first"] + i) for i, line in enumerate(lines)]
        answers = [
            {"error": str(request)}
            if isinstance(request, ValueError)
            else {"text": request.result().text}
            for request in requests
        ]
        new = f"{part['output']}.new"
        with open(new, "w", encoding="utf-8") as file:
            for line, answer in zip(lines, answers, strict=True):
                file.write(json.dumps({**line, **answer}, ensure_ascii=False) + "\n")
        os.replace(new, part["output"])  # in one step: the file is never incomplete
        num_errors = sum("error" in answer for answer in answers)
        return {"answers": len(answers) - num_errors, "errors": num_errors}

    def submit(self, line, number):
        """Returns the request of a line, or the `ValueError` that its prompt raises."""
        from keras_recurrent.models import SamplingParams

        sampling = {**self.sampling, "seed": self.sampling["seed"] + number}
        try:
            return self.engine.submit(
                line.get("prompt"), SamplingParams(**sampling), self.max_new_tokens
            )
        except ValueError as error:
            return error


def check_settings(folder, settings):
    """Writes the settings to the folder of outputs, or exits if its parts have other settings."""
    path = folder / "settings.json"
    if path.exists() and (saved := json.loads(path.read_text())) != settings:
        raise SystemExit(f"{folder} was written with other settings: {saved}; now {settings}")
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(settings))


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--input", type=pathlib.Path, nargs="+", required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True, help="folder")
    parser.add_argument("--preset", default="griffin_tiny_text")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max-tokens", type=int, default=64, help="maximum, of an answer")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lines", type=int, default=512, help="number in a part")
    parser.add_argument("--slots", type=int, default=64, help="number per actor")
    parser.add_argument("--actors", type=int, default=1, help="one for each GPU")
    parser.add_argument("--gpus", type=float, default=0, help="number per actor")
    arguments = parser.parse_args()
    if len({path.stem for path in arguments.input}) < len(arguments.input):
        parser.error("--input must have different file names, because outputs get these names")
    return arguments


def main():
    import ray

    arguments = parse_arguments()
    options = {
        "preset": arguments.preset,
        "dtype": arguments.dtype,
        "sampling": {"temperature": arguments.temperature, "seed": arguments.seed},
        "max_new_tokens": arguments.max_tokens,
    }
    paths, folder = [path.absolute() for path in arguments.input], arguments.output.absolute()
    sizes = {str(path): path.stat().st_size for path in paths}
    check_settings(folder, {**options, "lines": arguments.lines, "input": sizes})
    parts = list(missing_parts(paths, folder, arguments.lines))
    print(f"{len(parts)} parts to generate", flush=True)
    if not parts:
        return
    engine = {"num_slots": arguments.slots, "max_queued": arguments.lines}
    backend = {"KERAS_BACKEND": os.environ.get("KERAS_BACKEND", "torch")}
    ray.init(runtime_env={"env_vars": backend})
    answers = ray.data.from_items(parts, override_num_blocks=len(parts)).map(
        Generator,
        fn_constructor_kwargs={**options, "options": engine},
        compute=ray.data.ActorPoolStrategy(size=arguments.actors),
        num_gpus=arguments.gpus,
    )
    for number, counts in enumerate(answers.iter_rows(), 1):
        print(f"{number} of {len(parts)} parts: {counts}", flush=True)


if __name__ == "__main__":
    main()
