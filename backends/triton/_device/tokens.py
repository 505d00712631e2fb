"""Kinds of tokens, as kernels compare them; `backends/constants.py` has their values."""

import triton
import triton.language as tl

from ... import constants

GOES_ON = tl.constexpr(constants.GOES_ON)
STARTS = tl.constexpr(constants.STARTS)
PADDING = tl.constexpr(constants.PADDING)


@triton.jit
def read_kind(token_kind, offsets, valid):
    """The kinds of some tokens, PADDING where `valid` is False; None if there are no kinds."""
    kind = None
    if token_kind is not None:
        kind = tl.load(token_kind + offsets, valid, other=PADDING)
    return kind


@triton.jit
def by_kind(kind, goes_on, starts, padding):
    """For each token the value that its kind chooses."""
    return tl.where(kind == GOES_ON, goes_on, tl.where(kind == STARTS, starts, padding))
