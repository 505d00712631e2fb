"""Rules by which an operation over time continues from the chunks of previous devices.

A rule takes `Shards`, the arguments of an implementation, and its `Kernel`, and returns the results
of the implementation. `matrix_recurrence` uses `effect_on_state` of the kernel, if there is one:
given the gradient of the output, this function returns the gradient of a state.
"""

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..constants import CONTINUES, DECAY_EXPONENT, PADDING, STARTS
from . import _circular_buffer
from ._attention_inputs import AttentionInputs
from ._common import accumulation_dtype


def recurrence(log_decays):
    """Returns the rule of a recurrence `h = decay h + ...`.

    log_decays: two functions. The first returns the log decays [B, T, ...] of each token, from the
    arguments and the accumulation dtype; the second applies their sums over time to a state.
    """
    log_of_tokens, apply_decay = log_decays

    def rule(shards, arguments, kernel):
        state = arguments["initial_state"]
        zeros = {**arguments, "initial_state": None if state is None else torch.zeros_like(state)}
        added = kernel(**zeros)[1]
        first = torch.zeros_like(added) if state is None else state.to(added.dtype)
        log_decays = log_of_tokens(arguments, added.dtype)
        logs = _sum_over_time(log_decays, arguments["token_kind"], added.dtype)

        def fold(chunks, _):
            states = [chunks[0][-1]]
            for *product, chunk_state, _initial in chunks[:-1]:
                states.append(apply_decay(product, states[-1]) + chunk_state)
            return [(state,) for state in states]

        (before,) = shards.state_before(fold, (*logs, added, first))
        return kernel(**{**arguments, "initial_state": before})

    return rule


def matrix_recurrence(name, log_of_tokens, gradient_of_state):
    """Returns the rule of a recurrence of matrices, `S = decay S + k v^T`, `o = S^T q`.

    Its operation takes too long to differentiate both passes over a shard. So the first one, for
    the final state, has no gradient, and neither has the exchange: the backward exchanges the
    gradients of states, and differentiates the second pass, once.

    name: the argument with the log decays. log_of_tokens: as in `recurrence`, of one function.
    gradient_of_state: a function of the operation, the gradient of its output, q, the log decays
    and the token kinds; it returns what the output adds to the gradient of the initial state.
    """

    def rule(shards, arguments, kernel):
        effect_on_state = kernel.effect_on_state
        state, kind = arguments["initial_state"], arguments["token_kind"]
        tensors = [arguments[of] for of in ("q", "k", "v", name)]
        with torch.no_grad():
            if effect_on_state is not None:
                decay, added = _call(effect_on_state, *tensors, kind)
                decay = decay[..., None]
            else:
                added = kernel(**{**arguments, "initial_state": None})[1]
                logs = _sum_over_time(log_of_tokens(arguments, added.dtype), kind, added.dtype)
                decay = _scale(logs, torch.ones_like(added[..., :1]))
            decays = shards.gather(decay)
            before = torch.zeros_like(added)
            if state is not None:
                before = shards.gather(state.to(added.dtype))[0]
            for decay, chunk in zip(decays[: shards.rank], shards.gather(added), strict=False):
                before = decay * before + chunk
        if state is not None:
            # Not `torch.tensor`, whose copy to a GPU waits for the GPU.
            is_first = torch.full((), shards.rank == 0, device=state.device)
            before = torch.where(is_first, state.to(before.dtype), before)
        output, final = kernel(**{**arguments, "initial_state": before})

        def gradient(d_output, q, k, v, log_decay, token_kind):
            if effect_on_state is not None:
                return _call(effect_on_state, q, k, v, log_decay, token_kind, d_output)[1]
            return gradient_of_state(kernel, d_output, q, log_decay, token_kind)

        return _AddGradient.apply(
            shards, gradient, output, final, torch.stack(decays), *tensors, kind
        )

    return rule


@torch.compiler.disable  # Dynamo would trace launches
def _call(kernels, *tensors):
    """Calls a function that launches kernels on the device of its tensors."""
    with torch.cuda.device_of(tensors[0]):
        return kernels(*(x if x is None else x.contiguous() for x in tensors))


class _AddGradient(torch.autograd.Function):
    """Adds to the gradient of a shard's final state what comes from the shards after it."""

    @staticmethod
    def forward(ctx, shards, gradient_of_state, output, final, decays, *tensors):
        ctx.shards, ctx.gradient_of_state = shards, gradient_of_state
        ctx.save_for_backward(decays, *tensors)
        return output.view_as(output), final.view_as(final)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_output, d_final):
        shards, (decays, *tensors) = ctx.shards, ctx.saved_tensors
        own = ctx.gradient_of_state(d_output, *tensors)
        found = shards.gather(own + decays[shards.rank] * d_final)
        d_state = torch.zeros_like(d_final)
        for rank in range(shards.count - 1, shards.rank, -1):
            d_state = decays[rank] * d_state + found[rank]
        return None, None, d_output, d_final + d_state, *[None] * (1 + len(tensors))


def _gradient_by_decays(name):
    """Σ_t f_1 ... f_t q_t d_output_t^T, a state of this recurrence in reverse, from the last token.

    name: the argument with the logarithms of f.
    """

    def gradient(kernel, d_output, q, log_f, token_kind):
        padding, (q, d_output) = _before_first_start(token_kind, q, d_output)
        if padding is not None:
            log_f = torch.where(padding.view(*padding.shape[: log_f.ndim]), 0, log_f)
        shifted = torch.cat((log_f[:, 1:], torch.zeros_like(log_f[:, :1])), dim=1)
        q, d_output, shifted = (x.flip(1) for x in (q, d_output, shifted))
        tensors = {"q": q, "k": q, "v": d_output, name: shifted}
        state = kernel(**tensors, initial_state=None, token_kind=None)[1]
        return _scale((log_f[:, 0].to(state.dtype),), state)

    return gradient


def _lightning_gradient(kernel, d_output, q, log_decay, token_kind):
    """Σ_t f^t q_t d_output_t^T for real tokens t = 1, 2 ...; see `_gradient_by_decays`."""
    padding, (q, d_output) = _before_first_start(token_kind, q, d_output)
    q, d_output = q.flip(1), d_output.flip(1)
    kind = None
    if padding is not None:
        kind = torch.where(padding[..., 0, 0], PADDING, CONTINUES).flip(1).to(token_kind.dtype)
    tensors = {"q": q, "k": q, "v": d_output, "log_decay": log_decay}
    state = kernel(**tensors, initial_state=None, token_kind=kind)[1]
    return log_decay.to(state.dtype).exp()[:, None, None] * state


def _before_first_start(token_kind, *tensors):
    """The mask of padding, [B, T, 1, 1], or None, and tensors with 0 there and from a start on."""
    if token_kind is None:
        return None, tensors
    kind = token_kind[..., None, None]
    padding = kind == PADDING
    kept = ~padding & ((kind == STARTS).cumsum(1) == 0)
    return padding, [torch.where(kept, x, 0) for x in tensors]


def _sum_over_time(log_of_tokens, token_kind, dtype):
    """The sums [B, ...] of the logarithms of all tokens; a start makes the first one -inf."""
    sums = []
    for i, x in enumerate(log_of_tokens):
        if token_kind is not None:
            kind = token_kind.view(*token_kind.shape, *[1] * (x.ndim - 2))
            x = torch.where(kind == PADDING, 0, x)
            if i == 0:
                x = torch.where(kind == STARTS, -torch.inf, x)
        sums.append(x.sum(1, dtype=dtype))
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


def _arguments(*names):
    """Returns a function of the arguments and a dtype that returns these arguments."""
    return lambda arguments, dtype: [arguments[name] for name in names]


def _log_of_gates(arguments, dtype):
    open_gate = -DECAY_EXPONENT * F.softplus(-arguments["a_logit"].to(dtype))
    return (torch.sigmoid(arguments["gate_a"].to(dtype)) * open_gate,)


def _log_decay(arguments, dtype):
    log_decay = arguments["log_decay"].detach().to(dtype)  # it has no gradient
    return (log_decay.expand(*arguments["q"].shape[:2], -1),)


def causal_conv1d(shards, arguments, kernel):
    """Rule that receives the last taps - 1 real tokens before a chunk."""
    state, kind, x = (arguments[name] for name in ("initial_state", "token_kind", "x"))
    shape = x.shape[0], arguments["kernel"].shape[0] - 1, x.shape[2]
    dtype = accumulation_dtype(x, arguments["kernel"], arguments["bias"], state)
    if shape[1] == 0:
        return kernel(**arguments)
    nothing = torch.zeros(shape, dtype=dtype, device=x.device)
    if kind is None:
        last = torch.cat((nothing, x.to(dtype)), dim=1)[:, x.shape[1] :]
    else:
        last = kernel(**{**arguments, "initial_state": nothing})[1]
    first = nothing if state is None else state.to(dtype)

    def fold(chunks, kinds):
        states = [chunks[0][1]]
        for (added, _), (count, started) in zip(chunks[:-1], kinds, strict=False):
            states.append(_append_tokens(states[-1], added, count, started))
        return [(state,) for state in states]

    (before,) = shards.state_before(fold, (last, first), _count_tokens(x, kind))
    return kernel(**{**arguments, "initial_state": before})


def sliding_window_attention(shards, arguments, kernel):
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
        return kernel(**arguments)
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
    return kernel(**{**arguments, "initial_state": state})


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
    "linear_scan": recurrence((_arguments("log_a"), _scale)),
    "complex_linear_scan": recurrence((_arguments("log_a", "phase"), _rotate)),
    "rg_lru": recurrence((_log_of_gates, _scale)),
    "gated_linear_attention": matrix_recurrence(
        "log_f", _arguments("log_f"), _gradient_by_decays("log_f")
    ),
    "lightning_attention": matrix_recurrence("log_decay", _log_decay, _lightning_gradient),
    "scalar_decay_attention": matrix_recurrence(
        "log_decay", _arguments("log_decay"), _gradient_by_decays("log_decay")
    ),
    "causal_conv1d": causal_conv1d,
    "sliding_window_attention": sliding_window_attention,
}
