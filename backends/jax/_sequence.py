"""Operations over time where each shard of a mesh axis has a chunk of every sequence.

A shard needs little from the shards to its left: the state before its first token. Each shard
reduces its tokens to one element, such as the product of its decays and the final state from a zero
state, and elements are combined between shards in a number of steps that grows as the logarithm of
the number of shards. Then the operation continues from the combined state.

Runs inside `jax.shard_map`; token kinds mark starts of documents and padding, at any position.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ..constants import CONTINUES, DECAY_EXPONENT, PADDING, STARTS
from . import _circular_buffer
from ._common import accumulation_dtype, filled, kind_masks, take, to_complex, to_real


def run(operation, function, shard, options, axis, count):
    """Calls `function` for a shard of the tokens; returns output and state after all shards.

    Args:
        operation: string.
        function: an implementation of it.
        shard: dict of its tensors, of which those with a time axis are this shard's.
        options: dict of its other arguments.
        axis: string, the mesh axis that splits the tokens.
        count: integer, the size of this axis.
    """
    shards = _Shards(axis, count)
    if operation == "causal_conv1d":
        if shard["kernel"].shape[0] == 1:
            return function(**shard, **options)
        before = _previous_inputs(shard, shards)
    elif operation == "sliding_window_attention":
        return _attention(function, shard, options, shards)
    elif operation in GRADIENTS_OF_STATES:
        output, state = _matrix_recurrence(operation, function, shard, options, shards)
        return output, shards.broadcast_last(state)
    else:
        before, _ = _combined_state(operation, function, shard, options, shards)
    output, state = function(**{**shard, "initial_state": before}, **options)
    return output, shards.broadcast_last(state)


class _Shards:
    """The shards of the time axis, in order, or from the last to the first if `reverse`."""

    def __init__(self, axis, count, reverse=False):
        self.axis, self.count, self.reverse = axis, count, reverse
        self.rank = self._rank_of(jax.lax.axis_index(axis))

    def _rank_of(self, index):
        return self.count - 1 - index if self.reverse else index

    def before(self, join, element, nothing):
        """Combines the elements of all shards before this one; `nothing` for the first shard.

        join: an associative function of two elements, the earlier one first.
        """
        found = self._select_above(0, self._receive_from_left(element, 1), nothing)
        distance = 1
        while distance < self.count - 1:
            left = self._receive_from_left(found, distance)
            found = self._select_above(distance, join(left, found), found)
            distance *= 2
        return found

    def broadcast_last(self, tree):
        """Broadcasts the tree of the last shard."""
        is_last = self.rank == self.count - 1
        return jax.tree.map(
            lambda x: jax.lax.psum(jnp.where(is_last, x, 0), self.axis) if x.size else x, tree
        )

    def _receive_from_left(self, tree, distance):
        pairs = [
            (self._rank_of(i), self._rank_of(i + distance)) for i in range(self.count - distance)
        ]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axis, pairs) if x.size else x, tree)

    def _select_above(self, rank, above, others):
        """Selects `above` in the shards above a rank, and `others` in the rest."""
        return jax.tree.map(lambda a, b: jnp.where(self.rank > rank, a, b), above, others)


# === Recurrences: S = A S_before + (final state of the shard's tokens from a zero state) ===


def _combined_state(operation, function, shard, options, shards):
    """The state before a shard, and the product of its decays."""
    first = shard.get("initial_state")
    alone = {name: x for name, x in shard.items() if name != "initial_state"}
    _, state = function(**alone, **options)
    is_complex = operation == "complex_linear_scan"
    if is_complex:
        state = to_complex(state)
    own_decay = _total_decay(operation, shard, state)
    decay, state = _fold(shards, own_decay, state)
    if first is not None:
        state = state + decay * (to_complex(first) if is_complex else first)
    return to_real(state) if is_complex else state, own_decay


def _fold(shards, decay, state):
    """The decay of all shards before this one, and the state after them from a zero state."""

    def join(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    return shards.before(join, (decay, state), (jnp.ones_like(decay), jnp.zeros_like(state)))


def _matrix_recurrence(operation, function, shard, options, shards):
    """Output and state of linear attention, which takes too long to differentiate twice.

    The first pass over a shard, for the state after it, and the exchange have no gradient of their
    own: the backward exchanges the gradients of states, and differentiates the second pass, once.
    """
    place = shards.axis, shards.count

    def continued(shard):
        before, decay = _combined_state(operation, function, shard, options, _Shards(*place))
        return {**shard, "initial_state": before}, decay

    def forward(shard):
        tensors, decay = continued(shard)
        results, pull_back = jax.vjp(lambda tensors: function(**tensors, **options), tensors)
        return results, (pull_back, shard, decay)

    def backward(residuals, d_results):
        (pull_back, shard, decay), (d_output, d_state) = residuals, d_results
        added = GRADIENTS_OF_STATES[operation](function, d_output, **shard)
        _, later = _fold(_Shards(*place, reverse=True), decay, added + decay * d_state)
        (gradients,) = pull_back((d_output, d_state + later))
        d_before = gradients.pop("initial_state")
        if "initial_state" in shard:  # that before the first shard
            gradients["initial_state"] = jnp.where(_Shards(*place).rank == 0, d_before, 0)
        return (gradients,)

    run = jax.custom_vjp(lambda shard: function(**continued(shard)[0], **options))
    run.defvjp(forward, backward)
    return run(shard)


def _gradient_by_decays(name):
    """Σ_t f_1 ... f_t q_t d_output_t^T, a state of this recurrence in reverse, from the last token.

    name: the argument with the logarithms of f.
    """

    def gradient(function, d_output, q, token_kind=None, **tensors):
        padding, q, d_output = _before_first_start(token_kind, q, d_output)
        log_f = filled(tensors[name], padding, 0)
        shifted = jnp.concatenate([log_f[:, 1:], jnp.zeros_like(log_f[:, :1])], axis=1)
        q, d_output, shifted = (x[:, ::-1] for x in (q, d_output, shifted))
        state = function(q=q, k=q, v=d_output, **{name: shifted})[1]
        decay = jnp.exp(log_f[:, 0].astype(state.dtype))
        return decay.reshape(*decay.shape, *[1] * (state.ndim - decay.ndim)) * state

    return gradient


def _lightning_gradient(function, d_output, q, log_decay, token_kind=None, **_):
    """Σ_t f^t q_t d_output_t^T for real tokens t = 1, 2 ...; see `_gradient_by_decays`."""
    padding, q, d_output = _before_first_start(token_kind, q, d_output)
    q, d_output = q[:, ::-1], d_output[:, ::-1]
    tensors = {"q": q, "k": q, "v": d_output, "log_decay": log_decay}
    if padding is not None:
        kind = jnp.where(padding[:, ::-1], PADDING, CONTINUES).astype(token_kind.dtype)
        tensors["token_kind"] = kind
    state = function(**tensors)[1]
    return jnp.exp(log_decay.astype(state.dtype))[:, None, None] * state


def _before_first_start(token_kind, *tensors):
    """The mask of padding, [B, T], or None, and tensors with 0 there and from a start on."""
    starts, padding = kind_masks(token_kind)
    if token_kind is None:
        return padding, *tensors
    dropped = padding | (jnp.cumsum(starts, axis=1) > 0)
    return padding, *(filled(x, dropped, 0) for x in tensors)


# Functions of an operation, the gradient of its output, and its tensors. They return what the
# output adds to the gradient of the initial state.
GRADIENTS_OF_STATES: dict[str, Callable] = {
    "gated_linear_attention": _gradient_by_decays("log_f"),
    "lightning_attention": _lightning_gradient,
    "scalar_decay_attention": _gradient_by_decays("log_decay"),
}


def _total_decay(operation, shard, state):
    """The product of the decays of a shard's tokens, as a tensor of the state's rank."""
    kind = shard.get("token_kind")
    dtype = accumulation_dtype(*(x for x in shard.values() if x.dtype != jnp.int8))
    starts, padding = kind_masks(kind)

    def total(x):
        return jnp.sum(filled(x.astype(dtype), padding, 0), axis=1)

    if operation == "rg_lru":
        rate = DECAY_EXPONENT * jax.nn.softplus(-shard["a_logit"].astype(dtype))
        # NaN at padding has no gradient either.
        gate = filled(shard["gate_a"].astype(dtype), padding, 0)
        exponent = -rate * total(jax.nn.sigmoid(gate))
    elif operation == "lightning_attention":
        tokens = total(jnp.ones((*shard["q"].shape[:2], 1), dtype))
        log_decay = jax.lax.stop_gradient(shard["log_decay"].astype(dtype))
        # A decay of 0 has the logarithm -inf.
        exponent = jnp.where(tokens == 0, 0, tokens * log_decay)
    elif operation == "gated_linear_attention":
        exponent = total(shard["log_f"])
    elif operation == "scalar_decay_attention":
        exponent = total(shard["log_decay"])
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


# === Convolution and window: the last real tokens of a document in all shards to the left ===


def _attention(function, shard, options, shards):
    window, first = options["sliding_window"], shard.get("initial_state")
    if window is None:
        raise NotImplementedError(
            f"`sliding_window_attention` over the mesh axis {shards.axis!r}, which splits the "
            "tokens of a sequence: a shard gets a window of the tokens before it, not all of them. "
            "Give a `sliding_window`, or leave this axis out of the mesh."
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
    last_tokens = _last_tokens((shard["k"], shard["v"]), kind, room), seen

    def join(left, right):
        starts = right[0][2]
        return _join_last_tokens(left[0], right[0]), right[1] + jnp.where(starts, 0, left[1])

    before = shards.before(join, last_tokens, jax.tree.map(jnp.zeros_like, last_tokens))
    end = jnp.full(batch, room)
    if first is not None:
        position = first["position"]
        sequences = tuple(
            _circular_buffer.to_sequence(first[name], position, end, room)
            for name in ("key", "value")
        )
        count = jnp.minimum(position, first["key"].shape[1])
        before = join(((sequences, count, jnp.zeros(batch, bool)), position), before)
    (sequences, _, _), position = before
    position = position.astype(jnp.int32)
    buffer = {
        name: _circular_buffer.from_sequence(x, position, end, room)
        for name, x in zip(("key", "value"), sequences, strict=True)
    }
    shard = {**shard, "initial_state": {**buffer, "position": position}}
    output, state = function(**shard, **options)
    state = shards.broadcast_last(state)
    if room != capacity:
        position, end = state["position"], jnp.full(batch, capacity)
        for name in ("key", "value"):
            sequence = _circular_buffer.to_sequence(state[name], position, end, capacity)
            state[name] = _circular_buffer.from_sequence(sequence, position, end, capacity)
    return output, state


def _previous_inputs(shard, shards):
    """The state of a convolution: the last inputs of the document, in order, right-aligned."""
    x, kind, first = shard["x"], shard.get("token_kind"), shard.get("initial_state")
    room = shard["kernel"].shape[0] - 1
    dtype = accumulation_dtype(*(x for x in shard.values() if x.dtype != jnp.int8))
    last_tokens = _last_tokens((x.astype(dtype),), kind, room)
    (inputs,), count, starts = shards.before(
        _join_last_tokens, last_tokens, jax.tree.map(jnp.zeros_like, last_tokens)
    )
    if first is not None:
        given = (first,), jnp.full_like(count, room), jnp.zeros_like(starts)
        (inputs,), _, _ = _join_last_tokens(given, ((inputs,), count, starts))
    return inputs


def _last_tokens(sequences, kind, room):
    """The last `room` real tokens of sequences [B, T, ...] that belong to the last document.

    Returns these right-aligned in sequences [B, room, ...], their number [B], and a mask [B] of
    sequences in which a document starts.
    """
    batch, length = sequences[0].shape[:2]
    if kind is None:
        kept = min(room, length)
        sequences = tuple(
            jnp.pad(x[:, length - kept :], [(0, 0), (room - kept, 0)] + [(0, 0)] * (x.ndim - 2))
            for x in sequences
        )
        return sequences, jnp.full(batch, kept), jnp.zeros(batch, bool)
    # Positions of real tokens, the last ones at the end.
    positions = jnp.where(kind == PADDING, -1, jnp.arange(length))
    document = jnp.cumsum(kind == STARTS, axis=1)
    positions = jnp.where(document == document[:, -1:], positions, -1)
    positions = jnp.sort(jnp.pad(positions, ((0, 0), (room, 0)), constant_values=-1), axis=1)
    positions = positions[:, positions.shape[1] - room :]
    valid = positions >= 0
    sequences = tuple(take(x, jnp.maximum(positions, 0), valid) for x in sequences)
    return sequences, jnp.sum(valid, axis=1), document[:, -1] > 0


def _join_last_tokens(left, right):
    """Joins the results of `_last_tokens` for two adjacent chunks of a sequence."""
    (left_sequences, left_count, left_starts), (right_sequences, count, starts) = left, right
    room = right_sequences[0].shape[1]
    left_count = jnp.where(starts, 0, left_count)
    slot = jnp.arange(room)
    index = jnp.where(slot >= room - count[:, None], room, count[:, None]) + slot
    valid = slot >= room - count[:, None] - left_count[:, None]
    sequences = tuple(
        take(jnp.concatenate([x, y], axis=1), index, valid)
        for x, y in zip(left_sequences, right_sequences, strict=True)
    )
    return sequences, jnp.minimum(count + left_count, room), left_starts | starts
