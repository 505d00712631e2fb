"""Key of the model that a cache belongs to: its configuration, dtype and weights."""

import dataclasses
import hashlib
import json
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_recurrent.devices.jax_processes import gather_to_numpy, is_multi_process

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
