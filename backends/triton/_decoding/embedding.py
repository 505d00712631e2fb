"""The embeddings of a few tokens, as they enter a step of generation, and where rows are then.

torch and Keras look a token up by seven launches: they cast it, take negative ones from the end,
gather rows, which takes long for 16 of them, and multiply by the scale. Three and four more find
whether a document starts, and what the state says of the places of rows after the token. It is
written over where it may be.
"""

import triton
import triton.language as tl

from .._device.pdl import launch_dependents, wait_for_previous_launch
from .._device.tokens import GOES_ON, STARTS
from .._runtime.framework import forward_operation, pdl_options, run, step_unsupported_reason
from .._runtime.launch import Array, Launch

_BLOCK, _WARPS = 512, 4  # channels of a program


def unsupported(table, tokens, segment=None, position=None) -> str | None:
    """Reason why this implementation cannot take these arguments, or None."""
    return step_unsupported_reason(table, tokens, segment, position)


@triton.jit
def _kernel(
    table,
    tokens,
    segment,
    position,
    y,
    kind,
    here,
    next_segment,
    next_position,
    V,
    multiplier,
    D: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        launch_dependents()
        wait_for_previous_launch()
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
    one = tl.program_id(0) % TILES == 0
    if segment is not None:
        document = tl.load(segment + row)
        tl.store(kind + row, tl.where(document < 0, STARTS, GOES_ON).to(tl.int8), one)
        tl.store(next_segment + row, tl.maximum(document, 0), one)
    if position is not None:
        place = tl.load(position + row)
        tl.store(here + row, place, one)
        tl.store(next_position + row, place + 1, one)


def results(table, tokens, segment, position, *, scale: float, dtype: str):
    rows = tokens.shape[0]

    def of_rows(given, name):
        return None if given is None else Array((rows,), name)

    y = Array((rows, table.shape[1]), dtype)
    here = of_rows(segment, "int8"), of_rows(position, "int32")
    return y, *here, of_rows(segment, "int32"), of_rows(position, "int32")


def forward(table, tokens, segment, position, *, scale: float, dtype: str):
    vocabulary, width = table.shape
    block = min(_BLOCK, triton.next_power_of_2(width))
    options = {"D": width, "SCALED": scale != 1.0, "BLOCK": block, "num_warps": _WARPS}
    inputs = table, tokens, segment, position
    outputs = results(*inputs, scale=scale, dtype=dtype)
    programs = tokens.shape[0] * triton.cdiv(width, block)
    # The first launch of a step: its dependents may start early, but it has no launch to overlap.
    options |= {"PDL": pdl_options(table)["PDL"]}
    numbers = vocabulary, scale
    updates = tuple((i, i + 1) for i in (2, 3) if inputs[i] is not None)
    return run(Launch(_kernel, programs, inputs, outputs, numbers, options, updates))


_embedding = forward_operation(
    "embedding", forward, results, count=5, updates=("segment", "position")
)


def embedding(table, tokens, scale, dtype, segment=None, position=None):
    """Rows of a table [V, D] for integers [B], times a number: [B, D] of the dtype of a name.

    Also what each token is, int8 [B], and where, int32 [B], and the segment and the position of the
    next one, for the segment of the token before and the position of this one, int32 [B]; None
    where these are. The next ones may be written over them: see `backends/torch/_states.py`.
    """
    found = _embedding(table, tokens, segment, position, scale=float(scale), dtype=dtype)
    given = table, segment, position, segment, position
    return tuple(None if of is None else t for t, of in zip(found, given, strict=True))
