"""Safetensors files of a `GenerationCache`, and the key of the model that a cache belongs to."""

import dataclasses
import functools
import hashlib
import json
import os
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_recurrent import atomic_files
from keras_recurrent.chat.templates import check_messages
from keras_recurrent.checkpoints import files
from keras_recurrent.devices.jax_processes import gather_to_numpy, is_multi_process
from keras_recurrent.generation.conversation import Conversation

FORMAT, VERSION = "keras_recurrent.generation_cache", 3
TOKEN_IDS, NUM_TOKENS, STATE = "token_ids", "num_tokens", "state"
SAMPLED = 256  # approximate number of hashed elements of a weight; small ones are hashed whole


@dataclasses.dataclass(frozen=True)
class CacheKey:
    """Properties of a model that its caches depend on, serializable as JSON.

    The names of the attributes are part of the file format.

    Attributes:
        backbone: the class name of the backbone.
        configuration: its configuration, without name, dtype and `trainable`.
        dtype: the name of its dtype policy.
        quantization: the quantization modes of its layers.
        lora: the ranks of low-rank weights.
        weights: a hash of about `SAMPLED` elements of each weight, equal on every backend.
    """

    backbone: str
    configuration: dict[str, Any]
    dtype: str
    quantization: list[str]
    lora: list[int]
    weights: str


def cache_key(model):
    """Returns the `CacheKey` of a language model with its current weights."""
    backbone = model.backbone
    config = backbone.get_config()
    plain = {k: v for k, v in config.items() if k not in ("name", "dtype", "trainable")}
    layers = list(backbone._flatten_layers(include_self=False))
    quantized = {getattr(layer, "quantization_mode", None) for layer in layers}
    ranks = {layer.lora_rank for layer in layers if getattr(layer, "lora_enabled", False)}
    return CacheKey(
        type(backbone).__name__,
        json.loads(json.dumps(plain, default=str)),
        backbone.dtype_policy.name,
        sorted(mode for mode in quantized if mode),
        sorted(ranks),
        _fingerprint(backbone.weights),
    )


def check_same_model(key, model, name="cache"):
    """Raises a `ValueError` that names the difference if a `CacheKey` belongs to another model.

    name: string, the argument that the error names.
    """
    current = cache_key(model)
    if key == current:
        return
    remedy = "Process the text again with `prefill`."
    if key.backbone != current.backbone:
        raise ValueError(
            f"`{name}` belongs to a `{key.backbone}`; this is a `{current.backbone}`. {remedy}"
        )
    saved, configured = key.configuration, current.configuration
    properties = [
        ("the dtype ", key.dtype, current.dtype),
        ("the quantization ", key.quantization or None, current.quantization or None),
        ("the low-rank weights (LoRA) ", key.lora or None, current.lora or None),
    ]
    for option in sorted(saved.keys() | configured.keys()):
        properties.append((f"{option}=", repr(saved.get(option)), repr(configured.get(option))))
    for description, before, after in properties:
        if before != after:
            raise ValueError(
                f"`{name}` belongs to a model with {description}{before}; this one has {after}. "
                f"{remedy}"
            )
    raise ValueError(
        f"`{name}` belongs to a model with other weights, such as before training or before "
        f"weights were loaded. {remedy}"
    )


def _fingerprint(weights):
    """Returns a hash of evenly spaced elements of each weight; only these go to the host."""
    values = [w.value if isinstance(w, keras.Variable) else w for w in weights]
    if is_multi_process():  # concatenating in one program was observed to deadlock on CPUs
        numbers = np.concatenate([gather_to_numpy(_sample(value)) for value in values])
    else:
        numbers = gather_to_numpy(_samples(values))
    shapes = json.dumps([list(weight.shape) for weight in weights])
    return hashlib.sha256(shapes.encode() + numbers.astype("<f4").tobytes()).hexdigest()


def _samples(values):
    return ops.concatenate([*map(_sample, values)])  # one copy from the device


if keras.config.backend() == "jax":
    import jax

    _samples = jax.jit(_samples)  # hundreds of operations one by one take 0.2 s on a GPU


def _sample(value):
    size = int(np.prod(value.shape))
    step = size // SAMPLED | 1  # odd: an even step may hit the same columns in all rows
    return ops.cast(ops.reshape(value, (-1,))[::step], "float32")


def write_file(cache, path):
    """Writes a cache to a file, as described in `GenerationCache.save`."""
    to_bytes = files.require("safetensors.numpy", "Saving a cache").save
    path = os.path.realpath(os.fspath(path))
    if os.path.isdir(path):
        raise IsADirectoryError(
            f"{path!r} is a directory. Name a file, such as 'chat.safetensors'."
        )
    state = _flatten_state(cache.state)
    tensors = {STATE + name: _as_numpy(array) for name, array in state.items()}
    tensors |= {TOKEN_IDS: np.concatenate(cache.token_ids), NUM_TOKENS: cache.num_tokens}
    content = {
        "version": VERSION,
        "max_length": cache.max_length,
        "key": dataclasses.asdict(cache.key),
        "conversations": [known and known._asdict() for known in cache.conversations],
    }
    metadata = {"format": FORMAT, "content": json.dumps(content, sort_keys=True)}
    metadata["sha256"] = _checksum(tensors)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    open_private = functools.partial(os.open, mode=0o600)
    with atomic_files.replace(path) as new, open(new, "xb", opener=open_private) as file:
        file.write(to_bytes(tensors, metadata=metadata))


def read_file(path, model):
    """Returns the arguments of the `GenerationCache` in a file, as described in its `load`."""
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
        raise ValueError(f"{path} must be a file that `GenerationCache.save` has written.")
    if metadata.get("sha256") != _checksum(tensors):
        raise ValueError(f"{path} is damaged: its checksum does not match its tensors.")
    content = files.parse_json(metadata.get("content", "").encode(), path)
    if content.get("version") != VERSION:
        raise ValueError(
            f"{path} is of version {content.get('version')!r}; this package reads {VERSION}. "
            "Process the text again with `prefill`."
        )
    try:
        key, max_length = CacheKey(**content["key"]), content["max_length"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} does not name the model it belongs to ({error}).") from error
    check_same_model(key, model, "path")
    token_ids, num_tokens = (tensors.pop(name, None) for name in (TOKEN_IDS, NUM_TOKENS))
    if num_tokens is None or num_tokens.ndim != 1 or not num_tokens.size:
        raise ValueError(f"{path} must have {NUM_TOKENS!r} of at least one sequence.")
    is_right = token_ids is not None and num_tokens.min() > 0
    if not is_right or token_ids.shape != (num_tokens.sum(),):
        raise ValueError(f"{path} must have {TOKEN_IDS!r} of each sequence.")
    state = _pack_state(model, tensors, len(num_tokens), path)
    conversations = _read_conversations(content, len(num_tokens), path)
    token_ids = np.split(token_ids, np.cumsum(num_tokens)[:-1])
    return state, token_ids, max_length, key, conversations


def _read_conversations(content, batch_size, path):
    """Returns the `Conversation` of each sequence, or None."""
    saved = content.get("conversations", [None] * batch_size)
    try:
        known = [each and Conversation(**each) for each in saved]
        for each in filter(None, known):
            check_messages(each.messages)
            if not isinstance(each.prompt, str) or not isinstance(each.ending, str):
                raise ValueError("the prompt is not a string")
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} must have 'conversations' as saved ({error}).") from error
    if len(known) != batch_size:
        raise ValueError(f"{path} must have 'conversations' for {batch_size}; got {len(known)}.")
    return known


def _pack_state(model, tensors, batch_size, path):
    """Returns the tensors of a file as a state of the model."""
    spec = model.backbone.cache_spec(batch_size)
    specs = {STATE + name: part for name, part in _flatten_state(spec).items()}
    if tensors.keys() != specs.keys():
        name = sorted(tensors.keys() ^ specs.keys())[0]
        owner = "the file" if name in tensors else "the model"
        raise ValueError(f"{path} must hold the state of its model: {name!r} is only in {owner}.")
    for name, part in specs.items():
        shape, saved_dtype = tensors[name].shape, tensors[name].dtype.name
        # JAX converts float64 to float32 unless `jax_enable_x64` is set.
        dtype = _as_numpy(ops.zeros(1, part.dtype)).dtype.name
        same_shape = len(shape) == len(part.shape) and all(
            size in (None, n) for n, size in zip(shape, part.shape, strict=True)
        )
        if not same_shape or saved_dtype != dtype:
            raise ValueError(
                f"{path}: {name!r} must be {dtype} of shape {tuple(part.shape)}; got "
                f"{saved_dtype} of shape {shape}."
            )
    arrays = [ops.convert_to_tensor(tensors[name], part.dtype) for name, part in specs.items()]
    return keras.tree.pack_sequence_as(spec, arrays)


def _flatten_state(state):
    """Returns `{path: array}`, with paths such as `.blocks.0.hidden`, in the order of `tree`."""
    pairs = keras.tree.flatten_with_path(state)
    return {"".join(f".{part}" for part in path): array for path, array in pairs}


def _checksum(tensors):
    """Returns a hash of names and values of tensors, without the metadata."""
    checksum = hashlib.sha256()
    for name in sorted(tensors):
        checksum.update(name.encode() + np.ascontiguousarray(tensors[name]).tobytes())
    return checksum.hexdigest()


def _as_numpy(array):
    return np.ascontiguousarray(gather_to_numpy(array))
