"""Token kinds as constants of kernels; `backends/constants.py` defines their values."""

import triton
import triton.language as tl

from ... import constants

CONTINUES = tl.constexpr(constants.CONTINUES)
STARTS = tl.constexpr(constants.STARTS)
PADDING = tl.constexpr(constants.PADDING)


@triton.jit
def read_kind(token_kind, offsets, valid):
    """Loads token kinds, PADDING where `valid` is False; None if `token_kind` is None."""
    kind = None
    if token_kind is not None:
        kind = tl.load(token_kind + offsets, valid, other=PADDING)
    return kind


@triton.jit
def select_by_kind(kind, continues, starts, padding):
    """Selects one of three values for each token, by its kind."""
    return tl.where(kind == CONTINUES, continues, tl.where(kind == STARTS, starts, padding))
