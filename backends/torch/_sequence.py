"""Rules by which an operation over time continues from the chunks of previous devices.

A rule takes `Shards`, the arguments of an implementation, and the implementation, and returns the
results of the implementation.
"""

import torch
from torch.nn import functional as F

from ..constants import DECAY_EXPONENT, PADDING, STARTS
from . import _circular_buffer
from ._attention_inputs import AttentionInputs
from ._common import accumulation_dtype


def recurrence(log_decays):
    """Returns the rule of a recurrence `h = decay h + ...`.

    log_decays: two functions. The first returns the log decays [B, T, ...] of each token, from the
    arguments and the accumulation dtype; the second applies their sums over time to a state.
    """
    log_of_tokens, apply_decay = log_decays

    def rule(shards, arguments, function):
        state = arguments["initial_state"]
        zeros = {**arguments, "initial_state": None if state is None else torch.zeros_like(state)}
        added = function(**zeros)[1]
        first = torch.zeros_like(added) if state is None else state.to(added.dtype)
        logs = _sum_over_time(log_of_tokens(arguments, added.dtype), arguments["token_kind"])

        def fold(chunks, _):
            states = [chunks[0][-1]]
            for *product, chunk_state, _initial in chunks[:-1]:
                states.append(apply_decay(product, states[-1]) + chunk_state)
            return [(state,) for state in states]

        (before,) = shards.state_before(fold, (*logs, added, first))
        return function(**{**arguments, "initial_state": before})

    return rule


def _sum_over_time(log_of_tokens, token_kind):
    """The sums [B, ...] of the logarithms of all tokens; a start makes the first one -inf."""
    sums = []
    for i, x in enumerate(log_of_tokens):
        if token_kind is not None:
            kind = token_kind.view(*token_kind.shape, *[1] * (x.ndim - 2))
            x = torch.where(kind == PADDING, 0, x)
            if i == 0:
                x = torch.where(kind == STARTS, -torch.inf, x)
        sums.append(x.sum(1))
    return sums


def _scale(logs, state):
    (log,) = logs
    return log.exp().reshape(*log.shape, *[1] * (state.ndim - log.ndim)) * state


def _rotate(logs, state):
    """Scales and rotates complex states, given as real parts, then imaginary parts."""
    log, phase = logs
    x, y = state.chunk(2, dim=-1)
    real, imaginary = log.exp() * phase.cos(), log.exp() * phase.sin()
    return torch.cat((real * x - imaginary * y, imaginary * x + real * y), dim=-1)


def _log_a(arguments, dtype):
    return (arguments["log_a"].to(dtype),)


def _log_f(arguments, dtype):
    return (arguments["log_f"].to(dtype),)


def _log_a_and_phase(arguments, dtype):
    return arguments["log_a"].to(dtype), arguments["phase"].to(dtype)


def _log_of_gates(arguments, dtype):
    open_gate = -DECAY_EXPONENT * F.softplus(-arguments["a_logit"].to(dtype))
    return (torch.sigmoid(arguments["gate_a"].to(dtype)) * open_gate,)


def _log_decay(arguments, dtype):
    log_decay = arguments["log_decay"].detach().to(dtype)  # it has no gradient
    return (log_decay.expand(*arguments["q"].shape[:2], -1),)


def causal_conv1d(shards, arguments, function):
    """Rule that receives the last taps - 1 real tokens before a chunk."""
    state, kind, x = (arguments[name] for name in ("initial_state", "token_kind", "x"))
    shape = x.shape[0], arguments["kernel"].shape[0] - 1, x.shape[2]
    dtype = accumulation_dtype(x, arguments["kernel"], arguments["bias"], state)
    if shape[1] == 0:
        return function(**arguments)
    nothing = torch.zeros(shape, dtype=dtype, device=x.device)
    if kind is None:
        last = torch.cat((nothing, x.to(dtype)), dim=1)[:, x.shape[1] :]
    else:
        last = function(**{**arguments, "initial_state": nothing})[1]
    first = nothing if state is None else state.to(dtype)

    def fold(chunks, kinds):
        states = [chunks[0][1]]
        for (added, _), (count, started) in zip(chunks[:-1], kinds, strict=False):
            states.append(_append_tokens(states[-1], added, count, started))
        return [(state,) for state in states]

    (before,) = shards.state_before(fold, (last, first), _count_tokens(x, kind))
    return function(**{**arguments, "initial_state": before})


def sliding_window_attention(shards, arguments, function):
    """Rule that receives the keys and values of the window before a chunk."""
    window = arguments["sliding_window"]
    for name, wrong in (
        ("no `sliding_window`", window is None),
        ("an `initial_state`", arguments["initial_state"] is not None),
    ):
        if wrong:
            raise NotImplementedError(
                f"`sliding_window_attention` with {name} inside `sequence_parallel`: give a "
                "`sliding_window`, and no `initial_state`."
            )
    room = window - 1
    if room == 0:
        return function(**arguments)
    q, k, v, kind = (arguments[name] for name in ("q", "k", "v", "token_kind"))
    inputs = AttentionInputs(q, k, v, None, None, None, kind, window)
    lasts = [
        _circular_buffer.to_sequence(
            _circular_buffer.from_sequence(x, inputs.next_position, inputs.end, room),
            inputs.next_position,
            torch.full_like(inputs.end, room),
            room,
        )
        for x in inputs.keys_and_values()
    ]
    _, started = _count_tokens(q, kind)

    def fold(chunks, kinds):
        states = [tuple(torch.zeros_like(x) for x in chunks[0])]
        for chunk, (count, started) in zip(chunks[:-1], kinds, strict=False):
            pairs = zip(states[-1], chunk, strict=True)
            states.append(tuple(_append_tokens(x, y, count, started) for x, y in pairs))
        return states

    counts = inputs.next_position, started
    sequences = shards.state_before(fold, lasts, counts)
    position = torch.zeros_like(inputs.next_position)
    gathered = zip(*(shards.gather(t) for t in counts), strict=True)
    for _, (count, started) in zip(range(shards.rank), gathered, strict=False):
        position = torch.where(started, count, position + count)
    key, value = (
        _circular_buffer.from_sequence(x, position, torch.full_like(position, room), room)
        for x in sequences
    )
    state = {"key": key, "value": value, "position": position.int()}
    return function(**{**arguments, "initial_state": state})


def _count_tokens(x, kind):
    """The number of real tokens in a chunk, and a mask of starts in it, both [B]."""
    if kind is None:
        count = torch.full(x.shape[:1], x.shape[1], device=x.device)
        return count, torch.zeros_like(count, dtype=torch.bool)
    return (kind != PADDING).sum(1), (kind == STARTS).any(1)


def _append_tokens(before, last, count, started):
    """Appends the `last` tokens of a chunk to those `before` it, [B, C, ...]; keeps the last C.

    count: the number of tokens in the chunk, which are at the end of `last`; started: mask of
    chunks in which a document starts, which drops the tokens before it.
    """
    room = before.shape[1]
    slot = torch.arange(room, device=before.device)
    index = slot + count.clamp_max(room)[:, None]
    moved = _circular_buffer.take(
        before, index.clamp_max(room - 1), (index < room) & ~started[:, None]
    )
    return moved + last


RULES = {
    "linear_scan": recurrence((_log_a, _scale)),
    "complex_linear_scan": recurrence((_log_a_and_phase, _rotate)),
    "rg_lru": recurrence((_log_of_gates, _scale)),
    "gated_linear_attention": recurrence((_log_f, _scale)),
    "lightning_attention": recurrence((_log_decay, _scale)),
    "causal_conv1d": causal_conv1d,
    "sliding_window_attention": sliding_window_attention,
}
