"""Operations over time where each shard of a mesh axis has a part of every row's tokens.

What a shard has to know of those to its left is small: the state before its first token. Each
shard sums its own tokens up to one element, such as the product of its decays and the state that
its tokens alone leave behind, and elements are joined from shard to shard in a number of steps that
grows as the logarithm of the shards. Then the operation runs as it would go on from that state.

Inside `jax.shard_map`; token kinds say where documents start and what is padding, wherever it is.
"""

import jax
import jax.numpy as jnp

from ..constants import DECAY_EXPONENT, PADDING, STARTS
from . import _circular_buffer
from ._common import accumulation_dtype, filled, kind_masks


def run(operation, function, shard, options, axis, count):
    """What `function` returns for a shard of the tokens, and the state after those of all shards.

    Args:
        operation: string.
        function: an implementation of it.
        shard: its tensors, by their names; those over time are this shard's.
        options: its other arguments.
        axis: string, the axis of the mesh that splits the tokens.
        count: integer, its size.
    """
    shards = _Shards(axis, count)
    if operation == "causal_conv1d":
        if shard["kernel"].shape[0] == 1:
            return function(**shard, **options)
        before = _inputs_before(shard, shards)
    elif operation == "sliding_window_attention":
        return _attention(function, shard, options, shards)
    else:
        before = _state_before(operation, function, shard, options, shards)
    output, state = function(**{**shard, "initial_state": before}, **options)
    return output, shards.of_last(state)


class _Shards:
    """The shards of the tokens, in their order."""

    def __init__(self, axis, count):
        self.axis, self.count = axis, count
        self.rank = jax.lax.axis_index(axis)

    def before(self, join, element, nothing):
        """The elements of all shards to the left joined; of the first shard `nothing`.

        join: an associative function of two elements, the left one first.
        """
        found = self._where(0, self._from_left(element, 1), nothing)
        distance = 1
        while distance < self.count - 1:
            left = self._from_left(found, distance)
            found = self._where(distance, join(left, found), found)
            distance *= 2
        return found

    def of_last(self, tree):
        """What the last shard has."""
        is_last = self.rank == self.count - 1
        return jax.tree.map(
            lambda x: jax.lax.psum(jnp.where(is_last, x, 0), self.axis) if x.size else x, tree
        )

    def _from_left(self, tree, distance):
        pairs = [(i, i + distance) for i in range(self.count - distance)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axis, pairs) if x.size else x, tree)

    def _where(self, rank, above, others):
        """One tree in the shards above a rank, another one in all others."""
        return jax.tree.map(lambda a, b: jnp.where(self.rank > rank, a, b), above, others)


# === Recurrences: S = A S_before + (what the shard's tokens alone leave behind) ===


def _state_before(operation, function, shard, options, shards):
    first = shard.get("initial_state")
    alone = {name: x for name, x in shard.items() if name != "initial_state"}
    _, state = function(**alone, **options)
    is_complex = operation == "complex_linear_scan"
    if is_complex:
        state = _to_complex(state)
    decay = _decay_over(operation, shard, state)

    def join(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    nothing = jnp.ones_like(decay), jnp.zeros_like(state)
    decay, state = shards.before(join, (decay, state), nothing)
    if first is not None:
        state = state + decay * (_to_complex(first) if is_complex else first)
    return _to_real(state) if is_complex else state


def _decay_over(operation, shard, state):
    """What a shard's tokens together multiply the state by, as a tensor of the state's rank."""
    kind = shard.get("token_kind")
    dtype = accumulation_dtype(*(x for x in shard.values() if x.dtype != jnp.int8))
    starts, padding = kind_masks(kind)

    def total(x):
        return jnp.sum(filled(x.astype(dtype), padding, 0), axis=1)

    if operation == "rg_lru":
        rate = DECAY_EXPONENT * jax.nn.softplus(-shard["a_logit"].astype(dtype))
        # What is not a number at padding has no gradient either.
        gate = filled(shard["gate_a"].astype(dtype), padding, 0)
        exponent = -rate * total(jax.nn.sigmoid(gate))
    elif operation == "lightning_attention":
        tokens = total(jnp.ones((*shard["q"].shape[:2], 1), dtype))
        log_decay = jax.lax.stop_gradient(shard["log_decay"].astype(dtype))
        exponent = jnp.where(
            tokens == 0, 0, tokens * log_decay
        )  # a decay of 0 has the logarithm -inf
    elif operation == "gated_linear_attention":
        exponent = total(shard["log_f"])
    else:
        exponent = total(shard["log_a"])
    decay = jnp.exp(exponent)
    if operation == "complex_linear_scan":
        phase = total(shard["phase"])
        decay = jax.lax.complex(decay * jnp.cos(phase), decay * jnp.sin(phase))
    if starts is not None:
        starts = jnp.any(starts, axis=1)
        decay = jnp.where(starts.reshape(-1, *[1] * (decay.ndim - 1)), 0, decay)
    return decay.reshape(*decay.shape, *[1] * (state.ndim - decay.ndim))


def _to_complex(x):
    return jax.lax.complex(*jnp.split(x, 2, axis=-1))


def _to_real(x):
    return jnp.concatenate([x.real, x.imag], axis=-1)


# === Convolution and window: the last real tokens of a document, of all shards to the left ===


def _attention(function, shard, options, shards):
    window, first = options["sliding_window"], shard.get("initial_state")
    if window is None:
        raise NotImplementedError(
            f"`sliding_window_attention` over the mesh axis {shards.axis!r}, which splits the "
            "tokens of a row: a shard knows the last tokens of those before, not all of them. Give "
            "a `sliding_window`, or leave this axis out of the mesh."
        )
    capacity = options.get("capacity")
    if first is not None:
        capacity = first["key"].shape[1]
    capacity = window - 1 if capacity is None else capacity
    room = max(capacity, window - 1, 1)

    kind, batch = shard.get("token_kind"), shard["k"].shape[0]
    seen = jnp.full(batch, shard["k"].shape[1])
    if kind is not None:
        document = jnp.cumsum(kind == STARTS, axis=1)
        seen = jnp.sum((kind != PADDING) & (document == document[:, -1:]), axis=1)
    own = _last((shard["k"], shard["v"]), kind, room), seen

    def join(left, right):
        starts = right[0][2]
        return _join_last(left[0], right[0]), right[1] + jnp.where(starts, 0, left[1])

    before = shards.before(join, own, jax.tree.map(jnp.zeros_like, own))
    end = jnp.full(batch, room)
    if first is not None:
        position = first["position"]
        rows = tuple(
            _circular_buffer.to_sequence(first[name], position, end, room)
            for name in ("key", "value")
        )
        count = jnp.minimum(position, first["key"].shape[1])
        before = join(((rows, count, jnp.zeros(batch, bool)), position), before)
    (rows, _, _), position = before
    position = position.astype(jnp.int32)
    buffer = {
        name: _circular_buffer.from_sequence(x, position, end, room)
        for name, x in zip(("key", "value"), rows, strict=True)
    }
    shard = {**shard, "initial_state": {**buffer, "position": position}}
    output, state = function(**shard, **options)
    state = shards.of_last(state)
    if room != capacity:
        position, end = state["position"], jnp.full(batch, capacity)
        for name in ("key", "value"):
            row = _circular_buffer.to_sequence(state[name], position, end, capacity)
            state[name] = _circular_buffer.from_sequence(row, position, end, capacity)
    return output, state


def _inputs_before(shard, shards):
    """The state of a convolution: the last inputs of the document, in order, at the right."""
    x, kind, first = shard["x"], shard.get("token_kind"), shard.get("initial_state")
    room = shard["kernel"].shape[0] - 1
    dtype = accumulation_dtype(*(x for x in shard.values() if x.dtype != jnp.int8))
    own = _last((x.astype(dtype),), kind, room)
    (inputs,), count, starts = shards.before(_join_last, own, jax.tree.map(jnp.zeros_like, own))
    if first is not None:
        given = (first,), jnp.full_like(count, room), jnp.zeros_like(starts)
        (inputs,), _, _ = _join_last(given, ((inputs,), count, starts))
    return inputs


def _last(rows, kind, room):
    """The last `room` real tokens of rows [B, T, ...] that are of the row's last document.

    Returns rows [B, room, ...] with these at the right, their number [B], and whether a document
    starts [B].
    """
    batch, length = rows[0].shape[:2]
    if kind is None:
        kept = min(room, length)
        rows = tuple(
            jnp.pad(x[:, length - kept :], [(0, 0), (room - kept, 0)] + [(0, 0)] * (x.ndim - 2))
            for x in rows
        )
        return rows, jnp.full(batch, kept), jnp.zeros(batch, bool)
    # Places of real tokens, the last ones at the end.
    places = jnp.where(kind == PADDING, -1, jnp.arange(length))
    document = jnp.cumsum(kind == STARTS, axis=1)
    places = jnp.where(document == document[:, -1:], places, -1)
    places = jnp.sort(jnp.pad(places, ((0, 0), (room, 0)), constant_values=-1), axis=1)
    places = places[:, places.shape[1] - room :]
    valid = places >= 0
    rows = tuple(_circular_buffer.take(x, jnp.maximum(places, 0), valid) for x in rows)
    return rows, jnp.sum(valid, axis=1), document[:, -1] > 0


def _join_last(left, right):
    """What `_last` finds of two parts of a row from what it found of each."""
    (left_rows, left_count, left_starts), (right_rows, count, starts) = left, right
    room = right_rows[0].shape[1]
    left_count = jnp.where(starts, 0, left_count)
    place = jnp.arange(room)
    index = jnp.where(place >= room - count[:, None], room, count[:, None]) + place
    valid = place >= room - count[:, None] - left_count[:, None]
    rows = tuple(
        _circular_buffer.take(jnp.concatenate([x, y], axis=1), index, valid)
        for x, y in zip(left_rows, right_rows, strict=True)
    )
    return rows, jnp.minimum(count + left_count, room), left_starts | starts
