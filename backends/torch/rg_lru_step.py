"""A token of Griffin's recurrent block, between its linear maps (arXiv:2402.19427)."""

import torch

from ._common import accumulation_dtype, step_masks, where
from .gated_linear_unit import gated_linear_unit
from .rg_lru import rg_lru


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
    inputs, gate_values, window = x.to(dtype), gate.to(dtype), window.to(dtype)
    kinds = None if token_kind is None else token_kind[:, None]
    starts, padding = step_masks(kinds, 2)
    inputs = where(padding, 0, inputs)
    before = window if starts is None else torch.where(starts[..., None], 0, window)
    seen = torch.cat((before, inputs[:, None]), dim=1)
    c = (seen * conv_kernel.to(dtype)).sum(1) + conv_bias.to(dtype)
    blocks = c.view(len(x), *bias_a.shape).transpose(0, 1)
    gate_a, gate_x = (
        (torch.bmm(blocks, kernel.to(dtype)).transpose(0, 1) + bias.to(dtype)).reshape(c.shape)
        for kernel, bias in ((kernel_a, bias_a), (kernel_x, bias_x))
    )
    h, hidden = rg_lru(c[:, None], gate_a[:, None], gate_x[:, None], a_logit, hidden, kinds)
    window = (
        seen[:, 1:] if padding is None else torch.where(padding[..., None], window, seen[:, 1:])
    )
    y = gated_linear_unit(gate_values, h[:, 0], activation="gelu")
    return y.to(x.dtype), window.contiguous(), hidden
