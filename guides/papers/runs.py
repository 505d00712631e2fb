"""Shared code of this folder's scripts: text, raw results, figures, tables."""

import dataclasses
import json
import os
import pathlib
import pydoc_data.topics
import sys
import time

import keras
import numpy as np

PASSES = 2  # maximum number of passes over the text

# The folders of the other guides and of benchmarks.
sys.path.extend(str(pathlib.Path(__file__).resolve().parents[i]) for i in (1, 2))


# --- Text ---


def read_text(file=None, held_out=0.15):
    """Returns training and held-out text as arrays of bytes.

    The text is `file`, or the documentation that comes with Python, without repeated paragraphs.
    The last `held_out` of it is held out.
    """
    if file is None:
        paragraphs = "\n\n".join(pydoc_data.topics.topics.values()).split("\n\n")
        text = "\n\n".join(dict.fromkeys(paragraphs)).encode()
    else:
        text = pathlib.Path(file).read_bytes()
    found = np.frombuffer(text, "uint8")
    return np.split(found, [round(len(found) * (1 - held_out))])


def rows_of(text, starts, length):
    """Returns `length` bytes from each of `starts` [...], wrapping around at the text's end."""
    return text[(np.asarray(starts)[..., None] + np.arange(length)) % len(text)].astype("int32")


def text_batches(text, seeds, steps, length, tokens):
    """Yields, for each step, random sequences of every seed and their next bytes as labels."""
    if tokens < length:
        raise SystemExit(f"--tokens must be at least {length:,}, one sequence; got {tokens:,}.")
    draws = [np.random.default_rng(seed) for seed in seeds]
    for _ in range(steps):
        starts = [rng.integers(0, len(text) - length, tokens // length) for rng in draws]
        rows = rows_of(text, starts, length + 1)
        yield rows[..., :-1], rows[..., 1:]


def spread(text, count, distance, length):
    """Returns windows [count, length] whose starts are `distance` bytes apart.

    Windows wrap around at the end of the first `count * distance` bytes. Any `distance` adjacent
    positions, taken over all windows, therefore see this text exactly once, and no position has
    easier text than another.
    """
    if max(length, count * distance) > len(text) or length > count * distance:
        raise SystemExit(
            f"{count:,} windows of {length:,} bytes, {distance:,} apart, need a held-out text of "
            f"at least {max(length, count * distance):,} bytes and must cover {length:,}; it has "
            f"{len(text):,}: take a longer --text, or other --windows."
        )
    return rows_of(text[: count * distance], np.arange(count) * distance, length)


# --- Raw results: one line of JSON per run ---


class Results:
    """Lines of a JSONL file; a later run appends the missing ones."""

    def __init__(self, path):
        self.path = pathlib.Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        self.lines = [json.loads(line) for line in lines]

    def append(self, **line):
        self.lines.append(line)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def select(self, **key):
        """Returns the lines with these values."""
        return [line for line in self.lines if all(line.get(k) == v for k, v in key.items())]

    def lines_by(self, keys, outer, inner):
        """Returns `{outer: {inner: lines}}` of the keys that have lines.

        outer, inner: names of fields of a key.
        """
        found: dict = {}
        for key in keys:
            if lines := self.select(**key):
                found.setdefault(key[outer], {})[key[inner]] = lines
        return found

    def curves(self, keys, label, x, value):
        """Returns `{label: {x: values of all seeds}}`; `value` is a function of a line."""
        return {
            name: {place: np.array(list(map(value, lines))) for place, lines in found.items()}
            for name, found in self.lines_by(keys, label, x).items()
        }

    def missing(self, seeds, **key):
        """Returns the seeds without a line with these values."""
        return [seed for seed in seeds if not self.select(seed=seed, **key)]


def machine():
    """Returns the device and backend in use."""
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


def clock():
    """Returns a clock and its description: CPU time on a CPU, where other programs may run."""
    on_cpu = "CPU" in machine()
    return (time.process_time, "CPU time") if on_cpu else (time.perf_counter, "wall time")


# --- Figures and tables ---


@dataclasses.dataclass
class Panel:
    """A plot and a table of values over seeds, by x, for several curves."""

    title: str
    xlabel: str
    ylabel: str
    curves: dict  # {label: {x: the values of all seeds}}; values may be missing
    verdicts: dict = dataclasses.field(default_factory=dict)  # {label: text}, the last column
    digits: int = 3
    # "octaves": powers of two with ticks at each x; "linear"; "log" of both axes; "names" as x
    scale: str = "octaves"
    last: bool = False  # the table has only the last value of each curve
    mark: float | None = None  # x of a vertical line
    text: str = ""  # replaces the table

    def __post_init__(self):
        present = {
            name: {x: values for x, values in found.items() if len(values)}
            for name, found in self.curves.items()
        }
        self.curves = {name: found for name, found in present.items() if found}
        self.places = sorted({x for found in self.curves.values() for x in found})

    def draw(self, axes):
        """Plots means, with bars of one standard deviation."""
        for label, found in self.curves.items():
            bars = [deviations(values) for values in found.values()]
            means = [np.mean(values) for values in found.values()]
            axes.errorbar(list(found), means, bars, marker=".", capsize=2, label=label)
        if self.mark is not None:
            axes.axvline(self.mark, color="gray", linestyle="--", linewidth=1)
        axes.set(xlabel=self.xlabel, ylabel=self.ylabel, title=self.title)
        if self.scale == "octaves":
            axes.set_xscale("log", base=2)
            axes.set_xticks(self.places, [f"{x:,}" for x in self.places])
        elif self.scale == "log":
            axes.loglog()
        elif self.scale == "names":
            axes.tick_params(axis="x", labelrotation=90)
        if self.scale != "names":
            axes.legend()

    def table(self):
        """Formats a Markdown table with a row per curve."""
        if self.text:
            return self.text
        places = [None] if self.last else self.places
        rows = []
        for label, found in self.curves.items():
            values = [list(found.values())[-1] if self.last else found.get(x, ()) for x in places]
            cells = [mean_with_error(v, self.digits) if len(v) else "" for v in values]
            rows.append((label, *cells, self.verdicts.get(label, "")))
        names = ["at the end"] if self.last else [f"{x:,}" for x in places]
        return table((f"{self.title}: {self.ylabel} by {self.xlabel}", *names, ""), rows)


def octaves(shortest, longest):
    """Returns lengths that double from `shortest` to `longest`."""
    return [shortest << i for i in range((longest // shortest).bit_length())]


def deviations(values):
    """Returns the standard deviation over seeds; NaN for one seed, so no comparison holds."""
    return np.std(values, ddof=1) if len(values) > 1 else np.nan


def clear(lower, higher):
    """Returns True if mean(higher) exceeds mean(lower) by more than two standard deviations."""
    gap = np.mean(higher) - np.mean(lower)
    return bool(gap > 2 * np.hypot(deviations(lower), deviations(higher)))


def mean_with_error(values, digits=3):
    """Formats `mean ± standard deviation` over seeds, or the value of a single seed."""
    error = f" ± {deviations(values):.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{error}"


def yes(holds):
    """Formats a verdict."""
    return "yes" if holds else "NO"


def table(header, rows):
    """Formats a Markdown table: text in the first column, numbers in the others."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (header, rule, *rows))
