"""Damages checkpoints randomly: reading must end in an error that names a file, or a right model.

Headers, configurations and indices of the small checkpoints in `tests/data` are changed. Reading
them needs no weights; loading also builds the models and compares their weights with the files. A
draw depends only on the seed and its number. It is a fault if a draw ends otherwise, takes more
than `MAX_SECONDS`, or the process grows by more than `MAX_BYTES`.
"""

import collections
import contextlib
import json
import os
import pathlib
import resource
import signal
import tempfile
import time
import warnings

import numpy as np

from keras_recurrent.checkpoints import loaders, loading
from keras_recurrent.models import (
    GriffinCausalLM,
    HGRN2CausalLM,
    LightningHybridCausalLM,
    TransNormerCausalLM,
)
from tests.fuzz import documents

DATA = pathlib.Path(__file__).parents[1] / "data"
SOURCES = {
    "recurrentgemma_tiny": GriffinCausalLM,
    "hgrn2_tiny": HGRN2CausalLM,
    "hgrn2_hybrid_tiny": HGRN2CausalLM,
    "transnormer_tiny": TransNormerCausalLM,
    "hypenet_tiny": LightningHybridCausalLM,
    "minicpm_sala_tiny": LightningHybridCausalLM,
}
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
MAX_SECONDS = {"read": 2, "load": 30}
MAX_BYTES = 300_000_000


class Checkpoint:
    """A valid checkpoint in a folder, as it is at the beginning of each draw.

    Args:
        folder: where its files are written.
        source: a folder of `tests/data`.
        shards: number of files of its tensors; if above 1, there is an index.
        with_values: if False, tensors are sparse files of zeros.
    """

    def __init__(self, folder, source, shards, with_values):
        self.folder, self.cls, self.with_values = folder, SOURCES[source], with_values
        folder.mkdir(parents=True)
        entries, values = split_safetensors((DATA / source / WEIGHTS).read_bytes())
        self.documents = {CONFIG: documents.parse((DATA / source / CONFIG).read_text())}
        self.data = {}
        weight_map = documents.Pairs()
        for i, names in enumerate(np.array_split(sorted(entries), shards)):
            file = WEIGHTS if shards == 1 else f"part{i}.safetensors"
            header, data = documents.Pairs(), b""
            for name in map(str, names):
                begin, end = entries[name]["data_offsets"]
                entry = {**entries[name], "data_offsets": [len(data), len(data) + end - begin]}
                header.append([name, documents.parse(json.dumps(entry))])
                data += values[begin:end]
                weight_map.append([name, file])
            self.documents[file] = header
            self.data[file] = data if with_values else len(data)
        if shards > 1:
            index = documents.Pairs([["metadata", documents.Pairs()], ["weight_map", weight_map]])
            self.documents[INDEX] = index
        self.texts = {f: documents.to_text(d).encode() for f, d in self.documents.items()}
        for file, text in self.texts.items():
            self.write(file, text)

    def write(self, file, text, length=None):
        """Writes a file; a header with its length, or another one, and the tensors."""
        with open(self.folder / file, "wb") as stream:
            if file not in self.data:
                stream.write(text)
                return
            length = len(text) if length is None else length
            stream.write(length.to_bytes(8, "little") + text)
            if self.with_values:
                stream.write(self.data[file])
            else:
                stream.truncate(8 + len(text) + self.data[file])

    @contextlib.contextmanager
    def damaged(self, rng):
        """The checkpoint with random changes in this context."""
        files = list(self.documents)
        chosen = {CONFIG if rng.random() < 0.4 else files[rng.integers(len(files))]}
        if rng.random() < 0.1:
            chosen.add(files[rng.integers(len(files))])
        try:
            for file in chosen:
                self._damage(file, rng)
            yield
        finally:
            for file in chosen:
                path = self.folder / file
                if path.is_dir() and not path.is_symlink():
                    path.rmdir()
                elif path.is_symlink():
                    path.unlink()
                self.write(file, self.texts[file])

    def _damage(self, file, rng):
        """Removes, replaces, rewrites or truncates a file; mostly, changes its document."""
        kind = rng.integers(24)
        path = self.folder / file
        if kind == 0:
            path.unlink()
            if rng.random() < 0.3:
                path.mkdir()
            elif rng.random() < 0.3:
                path.symlink_to(path)
            return
        if kind > 3:
            document = documents.change(self.documents[file], rng)
            self.write(file, documents.to_text(document).encode("utf-8", "surrogatepass"))
            return
        text, length = bytearray(self.texts[file]), None
        at = int(rng.integers(len(text)))
        if kind == 1:
            for _ in range(1 + int(rng.integers(4))):
                text[int(rng.integers(len(text)))] = int(rng.integers(256))
        elif kind == 2:
            del text[at : at + 1 + int(rng.integers(20))]
        else:
            length = int((0, 1, at, len(text) + 1, 2**27, 2**62, 2**64 - 1)[rng.integers(7)])
        self.write(file, bytes(text), length)
        if rng.random() < 0.2:
            os.truncate(path, int(rng.integers(path.stat().st_size)))


def split_safetensors(content):
    """The header and the data of a file, without the package safetensors."""
    size = 8 + int.from_bytes(content[:8], "little")
    entries = json.loads(content[8:size])
    entries.pop("__metadata__", None)
    return entries, content[size:]


def read(checkpoint):
    """Reads configuration and headers without building the model."""
    loader = loading.get_loader(str(checkpoint.folder))
    if isinstance(loader, loaders.CheckpointLoader):
        loader.read_headers()


def load(checkpoint):
    """Builds the model, and compares each of its weights with the file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = checkpoint.cls.from_preset(str(checkpoint.folder))
    loader = loading.get_loader(str(checkpoint.folder))
    arguments, _, tensors = loader.read_headers()
    weights = {w.path: w.numpy() if hasattr(w, "numpy") else w for w in model.backbone.weights}
    expected = _read_tensors(checkpoint.folder)
    for tensor in tensors:
        loaded = tensor.transform.to_tensor(*(np.asarray(weights[p]) for p in tensor.weights))
        if tensor.weights and not np.array_equal(loaded, expected[tensor.name], equal_nan=True):
            raise AssertionError(f"{tensor.name} differs from the file")
    config = model.backbone.get_config()
    for name, value in arguments.items():
        if config[name] != value:
            raise AssertionError(f"{name} is {config[name]!r}, not {value!r}")


def _read_tensors(folder):
    arrays = {}
    for path in folder.glob("*.safetensors"):
        entries, data = split_safetensors(path.read_bytes())
        for name, entry in entries.items():
            raw = data[slice(*entry["data_offsets"])]
            if entry["dtype"] == "BF16":
                array = (np.frombuffer(raw, "uint16").astype("uint32") << 16).view("float32")
            else:
                dtype = {"F32": "float32", "F16": "float16"}[entry["dtype"]]
                array = np.frombuffer(raw, dtype).astype("float32")
            arrays[name] = array.reshape(entry["shape"])
    return arrays


MODES = {"read": read, "load": load}


class TooLong(BaseException):
    """A draw took ten times as long as it may."""


@contextlib.contextmanager
def _alarm():
    def interrupt(*_):
        raise TooLong

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


def outcome(checkpoint, rng, mode):
    """Returns "right", "error", or a description of the fault."""
    begin = time.perf_counter()
    with checkpoint.damaged(rng):
        signal.setitimer(signal.ITIMER_REAL, 10 * MAX_SECONDS[mode])
        try:
            MODES[mode](checkpoint)
            result = "right"
        except (ValueError, OSError) as error:
            named = str(checkpoint.folder) in str(error)
            result = "error" if named else f"no file is named: {error!r:.500}"
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            result = f"{type(error).__name__}: {error!s:.500}"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    seconds = time.perf_counter() - begin
    return f"{seconds:.1f} s: {result}" if seconds > MAX_SECONDS[mode] else result


def run(numbers, seed, mode="read"):
    """Returns `{outcome: count}` of draws with these numbers, and a list of faults."""
    counts, faults = collections.Counter(), []
    with _alarm(), tempfile.TemporaryDirectory() as folder:
        checkpoints = [
            Checkpoint(pathlib.Path(folder, f"{source}-{shards}"), source, shards, mode == "load")
            for source in SOURCES
            for shards in (1, 2)
        ]
        # A valid checkpoint imports modules, which must not count as memory of a draw.
        MODES[mode](checkpoints[0])
        memory = _peak_memory()
        for i in numbers:
            rng = np.random.default_rng([seed, i])
            checkpoint = checkpoints[rng.integers(len(checkpoints))]
            result = outcome(checkpoint, rng, mode)
            if _peak_memory() > memory + MAX_BYTES:
                result = f"memory {_peak_memory() - memory:,} bytes: {result}"
                memory = _peak_memory()
            if result in ("right", "error"):
                counts[result] += 1
            else:
                faults.append(f"draw {i} of seed {seed}, {checkpoint.folder.name}: {result}")
    return counts, faults


def _peak_memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
