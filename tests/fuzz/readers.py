"""Random damage to checkpoints: each ends in an error that names a file, or in a right model.

    python -m tests.fuzz.readers --draws 100000 --seed 0

changes headers, configurations and indices of the small checkpoints in `tests/data` and reads them,
without weights; `--through` loads models and compares their weights with the files. A draw depends
on the seed and its own number alone: `--start` goes on where another run ended, and `--start N
--draws 1` repeats one. The exit status is 1 if a draw ended in another way, took more than
`MOST_SECONDS`, or the process more than `MOST_BYTES` beyond what it had at first. A draw takes a
millisecond where the environment variable TMPDIR names a directory in memory.
"""

import argparse
import collections
import contextlib
import json
import os
import pathlib
import resource
import signal
import sys
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
MOST_SECONDS = {False: 2, True: 30}
MOST_BYTES = 300_000_000


class Checkpoint:
    """A sound checkpoint in a folder: its files, as they are whenever a draw begins.

    Args:
        folder: where its files are written.
        source: a folder of `tests/data`.
        shards: of how many files its tensors are; above 1 there is an index.
        values: whether the tensors have their values; if not, zeros that take no space.
    """

    def __init__(self, folder, source, shards, values):
        self.folder, self.cls, self.values = folder, SOURCES[source], values
        folder.mkdir(parents=True)
        self.config = documents.parse((DATA / source / CONFIG).read_text())
        content = (DATA / source / WEIGHTS).read_bytes()
        size = 8 + int.from_bytes(content[:8], "little")
        entries = json.loads(content[8:size])
        entries.pop("__metadata__", None)
        self.documents = {CONFIG: self.config}
        self.data = {}
        weight_map = documents.Pairs()
        for i, names in enumerate(np.array_split(sorted(entries), shards)):
            file = WEIGHTS if shards == 1 else f"part{i}.safetensors"
            header, data = documents.Pairs(), b""
            for name in map(str, names):
                begin, end = entries[name]["data_offsets"]
                entry = {**entries[name], "data_offsets": [len(data), len(data) + end - begin]}
                header.append([name, documents.parse(json.dumps(entry))])
                data += content[size + begin : size + end]
                weight_map.append([name, file])
            self.documents[file] = header
            self.data[file] = data if values else len(data)
        if shards > 1:
            index = documents.Pairs([["metadata", documents.Pairs()], ["weight_map", weight_map]])
            self.documents[INDEX] = index
        self.texts = {
            file: documents.text_of(document).encode() for file, document in self.documents.items()
        }
        for file, text in self.texts.items():
            self.write(file, text)

    def write(self, file, text, length=None):
        """Writes a file; a header with what belongs before and behind it."""
        with open(self.folder / file, "wb") as stream:
            if file not in self.data:
                stream.write(text)
                return
            length = len(text) if length is None else length
            stream.write(length.to_bytes(8, "little") + text)
            if self.values:
                stream.write(self.data[file])
            else:
                stream.truncate(8 + len(text) + self.data[file])

    @contextlib.contextmanager
    def damaged(self, rng):
        """The checkpoint with random changes, and as it was afterwards."""
        files = list(self.documents)
        # More often what is more than one of many.
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
            self.write(file, documents.text_of(document).encode("utf-8", "surrogatepass"))
            return
        text = bytearray(self.texts[file])
        at = int(rng.integers(len(text)))
        if kind == 1:
            for _ in range(1 + int(rng.integers(4))):
                text[int(rng.integers(len(text)))] = int(rng.integers(256))
        elif kind == 2:
            del text[at : at + 1 + int(rng.integers(20))]
        length = None
        if kind == 3:
            length = int((0, 1, at, len(text) + 1, 2**27, 2**62, 2**64 - 1)[rng.integers(7)])
        self.write(file, bytes(text), length)
        if rng.random() < 0.2:
            os.truncate(path, int(rng.integers(path.stat().st_size)))


def read(checkpoint):
    """Reads configuration and headers; nothing is built."""
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
    wanted = _tensors(checkpoint.folder)
    for tensor in tensors:
        found = tensor.transform.to_tensor(*(np.asarray(weights[p]) for p in tensor.weights))
        if tensor.weights and not np.array_equal(found, wanted[tensor.name], equal_nan=True):
            raise AssertionError(f"{tensor.name} is not what the file holds")
    config = model.backbone.get_config()
    for name, value in arguments.items():
        if config[name] != value:
            raise AssertionError(f"{name} is {config[name]!r}, not {value!r}")


def _tensors(folder):
    """The values of all tensors, read without the package safetensors."""
    found = {}
    for path in folder.glob("*.safetensors"):
        content = path.read_bytes()
        size = 8 + int.from_bytes(content[:8], "little")
        for name, entry in json.loads(content[8:size]).items():
            if name == "__metadata__":
                continue
            begin, end = (size + offset for offset in entry["data_offsets"])
            raw = content[begin:end]
            if entry["dtype"] == "BF16":
                array = (np.frombuffer(raw, "uint16").astype("uint32") << 16).view("float32")
            else:
                dtype = {"F32": "float32", "F16": "float16"}[entry["dtype"]]
                array = np.frombuffer(raw, dtype).astype("float32")
            found[name] = array.reshape(entry["shape"])
    return found


class TooLong(BaseException):
    """A draw went on for more than it may."""


@contextlib.contextmanager
def _alarm():
    def interrupt(*_):
        raise TooLong

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


def outcome(checkpoint, rng, through):
    """ "right", "error", or what went wrong."""
    begin = time.perf_counter()
    with checkpoint.damaged(rng):
        signal.setitimer(signal.ITIMER_REAL, 10 * MOST_SECONDS[through])
        try:
            (load if through else read)(checkpoint)
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
    if seconds > MOST_SECONDS[through]:
        result = f"{seconds:.1f} s: {result}"
    return result


def run(draws, seed, start=0, through=False, report=print):
    """`{outcome: how many}`; what went wrong is reported with the number of its draw."""
    counts = collections.Counter()
    with _alarm(), tempfile.TemporaryDirectory() as folder:
        checkpoints = [
            Checkpoint(pathlib.Path(folder, f"{source}-{shards}"), source, shards, through)
            for source in SOURCES
            for shards in (1, 2)
        ]
        (load if through else read)(checkpoints[0])  # sound; what is imported late is, now
        memory = _memory()
        for i in range(start, start + draws):
            rng = np.random.default_rng([seed, i])
            checkpoint = checkpoints[rng.integers(len(checkpoints))]
            result = outcome(checkpoint, rng, through)
            if _memory() > memory + MOST_BYTES:
                result, memory = f"memory {_memory() - memory:,} bytes: {result}", _memory()
            counts[result if result in ("right", "error") else "wrong"] += 1
            if result not in ("right", "error"):
                report(f"draw {i} of seed {seed}, {checkpoint.folder.name}: {result}")
            if i % 10_000 == 9_999:
                report(f"{i + 1}: {dict(counts)}, {_memory() / 1e6:,.0f} MB at most")
    return counts


def _memory():
    """The most memory that this process had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draws", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="the number of the first draw")
    parser.add_argument("--through", action="store_true", help="load models")
    arguments = parser.parse_args()

    def report(line):
        print(line, flush=True)

    counts = run(arguments.draws, arguments.seed, arguments.start, arguments.through, report)
    report(f"{dict(counts)}")
    sys.exit(bool(counts["wrong"]))


if __name__ == "__main__":
    main()
