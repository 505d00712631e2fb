"""Randomly damaged checkpoints: reading ends in an error that names a file, or without one.

    python -m pytest tests/fuzz/test_readers.py --nightly=tests/fuzz --draws 10000

A draw takes a millisecond if the environment variable TMPDIR names a directory in memory. `--start`
continues after another run; with `--draws 1` it repeats a draw.
"""

import json
import time

import numpy as np
import pytest

from keras_recurrent import models  # noqa: F401  (its modules register the layouts)
from keras_recurrent.checkpoints import loaders, loading
from tests.checkpoints import golden

resource = pytest.importorskip("resource", reason="Unix alone has it")

pytestmark = [pytest.mark.nightly, pytest.mark.once]

SOURCES = sorted(
    path.name for path in golden.DATA.glob("*_tiny") if (path / "config.json").exists()
)
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
MAX_SECONDS, MAX_BYTES = 2, 300_000_000  # of a draw

# JSON text that replaces a value, also of several entries and of keys that occur twice.
HOSTILE = [
    json.dumps(value)
    for value in (
        *(None, True, False, 0, -1, 1, 2, 3, 7, 2**31, 2**53, 2**63, 2**64 - 1, -(2**63), 10**7),
        *(10**400, 0.0, -0.0, 0.5, 1.5, 1e-320, 1e-30, 1e300, float("inf"), float("nan")),
        *("", "x", "F64", "BF16", "I8", "BOOL", "attention", "recurrent", "../config.json", "."),
        *("model.safetensors", "1", "\x00", "\ud800", "a" * 10_000, [], [[]], [1], ["x"], [None]),
        *([1, 2, 3, 4], [2**62, 2**62], [0, 2**63], list(range(999)), {}, {"x": 1}),
    )
]
HOSTILE += ["[" * 3000 + "]" * 3000, '{"a":' * 900 + "1" + "}" * 900, "1" + "0" * 5000, "1e999"]
HOSTILE += ["-", "nul", '"', ",", "{", '0,"dtype":"F32"', '1,"x":2', '{"shape":[0],"shape":[1]}']
KEYS = ("", "x", "__metadata__", "dtype", "model_type", "registered_name", "\x00", "a" * 5000)


def make_files(source, shards):
    """Returns `{file: (its JSON, size of its tensors or None)}`."""
    folder = golden.DATA / source
    content = (folder / WEIGHTS).read_bytes()
    entries = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    entries.pop("__metadata__", None)
    files, weight_map = {CONFIG: (golden.read_config(folder), None)}, {}
    for i, names in enumerate(np.array_split(sorted(entries), shards)):
        file, size, header = WEIGHTS if shards == 1 else f"part{i}.safetensors", 0, {}
        for name in map(str, names):
            begin, end = entries[name]["data_offsets"]
            header[name] = {**entries[name], "data_offsets": [size, size + end - begin]}
            size += end - begin
            weight_map[name] = file
        files[file] = header, size
    return files if shards == 1 else {**files, INDEX: ({"weight_map": weight_map}, None)}


def positions(node):
    """Yields `(container, key or index)` of every value in a document."""
    for key in node if isinstance(node, dict) else range(len(node)):
        yield node, key
        if isinstance(node[key], (dict, list)):
            yield from positions(node[key])


def damage(document, rng):
    """Returns the bytes of a document after random changes."""
    document, replaced = json.loads(json.dumps(document)), {}
    for i in range(rng.integers(1, 4)):
        places = list(positions(document)) or [({"": 0}, "")]
        node, key = places[rng.integers(len(places))]
        other, other_key = places[rng.integers(len(places))]
        kind = rng.integers(6)
        if kind == 0:
            del node[key]
        elif kind == 1:
            node[key] = json.loads(json.dumps(other[other_key]))
        elif kind == 2 and isinstance(node, dict):
            node[KEYS[rng.integers(len(KEYS))]] = node.pop(key)
        else:
            node[key] = f"@{i}@"
            replaced[f'"@{i}@"'] = HOSTILE[rng.integers(len(HOSTILE))]
    text = json.dumps(document)
    for placeholder, hostile in replaced.items():
        text = text.replace(placeholder, hostile)
    content, at = bytearray(text.encode()), rng.integers(len(text))
    kind = rng.integers(12)
    if kind == 0:
        content[at] = rng.integers(256)
    elif kind == 1:
        del content[at : at + rng.integers(1, 20)]
    return bytes(content)


def write(path, content, size, length=None):
    """Writes a file, whose header has a size of its tensors, zeros, and its own length."""
    with open(path, "wb") as stream:
        if size is not None:
            stream.write((len(content) if length is None else length).to_bytes(8, "little"))
        stream.write(content)
        stream.truncate(stream.tell() + (size or 0))


def read(folder):
    """Reads configuration and headers without building the model. Returns the fault, or None."""
    begin = time.perf_counter()
    try:
        loader = loading.get_loader(str(folder))
        if isinstance(loader, loaders.CheckpointLoader):
            loader.read_headers()
        fault, is_right = None, True
    except (ValueError, OSError) as error:
        fault, is_right = None if str(folder) in str(error) else f"{error!r} names no file", False
    except Exception as error:
        fault, is_right = f"{error!r:.500}", False
    seconds = time.perf_counter() - begin
    return f"{seconds:.1f} s" if seconds > MAX_SECONDS else fault, is_right


def peak_memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_damaged_checkpoint_is_read_or_raises_an_error_with_its_file(request, tmp_path):
    """A damaged header or configuration crashes, takes memory, or the error names no file."""
    draws, start = request.config.getoption("draws"), request.config.getoption("start")
    draws = int({"few": 120, "many": 200_000}.get(draws, draws))
    checkpoints = {}
    for number, source in enumerate(SOURCES):
        folder = tmp_path / source
        folder.mkdir()
        checkpoints[folder] = make_files(source, shards=1 + number % 2)
        for file, (document, size) in checkpoints[folder].items():
            write(folder / file, json.dumps(document).encode(), size)
        assert read(folder) == (None, True)
    memory, num_right = peak_memory(), 0
    for number in range(start, start + draws):
        rng = np.random.default_rng(number)
        folder, files = [*checkpoints.items()][rng.integers(len(checkpoints))]
        file = CONFIG if rng.random() < 0.4 else [*files][rng.integers(len(files))]
        document, size = files[file]
        lengths = (None, None, None, None, None, 0, 1, 2**27, 2**62, 2**64 - 1)
        write(folder / file, damage(document, rng), size, lengths[rng.integers(len(lengths))])
        if rng.random() < 0.05:
            (folder / file).unlink()
        fault, is_right = read(folder)
        assert fault is None, f"draw {number}, {folder.name}, {file}: {fault}"
        assert peak_memory() < memory + MAX_BYTES, f"draw {number}, {folder.name}, {file}"
        num_right += is_right
        write(folder / file, json.dumps(document).encode(), size)
    if draws >= 120:
        assert 5 < num_right < draws - 30
