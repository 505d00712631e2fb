"""Lower bound of the time of a decoding step, from a device's bandwidth and arithmetic rate."""

import math
from typing import NamedTuple

from keras import tree

from keras_recurrent.checks.arguments import check_number
from keras_recurrent.checks.dtypes import bytes_of
from keras_recurrent.layers import LocalAttention
from keras_recurrent.models.memory import get_backbone, memory_sizes


class DecodingTime(NamedTuple):
    """Lower bound of the time of a decoding step in seconds; see `decoding_time`."""

    weights: float
    cache: float

    @property
    def total(self):
        """Seconds of a step."""
        return sum(self)


def decoding_time(model, batch_size, length, *, bytes_per_second, flops_per_second, dtype=None):
    """Returns a lower bound of the time of a decoding step, one new token for each sequence.

    ```
    weights   max(bytes of weights / bandwidth, 2 batch_size number of weights / arithmetic)
    cache     max(bytes of the cache / bandwidth, its operations / arithmetic)
    ```

    De et al. 2024 (arXiv:2402.19427, section 4.2 and appendix F): a step reads each weight and the
    cache of each sequence once. Each weight takes one multiplication and one addition per sequence;
    each number of a recurrent state takes one of each, and each number of a cached key or value one
    of each per query head that shares it. Writes to memory, norms and activations are not counted.
    An embedding table that is not shared with the logits is not counted either: a step reads one
    row of it per sequence.

    Args:
        model: a language model or a backbone, or the name of a preset, as in `memory_sizes`.
        batch_size: integer, number of sequences.
        length: integer, tokens of a sequence before the step.
        bytes_per_second: number above 0, the memory bandwidth of the device.
        flops_per_second: number above 0, additions and multiplications per second in the dtype of
            the weights.
        dtype: string, the dtype policy of a preset, as in `memory_sizes`.

    Returns:
        A `DecodingTime` of seconds, `weights` and `cache`, with their sum `total`.
        `batch_size / total` is an upper bound of the tokens per second.

    Raises:
        ValueError: as in `memory_sizes`, or a rate is not a finite number above 0.

    Example: RecurrentGemma 2B in bfloat16 on an H200, whose memory copies at 4.27 TB/s.

    >>> from keras_recurrent.models import decoding_time
    >>> h200 = {"bytes_per_second": 4.27e12, "flops_per_second": 790e12}
    >>> time = decoding_time("recurrentgemma_2b", 1, 2048, dtype="bfloat16", **h200)
    >>> round(1000 * time.total, 2)  # milliseconds
    1.26
    """
    check_number("bytes_per_second", bytes_per_second, above=0)
    check_number("flops_per_second", flops_per_second, above=0)
    model = get_backbone(model, dtype)
    sizes = memory_sizes(model, batch_size, length)
    read = list(model.weights)
    if not model.token_embedding.tie_weights:
        # If embeddings are separate, a step reads only one row of them per token.
        read = [w for w in read if w is not model.token_embedding.embeddings]
    multiplied = 2 * batch_size * sum(math.prod(w.shape) for w in read)
    return DecodingTime(
        max(sum(map(bytes_of, read)) / bytes_per_second, multiplied / flops_per_second),
        max(sizes.cache / bytes_per_second, _flops(model, batch_size, length) / flops_per_second),
    )


def _flops(backbone, batch_size, length):
    """Returns the number of operations on the cache."""
    total = 0
    for block in backbone.transformer_layers:
        mixer, uses = block.temporal_block, 1
        if isinstance(mixer, LocalAttention):
            uses = mixer.num_query_heads // mixer.num_key_value_heads
        arrays = tree.flatten(block.own_initial_state(1, length))
        total += uses * sum(math.prod(array.shape) for array in arrays)
    return 2 * batch_size * total
