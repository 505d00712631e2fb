"""What the guides of this folder share: command line, text, raw results, pictures, tables."""

import argparse
import dataclasses
import importlib.machinery
import json
import os
import pathlib
import pydoc_data.topics
import types
from typing import Any

import keras
import numpy as np

PASSES = 2  # over the text, at most


# --- The command line ---


def command_line(doc, miniature, full):
    """A parser of what all guides take, and of the fields of its two sizes, dataclasses."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--full", action="store_true", help="the size for one GPU")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="0 1 2")
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        default=pathlib.Path("build/papers"),
        help="a folder, build/papers: runs that stand in its .jsonl are not made again",
    )
    of_tuples: dict[Any, Any] = {tuple: int, tuple[float, ...]: float}
    for field in dataclasses.fields(miniature):
        small, large = (_shown(getattr(size, field.name)) for size in (miniature, full))
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=of_tuples.get(field.type, field.type),
            nargs="+" if field.type in of_tuples else None,
            help=small if small == large else f"{small}; with --full {large}",
        )
    return parser


def _shown(value):
    """A default as one would write it on the command line."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def read_command_line(parser, miniature, full):
    """The arguments, and the size that they ask for."""
    arguments = parser.parse_args()
    given = {f.name: getattr(arguments, f.name) for f in dataclasses.fields(miniature)}
    given = {name: value for name, value in given.items() if value is not None}
    return arguments, dataclasses.replace(full if arguments.full else miniature, **given)


def guide_above(name):
    """The guide of the folder above, as a module; one of this folder may have the same name."""
    path = pathlib.Path(__file__).parents[1] / f"{name}.py"
    loader = importlib.machinery.SourceFileLoader(f"guide_{name}", str(path))
    module = types.ModuleType(loader.name)
    loader.exec_module(module)
    return module


# --- Text ---


def read_text(file=None, held_out=0.15):
    """Training and held-out text, as arrays of bytes.

    It is the documentation that Python brings along, each paragraph once, or a file. The text
    behind the first `1 - held_out` of it is held out.
    """
    if file is None:
        paragraphs = "\n\n".join(pydoc_data.topics.topics.values()).split("\n\n")
        text = "\n\n".join(dict.fromkeys(paragraphs)).encode()
    else:
        text = pathlib.Path(file).read_bytes()
    found = np.frombuffer(text, "uint8").astype("int32")
    return np.split(found, [round(len(found) * (1 - held_out))])


def rows_of(text, starts, length):
    """The bytes from each of `starts` [...] on in a text, which begins again at its end."""
    return text[(np.asarray(starts)[..., None] + np.arange(length)) % len(text)]


def text_batches(text, seeds, steps, length, tokens):
    """For each step, rows of every seed from random places, and what follows each byte."""
    if tokens < length:
        raise SystemExit(f"A step of {tokens:,} tokens has no row of {length:,}: more --tokens.")
    draws = [np.random.default_rng(seed) for seed in seeds]
    for _ in range(steps):
        starts = [rng.integers(0, len(text) - length, tokens // length) for rng in draws]
        rows = rows_of(text, starts, length + 1)
        yield rows[..., :-1], rows[..., 1:]


def spread(text, count, distance, length):
    """`count` windows [count, length] that begin `distance` bytes behind each other.

    Those that reach the end of the text that they begin in go on at its beginning. So any
    `distance` places beside each other see, in all windows together, all of it once: whatever
    model reads them, no place has easier text than another.
    """
    if max(length, count * distance) > len(text) or length > count * distance:
        raise SystemExit(
            f"{count:,} windows of {length:,} bytes, {distance:,} behind each other, need a "
            f"held-out text of {max(length, count * distance):,} bytes, and as many windows; it "
            f"has {len(text):,}: take a longer --text, or other --windows."
        )
    return rows_of(text[: count * distance], np.arange(count) * distance, length)


# --- Raw results, a line of JSON a run ---


class Results:
    """The lines of a file, to which a later sitting appends what is missing."""

    def __init__(self, path):
        self.path = pathlib.Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        self.lines = [json.loads(line) for line in lines]

    def append(self, **line):
        self.lines.append(line)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def of(self, **key):
        """The lines that have these values."""
        return [line for line in self.lines if all(line[k] == v for k, v in key.items())]

    def missing(self, seeds, **key):
        """The seeds that have no line with these values."""
        return [seed for seed in seeds if not self.of(seed=seed, **key)]


def machine():
    """What a run ran on."""
    backend = keras.config.backend()
    name = f"{os.cpu_count()} CPU cores"
    if backend == "jax":
        import jax

        device = jax.devices()[0]
        name = name if device.platform == "cpu" else device.device_kind
    if backend == "tensorflow":
        import tensorflow as tf

        for device in tf.config.list_physical_devices("GPU")[:1]:
            name = tf.config.experimental.get_device_details(device).get("device_name", "GPU")
    if backend == "torch":
        import torch

        name = torch.cuda.get_device_name() if torch.cuda.is_available() else name
    return f"{name}, {backend}"


# --- Pictures and tables ---


def picture(arguments, name):
    """Where a guide's picture is drawn: those of both sizes stand beside each other."""
    return arguments.output / f"{name}{'_full' if arguments.full else ''}.png"


def octaves(shortest, longest):
    """The lengths shortest, twice as much, and so on to the longest."""
    return [shortest << i for i in range((longest // shortest).bit_length())]


def draw_band(axes, x, points, **style):
    """The mean over seeds at each of x, in a band of one standard deviation to each side.

    points: for each of x what the seeds have there, of which there may be different numbers.
    """
    mean = np.array([np.mean(values) for values in points])
    deviation = np.array([deviations(values) for values in points])
    (line,) = axes.plot(x, mean, **style)
    axes.fill_between(
        x, mean - deviation, mean + deviation, color=line.get_color(), alpha=0.25, linewidth=0
    )


def deviations(values):
    """The standard deviation over seeds; NaN of a single one, which is beyond no other."""
    return np.std(values, ddof=1) if len(values) > 1 else np.nan


def with_error(values, digits=3):
    """`mean ± standard deviation` over seeds; of a single one, itself."""
    error = f" ± {deviations(values):.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{error}"


def yes(holds):
    """A verdict in words."""
    return "yes" if holds else "NO"


def percent(shares):
    """Shares over seeds as `with_error`, in hundredths."""
    return with_error(100 * np.asarray(shares), 1)


def table(header, rows):
    """A table in Markdown: text in the first column, numbers in the others."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (header, rule, *rows))
