"""Reader of `.safetensors` checkpoints: headers first, then one tensor at a time."""

import math
import os
from typing import NamedTuple

from keras_recurrent.checkpoints import files
from keras_recurrent.checkpoints.messages import short_repr

ONE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# {name in the safetensors format: name in NumPy with ml_dtypes}
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
BYTES = {"F32": 4, "BF16": 2, "F16": 2}


class Header(NamedTuple):
    """Header of a tensor: its file, shape and dtype, in the names of safetensors."""

    path: str
    name: str
    shape: tuple[int, ...]
    dtype: str


class Checkpoint:
    """Tensors of a preset: one `model.safetensors`, or several files with an index.

    The constructor reads only headers; `read` returns one tensor, in the dtype of the file. Only
    safetensors files are opened, because loading pickled weights may run code.

    Args:
        preset: string, a directory or `hf://owner/repository`.
        canonical_name: a function from the name of a tensor in a file to its name in `tensors`, or
            None for a tensor that is not used.

    Attributes:
        tensors: `{name: Header}`.

    Raises:
        FileNotFoundError: there are no such files, or a file of the index is missing.
        ValueError: a file is damaged, the files do not hold the tensors of the index, or two
            tensors get the same name.
        ImportError: safetensors is not installed.
    """

    def __init__(self, preset, canonical_name=lambda name: name):
        self.preset = preset
        self._open = files.require("safetensors", "Reading a checkpoint").safe_open
        self._error_class = files.require("safetensors", "Reading a checkpoint").SafetensorError
        self.tensors = {}
        self._files = files.PresetFiles(preset)
        listings = self._listings()
        paths = {name: self._files.path(name) for name in listings}
        for name, listed in listings.items():
            headers = self._headers(paths[name])
            if listed is not None and set(headers) != listed:
                tensor = sorted(set(headers) ^ listed)[0]
                where = "the index alone" if tensor in listed else "the file alone"
                raise ValueError(
                    f"{INDEX_FILE} of {preset!r} and {name} differ: {short_repr(tensor)} is in "
                    f"{where}. The files are not of one checkpoint; fetch them all again."
                )
            for header in headers.values():
                tensor = canonical_name(header.name)
                if tensor in self.tensors:
                    raise ValueError(
                        f"{preset!r} has {short_repr(tensor)} twice, under the names "
                        f"{short_repr(self.tensors[tensor].name)} and {short_repr(header.name)}."
                    )
                if tensor is not None:
                    self.tensors[tensor] = header

    def read(self, name):
        """Returns the values of a tensor as a NumPy array."""
        header = self.tensors[name]
        with self._open(header.path, "np") as file:
            return file.get_tensor(header.name)

    def num_bytes(self):
        """Returns the size of all tensors in bytes."""
        return sum(
            math.prod(header.shape) * BYTES.get(header.dtype, 0) for header in self.tensors.values()
        )

    def _listings(self):
        """Returns `{file: set of its tensors}`, with None for the tensors without an index."""
        try:
            index = self._files.read_json(INDEX_FILE)
        except FileNotFoundError:
            if self._files.exists(ONE_FILE):
                return {ONE_FILE: None}
            raise FileNotFoundError(_no_weights(self.preset)) from None
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{INDEX_FILE} of {self.preset!r} has no 'weight_map'.")
        listed = {}
        for name, file in weight_map.items():
            is_file_name = isinstance(file, str) and os.path.basename(file) == file
            if not is_file_name or not file.endswith(".safetensors"):
                raise ValueError(
                    f"{INDEX_FILE} of {self.preset!r} names {short_repr(file)}. Tensors are read "
                    "only from .safetensors files in the directory of the index."
                )
            listed.setdefault(file, set()).add(name)
        return dict(sorted(listed.items()))

    def _headers(self, path):
        try:
            with self._open(path, "np") as file:
                slices = {key: file.get_slice(key) for key in list(file.keys())}
                headers = {
                    key: Header(path, key, tuple(part.get_shape()), part.get_dtype())
                    for key, part in slices.items()
                }
        except self._error_class as error:
            raise ValueError(f"{path} is damaged or cut off ({error}). Fetch it again.") from error
        # safetensors silently keeps one of two tensors with the same name; `parse_json` raises.
        with open(path, "rb") as file:
            files.parse_json(file.read(int.from_bytes(file.read(8), "little")), path)
        return headers


def _no_weights(preset):
    message = (
        f"{preset!r} has neither {ONE_FILE} nor {INDEX_FILE}. `load_weights=False` makes a model "
        "of its sizes with fresh weights."
    )
    pickled = ("pytorch_model.bin", "pytorch_model.bin.index.json")
    if any(os.path.exists(os.path.join(preset, name)) for name in pickled):
        message += " It has pytorch_model.bin, which is pickled"
    elif preset.startswith(files.HUB):
        # Asking for a pickled file would fetch it.
        message += " If it has pytorch_model.bin, that is pickled"
    else:
        return message
    return (
        f"{message} and never read: loading it may run code. Save the model anew as safetensors, "
        "with the library that it came from, and load that directory."
    )
