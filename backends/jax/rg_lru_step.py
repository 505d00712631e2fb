"""A token of Griffin's recurrent block, between its linear maps (arXiv:2402.19427)."""

import jax
import jax.numpy as jnp

from ..constants import PADDING, STARTS
from ._common import accumulation_dtype
from .gated_linear_unit import gated_linear_unit
from .rg_lru import rg_lru


@jax.jit
def rg_lru_step(
    x,
    gate,
    window,
    hidden,
    conv_kernel,
    conv_bias,
    kernel_a,
    bias_a,
    kernel_x,
    bias_x,
    a_logit,
    token_kind=None,
):
    """x, gate, hidden: [B, D]; window: [B, W-1, D]. Returns (y [B, D], window, hidden)."""
    dtype = accumulation_dtype(x, gate, window, hidden, conv_kernel, kernel_a, kernel_x, a_logit)
    inputs, gate_values, window = (t.astype(dtype) for t in (x, gate, window))
    before, kinds = window, None
    if token_kind is not None:
        kinds = token_kind[:, None]
        inputs = jnp.where(kinds == PADDING, 0, inputs)
        before = jnp.where(kinds[..., None] == STARTS, 0, window)
    seen = jnp.concatenate((before, inputs[:, None]), axis=1)
    c = jnp.sum(seen * conv_kernel.astype(dtype), axis=1) + conv_bias.astype(dtype)
    blocks = c.reshape(len(x), *bias_a.shape)
    gate_a, gate_x = (
        (
            jnp.einsum("bni,nij->bnj", blocks, kernel.astype(dtype), precision="highest")
            + bias.astype(dtype)
        ).reshape(c.shape)
        for kernel, bias in ((kernel_a, bias_a), (kernel_x, bias_x))
    )
    h, hidden = rg_lru(c[:, None], gate_a[:, None], gate_x[:, None], a_logit, hidden, kinds)
    after = seen[:, 1:]
    if kinds is not None:
        after = jnp.where(kinds[..., None] == PADDING, window, after)
    y = gated_linear_unit(gate_values, h[:, 0], activation="gelu")
    return y.astype(x.dtype), after, hidden
