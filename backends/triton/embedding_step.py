"""Token embeddings of a decoding step, with the token's kind and position and the next state.

torch and Keras look a token up by seven launches: they cast it, take negative ids from the end,
gather rows, which is slow for 16 of them, and multiply by the scale. Three and four more launches
find out whether a document starts, and the segment and position of the state after the token. One
kernel does all of this. The state is overwritten where that is allowed.
"""

import triton
import triton.language as tl

from ..kernel import as_kernel
from ._device.pdl import launch_dependents, wait_for_previous_launch
from ._device.tokens import CONTINUES, STARTS
from ._runtime.framework import decoding_step, pdl_options, run
from ._runtime.launch import Array, Launch, cdiv, next_power_of_2

_BLOCK, _WARPS = 512, 4  # channels and warps of a program


@triton.jit
def _kernel(
    table,
    tokens,
    segment,
    position,
    y,
    kind,
    current_position,
    next_segment,
    next_position,
    V,
    multiplier,
    D: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    wait_for_previous_launch(PDL)
    TILES: tl.constexpr = (D + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // TILES).to(tl.int64)
    d = tl.program_id(0) % TILES * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + row).to(tl.int64)
    token = tl.where(token < 0, token + V, token)
    value = tl.load(table + token * D + d, d < D, other=0.0).to(y.dtype.element_ty)
    if SCALED:
        # The factor is first rounded to the dtype of the embeddings, as torch does on GPUs.
        factor = (tl.zeros((BLOCK,), tl.float32) + multiplier).to(y.dtype.element_ty)
        value = value.to(tl.float32) * factor.to(tl.float32)
    tl.store(y + row * D + d, value, d < D)
    first_tile = tl.program_id(0) % TILES == 0
    if segment is not None:
        document = tl.load(segment + row)
        tl.store(kind + row, tl.where(document < 0, STARTS, CONTINUES).to(tl.int8), first_tile)
        tl.store(next_segment + row, tl.maximum(document, 0), first_tile)
    if position is not None:
        row_position = tl.load(position + row)
        tl.store(current_position + row, row_position, first_tile)
        tl.store(next_position + row, row_position + 1, first_tile)


def results(table, tokens, segment, position, scale, dtype):
    rows = tokens.shape[0]

    def per_row(given, name):
        return None if given is None else Array((rows,), name)

    y = Array((rows, table.shape[1]), dtype)
    current = per_row(segment, "int8"), per_row(position, "int32")
    return y, *current, per_row(segment, "int32"), per_row(position, "int32")


@decoding_step(None, results, count=5, updates=("segment", "position"), on_jax=False)
def embedding(table, tokens, segment, position, scale: float, dtype: str):
    vocabulary, width = table.shape
    block = min(_BLOCK, next_power_of_2(width))
    options = {"D": width, "SCALED": scale != 1.0, "BLOCK": block, "num_warps": _WARPS}
    inputs = table, tokens, segment, position
    outputs = results(*inputs, scale, dtype)
    programs = tokens.shape[0] * cdiv(width, block)
    # The first launch of a step: its dependents may start early, it does not start early itself.
    options |= {"PDL": pdl_options(table)["PDL"]}
    numbers = vocabulary, scale
    updates = tuple((i, i + 1) for i in (2, 3) if inputs[i] is not None)
    return run(Launch(_kernel, programs, inputs, outputs, numbers, options, updates))


@as_kernel(embedding.unsupported)
def embedding_step(table, token_ids, segment=None, position=None, scale=1.0, dtype="float32"):
    arrays = embedding(table, token_ids, segment, position, scale=float(scale), dtype=dtype)
    arguments = table, segment, position, segment, position
    return tuple(
        None if argument is None else t for t, argument in zip(arrays, arguments, strict=True)
    )
