"""The tables of presets and of implementations in the manual, from the package itself.

    KERAS_BACKEND=torch python docs/site/tables.py    # or: make tables

writes them into docs/presets.md and docs/implementations.md; tests/test_docs.py compares them. A
table stands behind a comment with its name, and ends at the next empty line.
"""

import pathlib
import re

from keras_recurrent.backends.signatures import SIGNATURES
from keras_recurrent.models import (
    GriffinCausalLM,
    HGRN2CausalLM,
    HGRN2ImageClassifier,
    TransNormerCausalLM,
    memory_sizes,
)
from keras_recurrent.presets import griffin, hgrn2, transnormer

DOCS = pathlib.Path(__file__).parents[1]
BACKENDS = DOCS.parent / "backends"
PORTABLE = BACKENDS.parent / "keras_recurrent" / "portable"
FOLDERS = ("reference", "jax", "torch", "tensorflow", "portable", "triton", "pallas", "cudnn")
LENGTH = 32_768  # tokens that the state of the tables has read
DTYPE = "bfloat16"  # of the weights, as published
VOCABULARY = {259: "259 (bytes)"}


def of_griffin(row):
    blocks = {
        ("recurrent",): "recurrent",
        ("global_attention",): "global attention",
    }.get(row.kind.block_types, f"2 recurrent, 1 local ({row.kind.sliding_window or 0:,})")
    recurrent = "recurrent" in row.kind.block_types
    width = f"{row.lru_width:,}" if recurrent else ""
    return blocks, f"{row.hidden_dim:,}", width, str(row.num_layers), _vocabulary(row)


def of_hgrn2(row):
    numbers = (row.hidden_dim, row.num_layers, row.expand_ratio, row.intermediate_dim)
    return *(f"{n:,}" for n in numbers), _vocabulary(row)


def of_transnormer(row):
    numbers = (row.hidden_dim, row.num_layers, row.heads, row.intermediate_dim)
    return *(f"{n:,}" for n in numbers), _vocabulary(row)


def _vocabulary(row):
    tied = " (tied)" if getattr(row, "tied", False) else ""
    return VOCABULARY.get(row.vocabulary_size, f"{row.vocabulary_size:,}") + tied


# name: (class, rows of presets/, columns between the name and the parameters, what fills them)
FAMILIES = {
    "griffin": (
        GriffinCausalLM,
        griffin.SIZES,
        ("blocks", "width", "recurrent width", "depth", "vocabulary"),
        of_griffin,
    ),
    "hgrn2": (
        HGRN2CausalLM,
        hgrn2.SIZES,
        ("width", "depth", "channels per head", "SwiGLU width", "vocabulary"),
        of_hgrn2,
    ),
    "transnormer": (
        TransNormerCausalLM,
        transnormer.SIZES,
        ("width", "depth", "heads", "SGLU width", "vocabulary"),
        of_transnormer,
    ),
}


def presets(name):
    """The table of a family: sizes, parameters, and memory in `DTYPE`."""
    cls, rows, columns, fill = FAMILIES[name]
    header = ["preset", *columns, "parameters", "weights", "state"]
    lines = [header, ["---"] + ["---" if c == "blocks" else "---:" for c in header[1:]]]
    for preset, entry in cls.presets.items():
        sizes = memory_sizes(preset, batch_size=1, length=LENGTH, dtype=DTYPE)
        parameters = f"{entry['metadata']['params']:,}"
        memory = (_bytes(sizes.parameters), _bytes(sizes.cache))
        lines.append([f"`{preset}`", *fill(rows[preset]), parameters, *memory])
    return _table(lines)


def vision():
    """The table of classifiers of images."""
    header = ["preset", "width", "depth", "channels per head", "patch", "image", "parameters"]
    lines = [header, ["---"] + ["---:"] * 6]
    for preset, entry in HGRN2ImageClassifier.presets.items():
        row = hgrn2.VISION_SIZES[preset]
        numbers = (row.hidden_dim, row.num_layers, row.expand_ratio, row.patch_size)
        parameters = f"{entry['metadata']['params']:,}"
        sizes = map(str, (*numbers, row.image_size))
        lines.append([f"`{preset}`", *sizes, parameters])
    return _table(lines)


def implementations():
    """The table of implementations, from the signatures and the files below backends/."""
    lines = [["operation", *FOLDERS], ["---"] + [":---:"] * len(FOLDERS)]
    for name in SIGNATURES:
        folders = (PORTABLE if f == PORTABLE.name else BACKENDS / f for f in FOLDERS)
        marks = ("✓" if (folder / f"{name}.py").exists() else "" for folder in folders)
        lines.append([f"`{name}`", *marks])
    return _table(lines)


def _bytes(number):
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if number >= size:
            digits = 1 if number < 100 * size else 0
            return f"{number / size:,.{digits}f} {unit}"
    return f"{number / 1e3:,.0f} kB"


def _table(lines):
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


TABLES = {
    "presets.md": {
        **{name: lambda name=name: presets(name) for name in FAMILIES},
        "vision": vision,
    },
    "implementations.md": {"implementations": implementations},
}


def place_of(name):
    """A pattern of a table of a page, by the comment in front of it."""
    return re.compile(rf"(?<=<!-- table: {name} -->\n\n)(?:\|.*\n)*")


def main():
    for page, tables in TABLES.items():
        text = (DOCS / page).read_text()
        for name, table in tables.items():
            text, found = place_of(name).subn(lambda _, table=table: table(), text)
            if found != 1:
                raise SystemExit(f"{page} must have one line <!-- table: {name} -->; has {found}")
        (DOCS / page).write_text(text)


if __name__ == "__main__":
    main()
