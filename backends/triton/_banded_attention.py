"""Softmax attention of queries to a range of keys each, tile by tile: launches and their tiles.

q: [B, T, H, K]; k: [B, S, G, K]; v: [B, S, G, V]. Query t sees the keys from first_key[t] to
last_key[t], int32 [B, T], neither of which decreases along a row. Where those are None, S is T, and
a query sees the `window` keys up to its own. Queries that `token_kind` marks as padding count as 0.

The heads of queries that share a head of keys are rows of one matrix, token after token, so a tile
loads each key once for all of them. Tiles of keys that no query of a tile sees are not loaded.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from keras_recurrent.backends.triton import _search
from keras_recurrent.backends.triton._attention_kernels import (
    forward_kernel,
    keys_kernel,
    queries_kernel,
)
from keras_recurrent.backends.triton._common import MULTIPROCESSORS

_MANY_PROGRAMS = 2 * MULTIPROCESSORS


class VisibleKeys(NamedTuple):
    """Which keys queries see: `window` of them, or those from `first_key` to `last_key`."""

    token_kind: torch.Tensor | None
    first_key: torch.Tensor | None
    last_key: torch.Tensor | None
    window: int

    def queries_of_keys(self, length):
        """The first query that sees each key, and the first one after that which does not, [B, S].

        Nones if the window alone decides.
        """
        if self.first_key is None or self.last_key is None:
            return None, None
        key = torch.arange(length, device=self.first_key.device, dtype=torch.int32)
        key = key.expand(self.first_key.shape[0], length).contiguous()
        return (
            torch.searchsorted(self.last_key, key, out_int32=True),
            torch.searchsorted(self.first_key, key, right=True, out_int32=True),
        )


class Tiles(NamedTuple):
    """Rows of queries and keys in the tiles of a program, and its launch options."""

    ROWS: int
    KEYS: int
    num_warps: int
    num_stages: int


# Candidates for each result, by the bits of the dtype of products, the default first. That is what
# just fits into the registers and the shared memory of a multiprocessor of Hopper.
_NARROW = {  # heads of up to 128 channels
    "output": {
        16: (
            *(Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 2)),
            *(Tiles(128, 128, 8, 2), Tiles(64, 64, 4, 2)),
        ),
        32: (Tiles(32, 32, 8, 1), Tiles(32, 32, 4, 1), Tiles(16, 32, 4, 1)),
    },
    "d_q": {
        16: (
            *(Tiles(128, 64, 8, 2), Tiles(128, 32, 8, 3)),
            *(Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 3)),
        ),
        32: (Tiles(16, 32, 4, 1), Tiles(32, 32, 8, 1), Tiles(32, 32, 4, 1)),
    },
    "d_k, d_v": {
        16: (
            *(Tiles(64, 128, 8, 2), Tiles(32, 128, 8, 3), Tiles(32, 128, 8, 2)),
            *(Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 3)),
        ),
        32: (Tiles(32, 32, 8, 1), Tiles(16, 32, 4, 1), Tiles(32, 16, 4, 1)),
    },
}
_WIDE = {
    "output": {
        16: (
            *(Tiles(128, 64, 8, 2), Tiles(128, 32, 8, 3)),
            *(Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 2)),
        ),
        32: (Tiles(16, 32, 8, 1), Tiles(16, 32, 4, 1), Tiles(16, 16, 4, 1)),
    },
    "d_q": {
        16: (
            *(Tiles(128, 32, 8, 3), Tiles(128, 32, 8, 2)),
            *(Tiles(64, 32, 4, 3), Tiles(64, 32, 4, 2)),
        ),
        32: (Tiles(16, 16, 8, 1),),
    },
    "d_k": {
        16: (Tiles(32, 128, 8, 3), Tiles(32, 128, 8, 2), Tiles(32, 64, 4, 2)),
        32: (Tiles(16, 16, 8, 1), Tiles(32, 16, 8, 1)),
    },
    "d_v": {
        16: (Tiles(32, 128, 8, 3),),
        32: (Tiles(16, 16, 8, 1), Tiles(32, 16, 8, 1)),
    },
}


def candidates(result, keys, values, dtype):
    """The candidates for a result, with heads of `keys` and `values` channels."""
    table = _WIDE if _is_wide(keys, values) else _NARROW
    return table[result][dtype.primitive_bitwidth]


def _results_of_keys(keys, values):
    """The results of `keys_kernel`: for wide heads, two launches."""
    return ("d_k", "d_v") if _is_wide(keys, values) else ("d_k, d_v",)


def _is_wide(keys, values):
    return max(keys, values) > 128


def constants(share, keys, values, dtype):
    """The constants of all kernels, where `share` heads of queries share a head of keys."""
    return {
        "SHARE": share,
        "K": keys,
        "V": values,
        "BLOCK_K": max(16, triton.next_power_of_2(keys)),
        "BLOCK_V": max(16, triton.next_power_of_2(values)),
        "TYPE": dtype,
    }


def _dtype(*tensors):
    """The dtype of the operands of products: 16 bits if all tensors share one of those."""
    dtypes = {x.dtype for x in tensors}
    if dtypes == {torch.bfloat16}:
        return tl.bfloat16
    return tl.float16 if dtypes == {torch.float16} else tl.float32


def forward(q, k, v, visible):
    """Returns [B, T, H, V] in q's dtype, and what `backward` needs to know (`new_kept`)."""
    output = q.new_empty(*q.shape[:3], v.shape[3])
    kept = new_kept(q, k, v)
    _by_queries("output", forward_kernel, q, k, v, visible, output, *_nones_for_empty(kept))
    return output, kept


def new_kept(q, k, v):
    """Room for `rest`, `origin` and `total`, which `_attention_kernels` explains.

    The rest is empty if the output is float32, the total if products are of 16 bits.
    """
    queries = q.shape[:3]
    rest = 0 if q.dtype == torch.float32 else (*queries, v.shape[3])
    total = queries if _dtype(q, k, v).is_fp32() else 0
    return (
        q.new_empty(rest, dtype=torch.int8),
        q.new_empty(queries, dtype=torch.float32),
        q.new_empty(total, dtype=torch.float32),
    )


def _nones_for_empty(kept):
    return [x if x.numel() else None for x in kept]


def backward(d_output, d_rings, output, kept, q, k, v, visible, position, end):
    """Returns the gradients of q, k and v, in a list, the last two perhaps in float32.

    kept: what `forward` returned with the output.
    d_rings: the gradients of the final state's keys and values, [B, C, G, ...]. position, end: see
    `_ring`.
    """
    rest, origin, total = _nones_for_empty(kept)
    d_q, delta = torch.empty_like(q), torch.empty_like(origin)
    tensors = output, rest, origin, total, d_output, d_q, delta
    _by_queries("d_q", queries_kernel, q, k, v, visible, *tensors)

    length, heads = q.shape[1:3]
    batch, places, groups, _ = k.shape
    queries = visible.queries_of_keys(places)

    def launch(results, options):
        programs = batch * groups * triton.cdiv(places, options["KEYS"])
        parts = _parts(heads // groups, programs)
        options["SHARE"] //= parts
        d_keys, d_values = (
            x.new_empty(parts, *x.shape, dtype=torch.float32 if parts > 1 else x.dtype)
            if name in results
            else None
            for name, x in (("d_k", k), ("d_v", v))
        )
        keys_kernel[(programs * parts,)](
            q,
            k,
            v,
            *visible[:3],
            *queries,
            origin,
            total,
            d_output,
            delta,
            *d_rings,
            position,
            end,
            d_keys,
            d_values,
            length,
            places,
            groups,
            visible.window,
            d_rings[0].shape[1],
            parts,
            **options,
        )
        gradients = (d for d in (d_keys, d_values) if d is not None)
        return [d.sum(0) if parts > 1 else d[0] for d in gradients]

    d_q_k_v = [d_q]
    for results in _results_of_keys(k.shape[3], v.shape[3]):
        d_q_k_v += _run(results, functools.partial(launch, results), q, k, v, visible)
    return d_q_k_v


def _by_queries(result, kernel, q, k, v, visible, *tensors):
    batch, length = q.shape[:2]
    places, groups = k.shape[1:3]
    numbers = length, places, groups, visible.window

    def launch(options):
        grid = (batch * groups * triton.cdiv(length * options["SHARE"], options["ROWS"]),)
        kernel[grid](q, k, v, *visible[:3], *tensors, *numbers, **options)

    _run(result, launch, q, k, v, visible)


def _run(result, launch, q, k, v, visible):
    """What `launch` returns, with the constants and options of the kernel for a result."""
    batch, length, heads, keys = q.shape
    _, places, groups, values = v.shape
    dtype = _dtype(q, k, v)
    fixed = constants(heads // groups, keys, values, dtype)
    return _search.run(
        f"sliding_window_attention {result}",
        candidates(result, keys, values, dtype),
        lambda tiles: launch({**fixed, **tiles._asdict()}),
        (q, k, v, visible.first_key, visible.token_kind),
        {
            "batch": batch,
            "length": length,
            "places": places,
            "window": visible.window,
            "heads": heads,
            "groups": groups,
            "keys": keys,
            "values": values,
        },
    )


def _parts(share, programs):
    """Into how many parts to split the `share` heads that share keys, so that programs suffice."""
    enough = (n for n in range(1, share) if share % n == 0 and n * programs >= _MANY_PROGRAMS)
    return next(enough, share)
