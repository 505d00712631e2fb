"""State of sequences on the device, and its update after a token, for all backends."""

from typing import Any, NamedTuple

from keras import ops


class DeviceState(NamedTuple):
    """State of sequences on the device, between two steps.

    Attributes:
        token: int32 `[B, 1]`, the last token of each sequence, which the cache does not contain.
        active: boolean `[B, 1]`, False for sequences that have ended, and for free slots.
        remaining_tokens: int32 `[B]`, maximum number of further tokens.
        count: int32 `[B]`, number of new tokens.
        stops: int32 `[B, S]`, the stop tokens of each sequence, padded with -1.
    """

    token: Any
    active: Any
    remaining_tokens: Any
    count: Any
    stops: Any


def advance(state, sampled):
    """Returns the `DeviceState` after one more token of each active sequence.

    A sequence ends at a stop token or its last token, as in `Sequence.ends_on_device`.

    Args:
        state: the `DeviceState`.
        sampled: integers `[B]`, the next token of each sequence, unused if it is not active.
    """
    sampled = ops.cast(sampled, "int32")[:, None]
    token = ops.where(state.active, sampled, state.token)
    advanced = ops.cast(state.active[:, 0], "int32")
    remaining = state.remaining_tokens - advanced
    is_stop = ops.any(ops.equal(token, state.stops), axis=1, keepdims=True)
    continues = ops.logical_and(remaining[:, None] > 0, ops.logical_not(is_stop))
    active = ops.logical_and(state.active, continues)
    count = state.count + advanced
    return DeviceState(token, active, remaining, count, state.stops)
