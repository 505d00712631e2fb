"""The recurrence out_t = a_t * out_{t-1} + x_t and its adjoint, in few calls per sequence."""

import torch

from ._common import elements_per_launch

_SHORTEST_CHUNK = 8


def scan_(a, x, state, out, reverse=False):
    """out_t = a_t * out_{t-1} + x_t (t+1 for t-1 if `reverse`), starting from `state`.

    a, x, out: [B, T, D]; state: [B, D], all of one dtype. The result is written into `out`, which
    may be `a` or `x`.

    The tokens are cut into M chunks of C. All chunks are computed together, one token of each per
    call: first from a zero state, which gives the contribution of a chunk to the state and the
    product of its decays. This recurrence over the M totals gives the state before each chunk, from
    which all tokens are computed. Tokens c, c + C, c + 2C, ... are token c of every chunk: a
    strided view, so nothing is padded or copied. That takes 3C + M calls; up to four chunks are
    computed token by token, in fewer calls.
    """
    batch, length, width = x.shape
    chunk = max(_SHORTEST_CHUNK, -(-x.numel() // elements_per_launch(x)))
    if length <= 4 * chunk:
        outputs = out.unbind(1)
        inputs = outputs if out is x else x.unbind(1)
        rows = list(zip(a.unbind(1), inputs, outputs, strict=True))
        for a_t, x_t, out_t in reversed(rows) if reverse else rows:
            state = torch.addcmul(x_t, a_t, state, out=out_t)
        return
    num_chunks = -(-length // chunk)
    first = [(length - 1 - c) % chunk if reverse else c for c in range(chunk)]
    a_rows = [a[:, start::chunk] for start in first]
    x_rows = [x[:, start::chunk] for start in first]

    entering = x.new_empty(batch, num_chunks, width)
    entering[:, -1 if reverse else 0] = state
    # The total of the last chunk is not needed.
    whole = slice(1 - num_chunks, None) if reverse else slice(num_chunks - 1)
    totals = entering[:, :-1] if reverse else entering[:, 1:]
    totals.copy_(x_rows[0][:, whole])
    decays = a_rows[0][:, whole].clone()
    for a_c, x_c in zip(a_rows[1:], x_rows[1:], strict=True):
        a_c = a_c[:, whole]
        torch.addcmul(x_c[:, whole], a_c, totals, out=totals)
        decays.mul_(a_c)
    scan_(decays, totals, state, totals, reverse)

    previous = entering
    for start, a_c, x_c in zip(first, a_rows, x_rows, strict=True):
        count = a_c.shape[1]  # the last chunk of the scan may be shorter
        previous = previous[:, -count:] if reverse else previous[:, :count]
        previous = torch.addcmul(x_c, a_c, previous, out=out[:, start::chunk])


def adjoint_scan(a, d_out, d_state):
    """The gradients g_t = d_out_t + a_{t+1} * g_{t+1} of x_t.

    g_T = d_out_T + d_state. The caller computes the gradient of the initial state, a_1 * g_1, from
    a * g in an existing buffer.
    """
    g = torch.empty_like(a)
    torch.add(d_out[:, -1], d_state, out=g[:, -1])
    scan_(a[:, 1:], d_out[:, :-1], g[:, -1], g[:, :-1], reverse=True)
    return g


def times_previous_(tensor, out, state):
    """Multiplies `tensor` in place by out_{t-1}, which is `state` for the first token."""
    tensor[:, 0].mul_(state)
    tensor[:, 1:].mul_(out[:, :-1])
    return tensor
