"""The least time that a step of generation can take on a device, by its memory and arithmetic."""

import math
from typing import NamedTuple

from keras import tree

from keras_recurrent.checks.arguments import check_number
from keras_recurrent.checks.dtypes import bytes_of
from keras_recurrent.layers import LocalAttention
from keras_recurrent.models.memory import backbone_of, memory_sizes


class DecodingTime(NamedTuple):
    """Seconds of one step of generation, at least; see `decoding_time`."""

    weights: float
    cache: float

    @property
    def total(self):
        """Seconds of a step."""
        return sum(self)


def decoding_time(model, batch_size, length, *, bytes_per_second, flops_per_second):
    """The least time that a step of generation takes: one new token for each row.

    ```
    weights   max(bytes of weights / bandwidth, 2 batch_size numbers of weights / arithmetic)
    cache     max(bytes of the cache / bandwidth, its operations / arithmetic)
    ```

    De et al. 2024 (arXiv:2402.19427, section 4.2 and appendix F): every weight is read once a step,
    and so is the cache of every row. A weight is one multiplication and one addition for each row;
    a cached key or value is as many for each head of queries that shares it, a number of a
    recurrent state for one. Writing, norms and activations are not counted, nor is a table of
    embeddings that logits do not share: a step reads one row of it.

    Args:
        model: a language model or a backbone, or the name of a preset, as in `memory_sizes`.
        batch_size: integer, rows.
        length: integer, tokens a row has seen.
        bytes_per_second: number above 0, the bandwidth of the device's memory.
        flops_per_second: number above 0, additions and multiplications of the device, in the dtype
            of the weights.

    Returns:
        A `DecodingTime` of seconds, `weights` and `cache`, with their sum `total`.
        `batch_size / total` is the most tokens that can be written a second.

    Raises:
        ValueError: as `memory_sizes`, or a rate that is no finite number above 0.

    Example: RecurrentGemma 2B in bfloat16 on an H200, whose memory copies at 4.27 TB/s.

    >>> import keras
    >>> from keras_recurrent.models import GriffinBackbone, decoding_time
    >>> h200 = {"bytes_per_second": 4.27e12, "flops_per_second": 790e12}
    >>> keras.config.set_dtype_policy("bfloat16")
    >>> time = decoding_time("recurrentgemma_2b", 1, 2048, **h200)
    >>> keras.config.set_dtype_policy("float32")
    >>> round(1000 * time.total, 2)  # milliseconds
    1.26
    """
    check_number("bytes_per_second", bytes_per_second, above=0)
    check_number("flops_per_second", flops_per_second, above=0)
    model = backbone_of(model)
    sizes = memory_sizes(model, batch_size, length)
    read = list(model.weights)
    if not model.token_embedding.tie_weights:
        # Beside those of the logits, a step reads one row of embeddings for each token.
        read = [w for w in read if w is not model.token_embedding.embeddings]
    multiplied = 2 * batch_size * sum(math.prod(w.shape) for w in read)
    return DecodingTime(
        max(sum(map(bytes_of, read)) / bytes_per_second, multiplied / flops_per_second),
        max(sizes.cache / bytes_per_second, _flops(model, batch_size, length) / flops_per_second),
    )


def _flops(backbone, batch_size, length):
    """The operations on what the cache holds."""
    total = 0
    for block in backbone.transformer_layers:
        mixer, uses = block.temporal_block, 1
        if isinstance(mixer, LocalAttention):
            uses = mixer.num_query_heads // mixer.num_key_value_heads
        arrays = tree.flatten(block.own_initial_state(1, length))
        total += uses * sum(math.prod(array.shape) for array in arrays)
    return 2 * batch_size * total
