"""Chunks of linear attention, and groups of chunks, as in `backends/jax/_linear_attention.py`."""

import torch

from ._common import elements_per_launch, kind_masks


def state_shape(q, v):
    return q.shape[0], v.shape[2], q.shape[3], v.shape[3]


def step(q, k, v, decay, state, padding):
    """One token: S' = decay S + k v^T, o = S'^T q; at padding S stays, and o = 0.

    q: [B, 1, H, K]; k: [B, H, K]; v: [B, 1, H, V]; decay: [B, H, K], or broadcastable to it;
    state: [B, H, K, V]; padding: [B, 1, 1] or None. Returns ([B, 1, H, V] in v's dtype, S').
    """
    dtype = state.dtype
    q, w = (x[:, 0].to(dtype) for x in (q, v))
    if padding is not None:
        decay = torch.where(padding, 1.0, decay)
        q, k, w = (x.masked_fill(padding, 0) for x in (q, k, w))
    after = torch.addcmul(k.unsqueeze(3) * w.unsqueeze(2), decay.unsqueeze(3), state)
    output = (q.unsqueeze(3) * after).sum(2)
    return output.unsqueeze(1).to(v.dtype), after


def chunk_size(length, longest):
    """Tokens in a chunk, a power of two: `longest`, or less for shorter sequences."""
    return min(longest, 1 << (length - 1).bit_length())


def group_spans(q, v, size):
    """Slices of the time axis of q [B, T, G, K] and v [B, T, H, V], each several chunks long."""
    length = q.shape[1]
    chunk = size * max(q[:, 0].numel(), v[:, 0].numel())
    step = size * max(1, 2 * elements_per_launch(q) // chunk)
    return [slice(i, min(i + step, length)) for i in range(0, length, step)]


def chunked(x, span, size, dtype):
    """A span of x [B, T, H, K] as [B * H, chunks, size, K], padded with zeros."""
    x = x[:, span]
    batch, length, heads, width = x.shape
    chunks = -(-length // size)
    shape = (batch, heads, chunks * size, width)
    out = x.new_empty(shape, dtype=dtype)
    out[:, :, :length] = x.transpose(1, 2)
    if length < chunks * size:
        out[:, :, length:] = 0
    return out.view(batch * heads, chunks, size, width)


def unchunk_(out, span, y):
    """Writes y [B * H, chunks, size, K] into a span of out [B, T, H, K]; inverts `chunked`."""
    out = out[:, span].transpose(1, 2)
    batch, heads, length, width = out.shape
    out.copy_(y.view(batch, heads, -1, width)[:, :, :length])


def chunked_kinds(token_kind, span, size, heads):
    """`kind_masks` of a span, [B * heads, chunks, size, 1]; both None if all tokens continue."""
    if token_kind is None:
        return None, None
    kind = token_kind[:, :, None, None].expand(-1, -1, heads, -1)
    return kind_masks(chunked(kind, span, size, kind.dtype))


def smallest_decay(dtype):
    """Smallest decay that is not set to 0: smaller ones may give subnormal products, slow on CPUs.

    1e-32 in float32, a million times its smallest normal number.
    """
    return torch.finfo(dtype).tiny * 2**20


def inner_products(a, b):
    """a b^T, summed in blocks of 64 terms, which reduces the rounding error."""
    parts = zip(a.split(64, -1), b.split(64, -1), strict=True)
    return sum(a_i @ b_i.mT for a_i, b_i in parts)


def states_(decay, added, first, reverse=False):
    """S' = decay S + added, chunk by chunk, starting from the last if `reverse`.

    decay: [B * H, chunks, K, 1], or broadcastable to it; added: [B * H, chunks, K, V], replaced
    by the states before each chunk; first: [B * H, K, V]. Returns the last state.
    """
    decay = decay.expand(-1, added.shape[1], -1, -1)
    order = range(added.shape[1])
    for n in reversed(order) if reverse else order:
        after = torch.addcmul(added[:, n], decay[:, n], first)
        added[:, n] = first
        first = after
    return first


def decay_products(f):
    """`(levels, from_start, to_end)`, as in `backends/jax/_linear_attention.py`."""
    from_start, to_end = f, torch.ones_like(f)
    # CPUs are several times slower with subnormal numbers. Decays of right and left halves, which
    # are multiplied with each other, are therefore set to 0 below 1e-19. Contributions between two
    # tokens that are scaled by 1e-19 may be lost. Contributions of the state are not, because its
    # decays are only multiplied with inputs.
    least, least_of_two = smallest_decay(f.dtype), torch.finfo(f.dtype).tiny ** 0.5
    levels, half = [], 1
    while half < f.shape[-2]:
        p_left, p_right = halves(from_start, half)
        s_left, _ = halves(to_end, half)
        levels.append([torch.threshold(x, least_of_two, 0) for x in (p_right, s_left)])
        torch.threshold_(s_left.mul_(p_right[..., -1:, :]), least, 0)
        torch.threshold_(p_right.mul_(p_left[..., -1:, :]), least, 0)
        half *= 2
    return levels, from_start, to_end


def halves(x, half):
    """Views of the left and the right halves, [..., C / (2 half), half, K], of x: [..., C, K]."""
    return x.unflatten(-2, (-1, 2, half)).unbind(-3)


def between_halves(weights, half):
    """A view of the weights between right and left halves: [..., C / (2 half), half, half]."""
    blocks = weights.unflatten(-1, (-1, 2, half)).unflatten(-4, (-1, 2, half))
    return blocks[..., :, 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def sum_over_pairs(pairs, to_later, from_earlier):
    """The gradient of log f_t, as in `backends/jax/_linear_attention.py`."""
    later = torch.ones_like(pairs[(0,) * (pairs.ndim - 2)]).triu()
    inside = (later @ pairs).tril_(-1).sum(-1, keepdim=True)
    return inside.add_(later @ to_later).add_((1 - later) @ from_earlier)
