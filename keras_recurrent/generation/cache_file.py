"""A `GenerationCache` in a safetensors file."""

import dataclasses
import hashlib
import json
import os
import uuid

import keras
import numpy as np
from keras import ops

from keras_recurrent.checkpoints import files
from keras_recurrent.devices.jax_processes import gather_to_numpy
from keras_recurrent.generation.cache_key import Fit

FORMAT, VERSION = "keras_recurrent.generation_cache", 2
LAST_TOKEN, NUM_TOKENS, STATE = "last_token", "num_tokens", "state"


def write_file(cache, path):
    """Writes a cache beside `path`, and then in its place."""
    to_bytes = files.require("safetensors.numpy", "Saving a cache").save
    path = os.path.realpath(os.fspath(path))
    if os.path.isdir(path):
        raise IsADirectoryError(
            f"{path!r} is a directory. Name a file, such as 'chat.safetensors'."
        )
    tensors = {STATE + name: _as_numpy(array) for name, array in _named(cache.state).items()}
    tensors |= {LAST_TOKEN: cache.last_token, NUM_TOKENS: cache.num_tokens}
    content = {
        "version": VERSION,
        "max_length": cache.max_length,
        "fit": dataclasses.asdict(cache.fit),
    }
    metadata = {"format": FORMAT, "content": json.dumps(content, sort_keys=True)}
    metadata["sha256"] = _checksum(tensors)
    folder, name = os.path.split(path)
    os.makedirs(folder, exist_ok=True)
    temporary = os.path.join(folder, f".{name}-{uuid.uuid4().hex}")
    try:
        with open(temporary, "xb") as file:
            file.write(to_bytes(tensors, metadata=metadata))
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise


def read_file(path):
    """The `Fit` of the cache in a file, and a function of a model that it fits.

    The function returns `(state, last_token, num_tokens, max_length)`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, or no cache of this version.
    """
    package = files.require("safetensors", "Loading a cache")
    path = os.fspath(path)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"There is no file {path!r}.")
    try:
        with package.safe_open(path, "np") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
    except package.SafetensorError as error:
        raise ValueError(f"{path} is damaged or cut off ({error}).") from error
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path} holds no cache: `GenerationCache.save` writes one.")
    if metadata.get("sha256") != _checksum(tensors):
        raise ValueError(f"{path} is damaged: its numbers are not those that were written.")
    content = files.parse_json(metadata.get("content", "").encode(), path)
    if content.get("version") != VERSION:
        raise ValueError(
            f"{path} is of version {content.get('version')!r}; this package reads {VERSION}."
        )
    try:
        fit, max_length = Fit(**content["fit"]), content["max_length"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} does not say which model it fits ({error}).") from error

    def arrays(model):
        last_token, num_tokens = (tensors.pop(name, None) for name in (LAST_TOKEN, NUM_TOKENS))
        if last_token is None or last_token.ndim != 1 or not last_token.size:
            raise ValueError(f"{path} has no {LAST_TOKEN!r} of any row.")
        if num_tokens is None or num_tokens.shape != last_token.shape:
            raise ValueError(f"{path} has no {NUM_TOKENS!r} of each row.")
        return _state(model, tensors, len(last_token), path), last_token, num_tokens, max_length

    return fit, arrays


def _state(model, tensors, batch_size, path):
    """The state that the tensors of a file make, in the structure that the model has."""
    spec = model.backbone.cache_spec(batch_size)
    wanted = {STATE + name: part for name, part in _named(spec).items()}
    if tensors.keys() != wanted.keys():
        name = sorted(tensors.keys() ^ wanted.keys())[0]
        raise ValueError(f"{path} does not hold the state of its model: {name!r} is in one alone.")
    for name, part in wanted.items():
        found = tensors[name].shape, tensors[name].dtype.name
        # JAX makes float32 of float64 unless it is told to keep that.
        dtype = _as_numpy(ops.zeros(1, part.dtype)).dtype.name
        fits = len(found[0]) == len(part.shape) and all(
            size in (None, n) for n, size in zip(found[0], part.shape, strict=True)
        )
        if not fits or found[1] != dtype:
            raise ValueError(
                f"{path}: {name!r} must be {dtype} of the shape {tuple(part.shape)}; it is "
                f"{found[1]} of {found[0]}."
            )
    arrays = [ops.convert_to_tensor(tensors[name], part.dtype) for name, part in wanted.items()]
    return keras.tree.pack_sequence_as(spec, arrays)


def _named(state):
    """The arrays of a state by their paths, such as `.blocks.0.hidden`, in the order of `tree`."""
    found = keras.tree.flatten_with_path(state)
    return {"".join(f".{part}" for part in path): array for path, array in found}


def _checksum(tensors):
    """A hash of the numbers, not of the content of `metadata`, which is JSON."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode() + np.ascontiguousarray(tensors[name]).tobytes())
    return found.hexdigest()


def _as_numpy(array):
    return np.ascontiguousarray(gather_to_numpy(array))
