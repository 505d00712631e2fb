"""Which model a cache fits: its configuration, dtype and weights, compared by name."""

import dataclasses
import hashlib
import json
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_recurrent.devices.jax_processes import gather_to_numpy, is_multi_process

SAMPLED = 256  # numbers of each weight


@dataclasses.dataclass(frozen=True)
class Fit:
    """What a cache depends on, all of which can be written as JSON.

    Attributes:
        backbone: the name of the backbone's class.
        configuration: its configuration, without name and dtype.
        dtype: the name of its dtype policy.
        quantization: the names of the modes in which layers are quantized.
        lora: the ranks of low-rank weights.
        weights: a hash of `SAMPLED` numbers of each weight, the same on every backend.
    """

    backbone: str
    configuration: dict[str, Any]
    dtype: str
    quantization: list[str]
    lora: list[int]
    weights: str


def fit_of(model):
    """The `Fit` of a language model as it is now."""
    backbone = model.backbone
    config = backbone.get_config()
    plain = {k: v for k, v in config.items() if k not in ("name", "dtype", "trainable")}
    layers = list(backbone._flatten_layers(include_self=False))
    quantized = {getattr(layer, "quantization_mode", None) for layer in layers}
    ranks = {layer.lora_rank for layer in layers if getattr(layer, "lora_enabled", False)}
    return Fit(
        type(backbone).__name__,
        json.loads(json.dumps(plain, default=str)),
        backbone.dtype_policy.name,
        sorted(mode for mode in quantized if mode),
        sorted(ranks),
        _fingerprint(backbone.weights),
    )


def check_fit(fit, model, name="cache"):
    """Raises for a model other than the one of a `Fit`.

    Raises:
        ValueError: says what differs.
    """
    now = fit_of(model)
    if fit == now:
        return
    again = "Read the text again with `prefill`."
    if fit.backbone != now.backbone:
        raise ValueError(f"`{name}` is of a `{fit.backbone}`; this is a `{now.backbone}`. {again}")
    if fit.configuration != now.configuration:
        names = fit.configuration.keys() | now.configuration.keys()
        which = next(
            n for n in sorted(names) if fit.configuration.get(n) != now.configuration.get(n)
        )
        raise ValueError(
            f"`{name}` is of a model with {which}={fit.configuration.get(which)!r}; this "
            f"one has {now.configuration.get(which)!r}. {again}"
        )
    for what, before, after in (
        ("dtype", fit.dtype, now.dtype),
        ("quantization", fit.quantization or None, now.quantization or None),
        ("low-rank weights (LoRA)", fit.lora or None, now.lora or None),
    ):
        if before != after:
            raise ValueError(
                f"`{name}` is of a model with the {what} {before}; this one has {after}. {again}"
            )
    raise ValueError(
        f"`{name}` is of a model with other weights, as before training or before weights were "
        f"loaded. {again}"
    )


def _fingerprint(weights):
    """A hash of numbers evenly spaced in each weight, which reads little from the device."""
    parts = [ops.cast(_sample(weight), "float32") for weight in weights]
    if parts and not is_multi_process():
        parts = [ops.concatenate(parts)]  # one copy from the device
    # One program that joins parts of several processes has been seen to wait forever on CPUs.
    numbers = np.concatenate([np.zeros(0, "float32"), *map(gather_to_numpy, parts)])
    shapes = json.dumps([list(weight.shape) for weight in weights])
    return hashlib.sha256(shapes.encode() + numbers.astype("<f4").tobytes()).hexdigest()


def _sample(weight):
    size = int(np.prod(weight.shape))
    step = size // SAMPLED | 1  # odd: an even one may fall into the same columns in all rows
    value = weight.value if isinstance(weight, keras.Variable) else weight
    return ops.reshape(value, (-1,))[::step]
