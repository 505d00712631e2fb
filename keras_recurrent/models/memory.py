"""The memory of a model and of its cache during generation."""

from typing import NamedTuple

import keras
import numpy as np
from keras import backend, tree

from keras_recurrent import compat
from keras_recurrent.layers.checks import check_positive_integer
from keras_recurrent.layers.tokens import initial_places
from keras_recurrent.models.recurrent_backbone import RecurrentBackbone

# Which field of `MemorySizes` counts an array, by its name in the cache; the others are recurrent.
PARTS = {
    "key": "keys_and_values",
    "value": "keys_and_values",
    "inputs": "convolution_state",
    "position": "places",
    "segment": "places",
}


class MemorySizes(NamedTuple):
    """Bytes of a model and of its generation cache; see `memory_sizes`."""

    parameters: int
    recurrent_state: int
    convolution_state: int
    keys_and_values: int
    places: int

    @property
    def cache(self):
        """Bytes of the whole cache."""
        return sum(self[1:])

    @property
    def total(self):
        """Bytes of parameters and cache."""
        return sum(self)


def memory_sizes(model, batch_size, length):
    """The bytes that a model takes during generation, activations not counted.

    A step of generation reads all of it once, which is what it costs on hardware that is bound by
    its memory. De et al. 2024 (arXiv:2402.19427, appendix F) count, for each row of a batch:

    ```
    recurrent block      D_rnn + (W - 1) D_rnn                    at every length
    local attention      2 G head_dim min(length, window - 1)     the token itself is not kept
    global attention     2 G head_dim length
    ```

    numbers, with W the taps of the convolution and G the heads of keys and values. Recurrences and
    inputs of convolutions are float32, keys and values have the compute dtype.

    Args:
        model: a language model or a backbone; or the name of a preset, which is then sized without
            making its weights, in the dtype of the Keras policy.
        batch_size: integer, rows.
        length: integer, tokens a row, prompt and answer together.

    Returns:
        A `MemorySizes` of bytes: `parameters`, `recurrent_state`, `convolution_state`,
        `keys_and_values`, and `places`, the few integers that say where each row is; with their
        sums `cache` and `total`. They are those of the arrays.

    Raises:
        ValueError: `batch_size` or `length` is no integer from 1 on, the model is not one of
            these, or a name is unknown.

    Example:

    >>> from keras_recurrent.models import GriffinBackbone, memory_sizes
    >>> backbone = GriffinBackbone.from_preset("griffin_tiny")
    >>> short, long = (memory_sizes(backbone, batch_size=1, length=n) for n in (1_000, 100_000))
    >>> short.cache == long.cache
    True
    >>> long.recurrent_state == 3 * 176 * 4  # three recurrent blocks
    True
    >>> memory_sizes("griffin_7b", batch_size=1, length=1_000).parameters
    27685019648
    """
    for name, number in (("batch_size", batch_size), ("length", length)):
        check_positive_integer(name, number)
    backbone = backbone_of(model)
    sizes = dict.fromkeys(MemorySizes._fields, 0)
    sizes["parameters"] = sum(bytes_of(weight) for weight in backbone.weights)
    for part in _parts_of_one_row(backbone, length):
        for path, array in tree.flatten_with_path(part):
            sizes[PARTS.get(path[-1], "recurrent_state")] += batch_size * bytes_of(array)
    return MemorySizes(**sizes)


def backbone_of(model):
    """The network of a language model, of itself, or of a preset's name.

    Raises:
        ValueError: the model is none of these.
    """
    if isinstance(model, str):
        model = _without_weights(model)
    backbone = getattr(model, "backbone", model)
    if not isinstance(backbone, RecurrentBackbone):
        raise ValueError(
            "`model` must be a language model of `keras_recurrent.models`, its backbone, or the "
            f"name of a preset of one; got a `{type(backbone).__name__}`, which keeps no state."
        )
    return backbone


def _without_weights(preset):
    """The network of a preset, whose weights have shapes but no values."""
    from keras_recurrent.checkpoints import loading  # only when asked for

    loader = loading.get_loader(preset)
    cls = loader.check_backbone_class()
    # Keras lists what has no values yet, and would make them at the end of the next scope.
    waiting = compat.global_state.get_global_attribute("uninitialized_variables", [], True)
    before = len(waiting)
    with keras.StatelessScope(initialize_variables=False):
        if isinstance(loader, loading.NamedPresetLoader):
            backbone = cls(**loader.row.backbone_arguments)
        else:
            backbone = loader.load_backbone(cls, load_weights=False)
    del waiting[before:]
    return backbone


def _parts_of_one_row(backbone, length):
    """The parts of a cache of one row, one by one: a whole cache may not fit into memory."""
    yield initial_places(1, backbone.uses_position)
    for block in backbone.transformer_layers:
        yield block.own_initial_state(1, length)


def bytes_of(array):
    """The bytes of an array, a tensor or a variable."""
    itemsize = np.dtype(backend.standardize_dtype(array.dtype)).itemsize
    return int(np.prod(array.shape)) * itemsize
