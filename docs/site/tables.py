"""Generates the tables of presets and implementations in the manual.

    KERAS_BACKEND=torch python docs/site/tables.py    # or: make tables

Updates docs/api/presets.md and docs/implementations.md; tests/test_docs.py checks that they are
current. A table follows a comment with its name and ends at the next empty line.
"""

import pathlib
import re

from keras_recurrent.backends.signatures import DECODING_STEPS, SIGNATURES
from keras_recurrent.models import (
    GriffinCausalLM,
    HGRN2CausalLM,
    HGRN2ImageClassifier,
    LFM2CausalLM,
    LightningHybridCausalLM,
    MambaHybridCausalLM,
    TransNormerCausalLM,
    memory_sizes,
)
from keras_recurrent.presets import (
    griffin,
    hgrn2,
    lfm2,
    lightning_hybrid,
    mamba_hybrid,
    transnormer,
)

DOCS = pathlib.Path(__file__).parents[1]
BACKENDS = DOCS.parent / "backends"
PORTABLE = BACKENDS.parent / "keras_recurrent" / "portable"
# {implementations with the same operations: where they run}, in the order of preference
FOLDERS = {
    ("cudnn",): "torch, NVIDIA GPUs from compute capability 9.0",
    ("pallas",): "JAX, TPUs",
    ("triton",): "torch and JAX, NVIDIA GPUs from compute capability 8.0",
    ("jax",): "any device",
    ("torch",): "any device",
    ("tensorflow",): "any device",
    ("portable",): "any device and exporter, in `keras.ops`",
    ("reference",): "tests, in NumPy",
}
LENGTH = 32_768  # sequence length for the size of the state
DTYPE = "bfloat16"  # dtype of published weights
VOCABULARY_NAMES = {259: "259 (bytes)"}
MAMBA_LAYERS = ("mamba", "attention", "mlp")  # in `block_types`


def griffin_cells(arguments):
    """Returns the cells of a preset between its name and its number of parameters."""
    window = arguments.get("sliding_window", 0)
    blocks = {
        ("recurrent",): "recurrent",
        ("global_attention",): "global attention",
    }.get(arguments["block_types"], f"2 recurrent, 1 local ({window:,})")
    recurrent = "recurrent" in arguments["block_types"]
    width = f"{arguments['lru_width']:,}" if recurrent else ""
    depth = str(arguments["num_layers"])
    return blocks, f"{arguments['hidden_dim']:,}", width, depth, _format_vocabulary(arguments)


def make_cells(*names):
    """Returns a function that formats these backbone arguments and the vocabulary as cells."""
    return lambda arguments: (
        *(f"{arguments[name]:,}" for name in names),
        _format_vocabulary(arguments),
    )


def hybrid_cells(arguments):
    attention = arguments["block_types"].count("global_attention")
    names = "hidden_dim", "num_layers", "attention", "num_query_heads", "intermediate_dim"
    return make_cells(*names)({**arguments, "attention": attention})


def mamba_hybrid_cells(arguments):
    """Counts the layers of each kind; a block of Falcon-H1 has one of each."""
    types = arguments["block_types"]
    mixers = [sum(name in block.split("_and_") for block in types) for name in MAMBA_LAYERS[:2]]
    mlps = len(types) if arguments.get("use_mlp") else types.count(MAMBA_LAYERS[2])
    counts = dict(zip(MAMBA_LAYERS, (*mixers, mlps), strict=True))
    names = "hidden_dim", "num_layers", *MAMBA_LAYERS, "num_mamba_heads"
    return make_cells(*names)({**arguments, **counts})


def _format_vocabulary(arguments):
    tied = " (tied)" if arguments.get("tie_word_embeddings", False) else ""
    size = arguments["vocabulary_size"]
    return VOCABULARY_NAMES.get(size, f"{size:,}") + tied


# {table: (class, sizes of its presets, columns between name and parameters, function of the
# arguments of a preset's backbone that returns these cells)}
FAMILIES = {
    "griffin": (
        GriffinCausalLM,
        griffin.SIZES,
        ("blocks", "width", "recurrent width", "depth", "vocabulary"),
        griffin_cells,
    ),
    "hgrn2": (
        HGRN2CausalLM,
        hgrn2.SIZES,
        ("width", "depth", "channels per head", "SwiGLU width", "vocabulary"),
        make_cells("hidden_dim", "num_layers", "expand_ratio", "intermediate_dim"),
    ),
    "transnormer": (
        TransNormerCausalLM,
        transnormer.SIZES,
        ("width", "depth", "heads", "SGLU width", "vocabulary"),
        make_cells("hidden_dim", "num_layers", "num_heads", "intermediate_dim"),
    ),
    "lightning_hybrid": (
        LightningHybridCausalLM,
        lightning_hybrid.SIZES,
        ("width", "depth", "blocks of attention", "heads", "SwiGLU width", "vocabulary"),
        hybrid_cells,
    ),
    "lfm2": (
        LFM2CausalLM,
        lfm2.SIZES,
        ("width", "depth", "blocks of attention", "heads", "SwiGLU width", "vocabulary"),
        hybrid_cells,
    ),
    "mamba_hybrid": (
        MambaHybridCausalLM,
        mamba_hybrid.SIZES,
        ("width", "depth", "Mamba-2", "attention", "MLP", "heads of Mamba-2", "vocabulary"),
        mamba_hybrid_cells,
    ),
}


def make_presets_table(name):
    """Returns the table of a family: sizes, parameters, and memory in `DTYPE`."""
    cls, rows, columns, cells_of = FAMILIES[name]
    header = ["preset", *columns, "parameters", "weights", "state"]
    lines = [header, ["---"] + ["---" if c == "blocks" else "---:" for c in header[1:]]]
    for preset, entry in cls.presets.items():
        sizes = memory_sizes(preset, batch_size=1, length=LENGTH, dtype=DTYPE)
        parameters = f"{entry['metadata']['params']:,}"
        memory = (_format_bytes(sizes.parameters), _format_bytes(sizes.cache))
        lines.append(
            [f"`{preset}`", *cells_of(rows[preset].backbone_arguments), parameters, *memory]
        )
    return _format_table(lines)


def make_vision_table():
    """Returns the table of image classifiers."""
    header = ["preset", "width", "depth", "channels per head", "patch", "image", "parameters"]
    lines = [header, ["---"] + ["---:"] * 6]
    for preset, entry in HGRN2ImageClassifier.presets.items():
        arguments = hgrn2.VISION_SIZES[preset].backbone_arguments
        names = "hidden_dim", "num_layers", "expand_ratio", "patch_size"
        parameters = f"{entry['metadata']['params']:,}"
        sizes = [*(str(arguments[name]) for name in names), str(arguments["image_shape"][0])]
        lines.append([f"`{preset}`", *sizes, parameters])
    return _format_table(lines)


def make_implementations_table():
    """Returns the table of implementations, from the signatures and the files in backends/."""
    lines = [["implementation", "runs on", "operations"], ["---"] * 3]
    for names, runs_on in FOLDERS.items():
        cells = {_format_operations(name) for name in names}
        if len(cells) > 1:
            raise SystemExit(f"{names} have different operations: give each a line of its own")
        lines.append([", ".join(f"`{name}`" for name in names), runs_on, *cells])
    return _format_table(lines)


def _format_operations(implementation):
    """Returns "all", "all but" the missing operations, or the present ones if they are fewer."""
    folder = PORTABLE if implementation == PORTABLE.name else BACKENDS / implementation
    operations = *SIGNATURES, *DECODING_STEPS
    present = [name for name in operations if (folder / f"{name}.py").exists()]
    missing = [name for name in operations if name not in present]
    if not missing:
        return "all"
    shorter, prefix = (missing, "all but ") if len(missing) < len(present) else (present, "")
    return prefix + ", ".join(f"`{name}`" for name in shorter)


def _format_bytes(number):
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if number >= size:
            digits = 1 if number < 100 * size else 0
            return f"{number / size:,.{digits}f} {unit}"
    return f"{number / 1e3:,.0f} kB"


def _format_table(lines):
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


TABLES = {
    "api/presets.md": {
        **{name: lambda name=name: make_presets_table(name) for name in FAMILIES},
        "vision": make_vision_table,
    },
    "implementations.md": {"implementations": make_implementations_table},
}


def table_pattern(name):
    """Returns a regular expression for a table of a page, which follows a comment with its name."""
    return re.compile(rf"(?<=<!-- table: {name} -->\n\n)(?:\|.*\n)*")


def main():
    for page, tables in TABLES.items():
        text = (DOCS / page).read_text()
        for name, table in tables.items():
            text, count = table_pattern(name).subn(lambda _, table=table: table(), text)
            if count != 1:
                raise SystemExit(f"{page} must have one line <!-- table: {name} -->; has {count}")
        (DOCS / page).write_text(text)


if __name__ == "__main__":
    main()
