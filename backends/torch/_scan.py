"""The recurrence out_t = a_t * out_{t-1} + x_t and its adjoint, for all recurrent kernels here."""

import torch

from keras_recurrent.backends.torch._common import slab_size

_SHORTEST_CHUNK = 8


def scan_(out, a, x, state, reverse=False):
    """Writes out_t = a_t * out_{t-1} + x_t (t+1 for t-1 if `reverse`), starting from `state`.

    out, a, x: [B, T, D], state [B, D], all of one dtype. `out` may be `a` or `x` itself.

    The tokens are cut into M chunks of C, and all chunks advance together, one position a launch:
    first to find where each would end had it begun at zero, and the product of its decays; the
    same recurrence over these totals gives the state that enters each chunk; then for good. Rows
    c, c + C, c + 2C, ... are position c of every chunk, so nothing is padded or copied.
    """
    batch, length, width = x.shape
    if length == 0:
        return
    chunk = min(length, max(_SHORTEST_CHUNK, -(-x.numel() // slab_size(x))))
    num_chunks = -(-length // chunk)
    first = [(length - 1 - c) % chunk if reverse else c for c in range(chunk)]
    a_rows = [a[:, start::chunk] for start in first]
    x_rows = [x[:, start::chunk] for start in first]

    entering = x.new_empty(batch, num_chunks, width)
    entering[:, -1 if reverse else 0] = state
    if num_chunks > 1:  # nothing follows the last chunk of the scan: its total is not needed
        whole = slice(1 - num_chunks, None) if reverse else slice(num_chunks - 1)
        totals = entering[:, :-1] if reverse else entering[:, 1:]
        totals.copy_(x_rows[0][:, whole])
        decays = a_rows[0][:, whole].clone()
        for a_c, x_c in zip(a_rows[1:], x_rows[1:], strict=True):
            a_c = a_c[:, whole]
            torch.addcmul(x_c[:, whole], a_c, totals, out=totals)
            decays.mul_(a_c)
        scan_(totals, decays, totals, state, reverse)

    previous = entering
    for start, a_c, x_c in zip(first, a_rows, x_rows, strict=True):
        count = a_c.shape[1]  # the chunk at the end of the scan may be short
        previous = previous[:, -count:] if reverse else previous[:, :count]
        previous = torch.addcmul(x_c, a_c, previous, out=out[:, start::chunk])


def adjoint_scan(a, d_out, d_state):
    """g_t = d_out_t + a_{t+1} * g_{t+1}, and g_T = d_out_T + d_state."""
    g = torch.empty_like(a)
    torch.add(d_out[:, -1], d_state, out=g[:, -1])
    scan_(g[:, :-1], a[:, 1:], d_out[:, :-1], g[:, -1], reverse=True)
    return g


def times_previous_(tensor, out, state):
    """Multiplies `tensor` in place by out_{t-1}, where `state` stands before the first token."""
    tensor[:, 0].mul_(state)
    tensor[:, 1:].mul_(out[:, :-1])
    return tensor
