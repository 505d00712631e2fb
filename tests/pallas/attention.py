"""Attention's kernels for `targets`: they take documents' numbers where others take token kinds."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Row(NamedTuple):
    batch: int
    length: int
    heads: int  # of queries; all share one of keys
    size: int
    window: int


ROWS = {
    "sliding_window_attention/griffin_1.3b": Row(4, 2048, 16, 128, 1024),
    "sliding_window_attention/recurrentgemma_2b": Row(2, 4096, 10, 256, 2049),
}


def splits(name, chips):
    """Whether so many chips split the heads of queries evenly."""
    return ROWS[name].heads % chips == 0


def arguments(name, mesh, dtype):
    """What forward takes, and what backward takes: flat, as models make them."""
    batch, length, heads, size, _ = ROWS[name]

    def array(shape, dtype, *spec):
        sharding = jax.NamedSharding(mesh, jax.P("batch", *spec))
        return jax.ShapeDtypeStruct((batch, *shape), dtype, sharding=sharding)

    q = array((length, heads * size), dtype, None, "model")
    k = v = array((length, size), dtype)
    documents = array((length,), "int32")
    given = [q, k, v, documents, documents]
    return given, [*given, *2 * [array((heads, length), "float32", "model")], q]


def function(name, direction, module):
    """A kernel, of tensors as models make them."""
    _, _, heads, size, window = ROWS[name]
    options = {"window": window, "dtype": jnp.float32}

    def parted(q, k, v, *documents):
        q = q.reshape(*q.shape[:2], 1, heads, size)
        return q, k[:, :, None], v[:, :, None], *documents

    def forward(*given):
        output, sums = module.forward(*parted(*given), **options)
        return flat(output), *(jnp.swapaxes(x[:, :, 0], 1, 2) for x in sums)

    def backward(*given):
        *tensors, largest, sum_at_largest, d_output = given
        sums = tuple(jnp.swapaxes(x, 1, 2)[:, :, None] for x in (largest, sum_at_largest))
        d_output = d_output.reshape(*d_output.shape[:2], 1, heads, size)
        gradients = module.backward(*parted(*tensors), sums, d_output, **options)
        return [flat(d).astype(d_output.dtype) for d in gradients]

    def flat(x):
        return x.reshape(*x.shape[:2], -1)

    return {"forward": forward, "backward": backward}[direction]
