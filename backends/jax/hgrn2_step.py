"""A token of HGRN2's recurrence, from its three linear maps.  Qin et al. 2024, arXiv:2404.07904."""

import jax
import jax.numpy as jnp

from ..constants import PADDING, STARTS
from ._common import accumulation_dtype


@jax.jit
def hgrn2_step(q, f, v, memory, lower_bound=None, token_kind=None):
    """q, f: [B, H K]; v: [B, H V]; memory: [B, H, K, V]. Returns ([B, H V], the next memory)."""
    dtype = accumulation_dtype(q, f, v, memory, lower_bound)
    batch, heads, keys, values = memory.shape
    query, logits, value = (x.astype(dtype) for x in (q, f, v))
    query = jax.nn.silu(query) * keys**-0.5
    remembers, forgets = jax.nn.sigmoid(logits), jax.nn.sigmoid(-logits)
    if lower_bound is not None:
        bound, rest = jnp.exp(lower_bound.astype(dtype))
        remembers, forgets = bound + rest * remembers, rest * forgets
        # Rounded, β and 1 - β do not add up to 1; β may be NaN.
        near_1 = (forgets <= 0.5) & ~jnp.isnan(remembers)
        remembers = jnp.where(near_1, 1 - forgets, remembers)
    query, remembers, forgets = (x.reshape(batch, heads, keys) for x in (query, remembers, forgets))
    value = value.reshape(batch, heads, values)
    if token_kind is not None:
        kind = token_kind[:, None, None]
        forgets, value = (jnp.where(kind == PADDING, 0, x) for x in (forgets, value))
        remembers = jnp.where(kind == STARTS, 0, jnp.where(kind == PADDING, 1, remembers))
    memory = remembers[..., None] * memory.astype(dtype) + forgets[..., None] * value[:, :, None]
    output = jnp.sum(query[..., None] * memory, axis=2)
    return output.reshape(batch, heads * values).astype(v.dtype), memory
