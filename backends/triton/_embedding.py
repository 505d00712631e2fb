"""The embeddings of a few tokens, as they enter a step of generation.

torch and Keras look a token up by seven launches: they cast it, take negative ones from the end,
gather rows, which takes long for 16 of them, and multiply by the scale.
"""

import triton
import triton.language as tl

from keras_recurrent.backends.triton._ahead import let_next_launch_begin, wait_for_launch_before
from keras_recurrent.backends.triton._framework import (
    forward_operation,
    overlap,
    refusal_of_steps,
    run,
)
from keras_recurrent.backends.triton._launch import Array, Launch

_BLOCK, _WARPS = 512, 4  # channels of a program


def unsupported(table, tokens) -> str | None:
    """Why this implementation refuses these arguments; None if it accepts them."""
    return refusal_of_steps(table, tokens)


@triton.jit
def _kernel(
    table,
    tokens,
    y,
    V,
    multiplier,
    D: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    if AHEAD:
        let_next_launch_begin()
        wait_for_launch_before()
    TILES: tl.constexpr = (D + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // TILES).to(tl.int64)
    d = tl.program_id(0) % TILES * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + row).to(tl.int64)
    token = tl.where(token < 0, token + V, token)
    value = tl.load(table + token * D + d, d < D, other=0.0).to(y.dtype.element_ty)
    if SCALED:
        # Rounded to the dtype of the embeddings before, as torch does on GPUs.
        factor = (tl.zeros((BLOCK,), tl.float32) + multiplier).to(y.dtype.element_ty)
        value = value.to(tl.float32) * factor.to(tl.float32)
    tl.store(y + row * D + d, value, d < D)


def results(table, tokens, *, scale: float, dtype: str):
    return (Array((tokens.shape[0], table.shape[1]), dtype),)


def forward(table, tokens, *, scale: float, dtype: str):
    vocabulary, width = table.shape
    block = min(_BLOCK, triton.next_power_of_2(width))
    options = {"D": width, "SCALED": scale != 1.0, "BLOCK": block, "num_warps": _WARPS}
    outputs = results(table, tokens, scale=scale, dtype=dtype)
    programs = tokens.shape[0] * triton.cdiv(width, block)
    options |= overlap(table)
    return run(Launch(_kernel, programs, (table, tokens), outputs, (vocabulary, scale), options))


_embedding = forward_operation("embedding", forward, results, count=1)


def embedding(table, tokens, scale, dtype):
    """Rows of a table [V, D] for integers [B], times a number: [B, D] of the dtype of a name."""
    return _embedding(table, tokens, scale=float(scale), dtype=dtype)
