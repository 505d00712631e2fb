"""Softmax attention of a row of queries to the keys before them, tile by tile.

q: [B, T, H, K]; k: [B, S, G, K]; v: [B, S, G, V]. Query t sees the keys from first_key[t] to
last_key[t], int32 [B, T], which rise along a row; where those are None, S is T, and it sees the
`window` keys up to its own. Padding, by `token_kind`, is queries of 0, whatever they hold.

The heads of queries that share a head of keys are rows of one matrix, token after token: a tile of
few tokens meets each key once for all of them. Tiles of keys that no row of it sees are not even
read.
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

_MANY_PROGRAMS = 256  # about two for each multiprocessor of a large GPU


class Sight(NamedTuple):
    """Which keys queries see: `window` of them, or those from `first_key` to `last_key`."""

    token_kind: torch.Tensor | None
    first_key: torch.Tensor | None
    last_key: torch.Tensor | None
    window: int

    def of_keys(self, length):
        """From which query on a key is seen, and before which no more; Nones if by the window."""
        if self.first_key is None or self.last_key is None:
            return None, None
        key = torch.arange(length, device=self.first_key.device, dtype=torch.int32)
        key = key.expand(self.first_key.shape[0], length).contiguous()
        return (
            torch.searchsorted(self.last_key, key, out_int32=True),
            torch.searchsorted(self.first_key, key, right=True, out_int32=True),
        )


class Tiles(NamedTuple):
    """ROWS of queries meet KEYS."""

    ROWS: int
    KEYS: int
    num_warps: int
    num_stages: int


# What may be the fastest for each result, the default first, which is as much as fits into the
# registers and the shared memory of a multiprocessor of Hopper: for 16 bits, and for float32.
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
    """Those for a result, of heads of `keys` and `values` channels."""
    table = _WIDE if _is_wide(keys, values) else _NARROW
    return table[result][dtype.primitive_bitwidth]


def _found_by_keys(keys, values):
    """What `keys_kernel` finds in one go each."""
    return ("d_k", "d_v") if _is_wide(keys, values) else ("d_k, d_v",)


def _is_wide(keys, values):
    return max(keys, values) > 128


def constants(share, keys, values, dtype):
    """Those of all kernels, for `share` heads of queries in a tile."""
    return {
        "SHARE": share,
        "K": keys,
        "V": values,
        "BLOCK_K": max(16, triton.next_power_of_2(keys)),
        "BLOCK_V": max(16, triton.next_power_of_2(values)),
        "TYPE": dtype,
    }


def _dtype(*tensors):
    """In which products are taken: that of the tensors if they share one of 16 bits."""
    dtypes = {x.dtype for x in tensors}
    if dtypes == {torch.bfloat16}:
        return tl.bfloat16
    return tl.float16 if dtypes == {torch.float16} else tl.float32


def forward(q, k, v, sight):
    """Returns [B, T, H, V] in q's dtype and the logarithms of the softmax's sums, [B, T, H]."""
    output = q.new_empty(*q.shape[:3], v.shape[3])
    log_total = q.new_empty(q.shape[:3], dtype=torch.float32)
    _by_queries("output", forward_kernel, q, k, v, sight, output, log_total)
    return output, log_total


def backward(d_output, d_rings, output, log_total, q, k, v, sight, position, end):
    """Returns the gradients of q, k and v, in a list, the last two perhaps in float32.

    d_rings: those of the keys and values [B, C, G, ...] that are kept; position, end: see `_ring`.
    """
    d_q, slope = torch.empty_like(q), torch.empty_like(log_total)
    _by_queries("d_q", queries_kernel, q, k, v, sight, output, log_total, d_output, d_q, slope)

    length, heads = q.shape[1:3]
    batch, places, groups, _ = k.shape
    seen = sight.of_keys(places)

    def launch(wanted, options):
        programs = batch * groups * triton.cdiv(places, options["KEYS"])
        parts = _parts(heads // groups, programs)
        options["SHARE"] //= parts
        d_keys, d_values = (
            x.new_empty(parts, *x.shape, dtype=torch.float32 if parts > 1 else x.dtype)
            if name in wanted
            else None
            for name, x in (("d_k", k), ("d_v", v))
        )
        keys_kernel[(programs * parts,)](
            q,
            k,
            v,
            *sight[:3],
            *seen,
            log_total,
            d_output,
            slope,
            *d_rings,
            position,
            end,
            d_keys,
            d_values,
            length,
            places,
            groups,
            sight.window,
            d_rings[0].shape[1],
            parts,
            **options,
        )
        found = (d for d in (d_keys, d_values) if d is not None)
        return [d.sum(0) if parts > 1 else d[0] for d in found]

    d_q_k_v = [d_q]
    for wanted in _found_by_keys(k.shape[3], v.shape[3]):
        d_q_k_v += _run(wanted, functools.partial(launch, wanted), q, k, v, sight)
    return d_q_k_v


def _by_queries(result, kernel, q, k, v, sight, *tensors):
    batch, length = q.shape[:2]
    places, groups = k.shape[1:3]
    numbers = length, places, groups, sight.window

    def launch(options):
        grid = (batch * groups * triton.cdiv(length * options["SHARE"], options["ROWS"]),)
        kernel[grid](q, k, v, *sight[:3], *tensors, *numbers, **options)

    _run(result, launch, q, k, v, sight)


def _run(result, launch, q, k, v, sight):
    """What `launch` returns, given the constants and options of a kernel for a result."""
    batch, length, heads, keys = q.shape
    _, places, groups, values = v.shape
    dtype = _dtype(q, k, v)
    fixed = constants(heads // groups, keys, values, dtype)
    return _search.run(
        f"sliding_window_attention {result}",
        candidates(result, keys, values, dtype),
        lambda tiles: launch({**fixed, **tiles._asdict()}),
        (q, k, v, sight.first_key, sight.token_kind),
        {
            "batch": batch,
            "length": length,
            "places": places,
            "window": sight.window,
            "heads": heads,
            "groups": groups,
            "keys": keys,
            "values": values,
        },
    )


def _parts(share, programs):
    """Into how many parts `share` heads go that share keys, where programs are too few."""
    enough = (n for n in range(1, share) if share % n == 0 and n * programs >= _MANY_PROGRAMS)
    return next(enough, share)
