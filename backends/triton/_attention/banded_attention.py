"""Softmax attention in which each query sees a range of keys: launches and tile sizes.

q: [B, T, H, K]; k: [B, S, G, K]; v: [B, S, G, V]. Query t sees the keys from first_key[t] to
last_key[t], int32 [B, T], neither of which decreases along a sequence. If they are None, S is T,
and a query sees the `window` keys up to its own. Queries that `token_kind` marks as padding are 0.

Query heads that share a key head are rows of one matrix, token after token, so a tile loads each
key once for all of them. Tiles of keys that are invisible to a tile of queries are not loaded.
"""

import functools
from typing import Any, NamedTuple

import triton.language as tl

from .._device.common import MULTIPROCESSORS, Constants
from .._runtime import search
from .._runtime.framework import run, search_sorted_rows
from .._runtime.launch import Array, Launch, candidates_of, cdiv, dtype_name, like, next_power_of_2
from .attention_kernels import forward_kernel, keys_kernel, queries_kernel

_MANY_PROGRAMS = 2 * MULTIPROCESSORS


class VisibleKeys(NamedTuple):
    """The range of keys that each query sees: a `window`, or from `first_key` to `last_key`."""

    token_kind: Any
    first_key: Any
    last_key: Any
    window: int

    def queries_of_keys(self, length):
        """The first query that sees each key, and the first later one that does not, [B, S].

        (None, None) if only the window matters.
        """
        if self.first_key is None or self.last_key is None:
            return None, None
        return (
            search_sorted_rows(self.last_key, length),
            search_sorted_rows(self.first_key, length, right=True),
        )


class AttentionTile(NamedTuple):
    """The constants of a program; `SHARE` query heads share a key head."""

    SHARE: int
    K: int
    V: int
    BLOCK_K: int
    BLOCK_V: int
    ROWS: int
    KEYS: int
    TYPE: Any  # dtype of operands


class Tiles(NamedTuple):
    """Rows of queries and keys in the tiles of a program, and its launch options."""

    ROWS: int
    KEYS: int
    num_warps: int
    num_stages: int


_tiles = candidates_of(Tiles)
# Candidates for each result, by the bits of the products' dtype, the default first: it just fits
# into the registers and shared memory of a Hopper multiprocessor.
_NARROW = {  # heads of up to 128 channels
    "output": {
        16: _tiles((128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 2)),
        32: _tiles((32, 32, 8, 1), (32, 32, 4, 1), (16, 32, 4, 1)),
    },
    "d_q": {
        16: _tiles((128, 64, 8, 2), (128, 32, 8, 3), (64, 64, 4, 2), (64, 32, 4, 3)),
        32: _tiles((16, 32, 4, 1), (32, 32, 8, 1), (32, 32, 4, 1)),
    },
    "d_k, d_v": {
        16: _tiles(
            (64, 128, 8, 2), (32, 128, 8, 3), (32, 128, 8, 2), (64, 64, 4, 2), (32, 64, 4, 3)
        ),
        32: _tiles((32, 32, 8, 1), (16, 32, 4, 1), (32, 16, 4, 1)),
    },
}
_WIDE = {
    "output": {
        16: _tiles((128, 64, 8, 2), (128, 32, 8, 3), (64, 64, 4, 2), (64, 32, 4, 2)),
        32: _tiles((16, 32, 8, 1), (16, 32, 4, 1), (16, 16, 4, 1)),
    },
    "d_q": {
        16: _tiles((128, 32, 8, 3), (128, 32, 8, 2), (64, 32, 4, 3), (64, 32, 4, 2)),
        32: _tiles((16, 16, 8, 1)),
    },
    "d_k": {
        16: _tiles((32, 128, 8, 3), (32, 128, 8, 2), (32, 64, 4, 2)),
        32: _tiles((16, 16, 8, 1), (32, 16, 8, 1)),
    },
    "d_v": {
        16: _tiles((32, 128, 8, 3)),
        32: _tiles((16, 16, 8, 1), (32, 16, 8, 1)),
    },
}


def candidates(result, keys, values, dtype):
    """The candidates for a result, with heads of `keys` and `values` channels."""
    table = _WIDE if _is_wide(keys, values) else _NARROW
    return table[result][dtype.primitive_bitwidth]


def _key_results(keys, values):
    """The results of each launch of `keys_kernel`: wide heads need two launches."""
    return ("d_k", "d_v") if _is_wide(keys, values) else ("d_k, d_v",)


def _is_wide(keys, values):
    return max(keys, values) > 128


def attention_tile(tiles, share, keys, values, dtype):
    """The `AttentionTile` with the rows of `tiles`."""
    block_k, block_v = (max(16, next_power_of_2(size)) for size in (keys, values))
    return AttentionTile(share, keys, values, block_k, block_v, tiles.ROWS, tiles.KEYS, dtype)


def _dtype(*tensors):
    """The dtype of operands of products: a 16-bit one if all tensors have it, else float32."""
    dtypes = {dtype_name(x) for x in tensors}
    if dtypes == {"bfloat16"}:
        return tl.bfloat16
    return tl.float16 if dtypes == {"float16"} else tl.float32


def results(q, k, v):
    """`Array`s of the output [B, T, H, V] and of the residuals `rest`, `origin` and `total`.

    `attention_kernels.py` explains them. `rest` is None if the output is float32, `total` is None
    with 16-bit products.
    """
    queries = tuple(q.shape[:3])
    output = Array((*queries, v.shape[3]), dtype_name(q))
    sums = Array(queries, "float32")
    rest = None if output.dtype == "float32" else output.astype("int8")
    return output, rest, sums, sums if _dtype(q, k, v).is_fp32() else None


def forward(q, k, v, visible):
    """Returns the arrays that `results` describes."""
    return _run_query_kernel("output", forward_kernel, q, k, v, visible, (), results(q, k, v))


def backward(d_output, d_buffers, output, residuals, q, k, v, visible, position=None, end=None):
    """Returns the gradients of q, k and v, in a list, the last two possibly in float32.

    residuals: the arrays that `forward` returned after the output.
    d_buffers: the gradients of the final state's keys and values, [B, C, G, ...], or Nones.
    position, end: see `circular_buffer.py`.
    """
    _, origin, total = residuals
    inputs, outputs = (output, *residuals, d_output), (like(q), like(origin))
    d_q, delta = _run_query_kernel("d_q", queries_kernel, q, k, v, visible, inputs, outputs)

    length, heads = q.shape[1:3]
    batch, num_positions, groups, _ = k.shape
    inputs = visible[:3], visible.queries_of_keys(num_positions), origin, total, d_output, delta
    has_buffers = d_buffers[0] is not None
    inputs = q, k, v, *inputs, (*d_buffers, position, end) if has_buffers else None
    capacity = d_buffers[0].shape[1] if has_buffers else 0

    def launch(results, tile, options):
        programs = batch * groups * cdiv(num_positions, tile.KEYS)
        parts = _num_parts(heads // groups, programs)
        tile = tile._replace(SHARE=tile.SHARE // parts)
        outputs = [
            Array((parts, *x.shape), "float32" if parts > 1 else dtype_name(x))
            if name in results
            else None
            for name, x in (("d_k", k), ("d_v", v))
        ]
        numbers = length, num_positions, groups, visible.window, capacity, parts
        options["TILE"] = Constants(tile)
        programs *= parts
        arrays = run(Launch(keys_kernel, programs, inputs, tuple(outputs), numbers, options))
        return [d.sum(0) if parts > 1 else d[0] for d in arrays if d is not None]

    d_q_k_v = [d_q]
    for results in _key_results(k.shape[3], v.shape[3]):
        d_q_k_v += _run_search(results, functools.partial(launch, results), q, k, v, visible)
    return d_q_k_v


def _run_query_kernel(result, kernel, q, k, v, visible, inputs, outputs):
    batch, length = q.shape[:2]
    num_positions, groups = k.shape[1:3]
    inputs = q, k, v, visible[:3], *inputs
    numbers = length, num_positions, groups, visible.window

    def launch(tile, options):
        programs = batch * groups * cdiv(length * tile.SHARE, tile.ROWS)
        options["TILE"] = Constants(tile)
        return run(Launch(kernel, programs, inputs, outputs, numbers, options))

    return _run_search(result, launch, q, k, v, visible)


def _run_search(result, launch, q, k, v, visible):
    """Calls `launch` with the chosen tile of the kernel for a result, and its launch options."""
    batch, length, heads, keys = q.shape
    _, num_positions, groups, values = v.shape
    dtype = _dtype(q, k, v)

    def launch_tile(tiles):
        options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
        return launch(attention_tile(tiles, heads // groups, keys, values, dtype), options)

    sizes = {"batch": batch, "length": length, "positions": num_positions, "window": visible.window}
    sizes |= {"heads": heads, "groups": groups, "keys": keys, "values": values}
    tensors, name = (q, k, v, visible.first_key, visible.token_kind), "sliding_window_attention"
    tiles = candidates(result, keys, values, dtype)
    return search.run(f"{name} {result}", tiles, launch_tile, tensors, sizes)


def _num_parts(share, programs):
    """Number of parts into which `share` query heads are split, so that programs fill the GPU."""
    sufficient = (n for n in range(1, share) if share % n == 0 and n * programs >= _MANY_PROGRAMS)
    return next(sufficient, share)
