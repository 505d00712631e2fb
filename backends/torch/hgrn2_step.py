"""A token of HGRN2's recurrence, from its three linear maps.  Qin et al. 2024, arXiv:2404.07904."""

import torch

from ._common import accumulation_dtype, step_masks, where


def hgrn2_step(q, f, v, memory, lower_bound=None, token_kind=None):
    """q, f: [B, H K]; v: [B, H V]; memory: [B, H, K, V]. Returns ([B, H V], the next memory)."""
    dtype = accumulation_dtype(q, f, v, memory, lower_bound)
    batch, heads, keys, values = memory.shape
    query, logits, value = (x.to(dtype) for x in (q, f, v))
    query = query * torch.sigmoid(query) * keys**-0.5
    remembers, forgets = torch.sigmoid(logits), torch.sigmoid(-logits)
    if lower_bound is not None:
        bound, rest = lower_bound.to(dtype).exp()
        remembers, forgets = bound + rest * remembers, rest * forgets
        # Rounded, β and 1 - β do not add up to 1; β may be NaN.
        near_1 = (forgets <= 0.5) & ~remembers.isnan()
        remembers = torch.where(near_1, 1 - forgets, remembers)
    query, remembers, forgets = (x.view(batch, heads, keys) for x in (query, remembers, forgets))
    value = value.view(batch, heads, values)
    if token_kind is not None:
        starts, padding = step_masks(token_kind[:, None], 3)
        forgets, value = where(padding, 0, forgets), where(padding, 0, value)
        remembers = where(starts, 0, where(padding, 1, remembers))
    memory = remembers[..., None] * memory.to(dtype) + forgets[..., None] * value[:, :, None]
    output = (query[..., None] * memory).sum(2)
    return output.reshape(batch, heads * values).to(v.dtype), memory
