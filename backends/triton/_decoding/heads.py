"""Heads of queries and keys of one token, with optional RMSNorm and rotary embedding."""

import triton
import triton.language as tl

from .._device.common import load_float32
from .._device.math import reciprocal_root


@triton.jit
def load_heads(x, rows, valid, c, token_position, frequencies, norm_scale, HEADS: tl.constexpr):
    """Loads `rows` [N] of K channels c [BLOCK_K]: RMSNorm over channels, then rotary embedding.

    norm_scale: [K], or None: no norm. frequencies: [R], or None: no rotation; pairs are j, j + R.
    HEADS: constants with K, R and the norm's EPSILON.
    """
    K: tl.constexpr = HEADS.K
    R: tl.constexpr = HEADS.R
    offsets = rows[:, None] * K + c[None, :]
    valid = valid[:, None] & (c < K)[None, :]
    heads = load_float32(x, offsets, valid)
    if norm_scale is not None:
        root = reciprocal_root(tl.sum(heads * heads, 1) / K + HEADS.EPSILON)[:, None]
        heads *= root * load_float32(norm_scale, c, c < K)[None, :]
    if frequencies is not None:
        turned = c < 2 * R
        partner = tl.where(c < R, R, -R)
        other = load_float32(x, offsets + partner[None, :], valid & turned[None, :])
        if norm_scale is not None:
            other *= root * load_float32(norm_scale, c + partner, turned)[None, :]
        angle = token_position.to(tl.float32) * load_float32(frequencies, c % R, turned)
        sine = tl.where(c < R, -tl.sin(angle), tl.sin(angle))
        heads = heads * tl.cos(angle)[None, :] + other * sine[None, :]
    return heads
