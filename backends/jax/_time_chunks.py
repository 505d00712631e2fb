"""A long sequence in chunks, one after the other, so that what lies between them stays small.

Left whole, every intermediate of an operation would be as large as its arguments: written to
memory and read back, and on a CPU made of pages that the system first has to hand out.
"""

import functools

import jax.numpy as jnp
from jax import lax

LEAST = 32  # tokens; a chunk of fewer would be all overhead
# Of one tensor's chunk. On a CPU it is to stay in the second-level cache. On a GPU chunks cost time
# (an H200 takes 0.30 ms for a scan of 8 x 2048 x 2560 at once, 0.62 ms in chunks of 2**22), and are
# there to bound the memory of the longest sequences.
ELEMENTS = {"cpu": 2**16, "default": 2**26}


def over_chunks(step, carry, tensors, reverse=False, least=LEAST):
    """Cut tensors along time, and join what `step` makes of each chunk.

    Args:
        step: a function of `carry`, `start` and the chunks [B, C, ...] of the tensors, which
            returns the next carry and a tuple of outputs [B, C, ...]. `start` is where the chunk
            begins: 0, or an index that may be known at run time only.
        carry: what the first step gets.
        tensors: a tuple of tensors [B, T, ...]; one may be None, and so are its chunks.
        reverse: from the last chunk to the first.
        least: tokens that a chunk must have at least, if there is more than one.

    Returns:
        `(carry, outputs)`, the outputs [B, T, D].
    """
    runs = {
        platform: functools.partial(_run, step, reverse, max(least, LEAST, _tokens(tensors, limit)))
        for platform, limit in ELEMENTS.items()
    }
    if tensors[0].shape[1] < 2 * runs["cpu"].args[-1]:
        return step(carry, 0, *tensors)
    return lax.platform_dependent(carry, tensors, **runs)


def before(x, start, first):
    """The N elements of x [B, T, ...] before a chunk; `first` [B, N, ...] before the first one."""
    if isinstance(start, int) and start == 0:
        return first
    found = lax.dynamic_slice_in_dim(x, start - first.shape[1], first.shape[1], axis=1)
    return jnp.where(start == 0, first, found.astype(first.dtype))


def _tokens(tensors, elements):
    x = tensors[0]
    return elements // max(1, x.size // x.shape[1])


def _run(step, reverse, size, carry, tensors):
    length = tensors[0].shape[1]
    more = length // size - 1
    if more < 1:
        return step(carry, 0, *tensors)

    def at(carry, start, size):
        cut = functools.partial(
            lax.dynamic_slice_in_dim, start_index=start, slice_size=size, axis=1
        )
        return step(carry, start, *[t if t is None else cut(t) for t in tensors])

    # The first step takes what the division leaves over, too.
    rest = length - more * size
    start = length - rest if reverse else 0
    carry, parts = at(carry, start, rest)
    around = [(0, 0, 0), (start, length - rest - start, 0)]
    outputs = tuple(lax.pad(p, jnp.zeros((), p.dtype), [*around, (0, 0, 0)]) for p in parts)

    def body(k, loop):
        carry, outputs = loop
        start = (more - 1 - k) * size if reverse else rest + k * size
        carry, parts = at(carry, start, size)
        put = functools.partial(lax.dynamic_update_slice_in_dim, start_index=start, axis=1)
        return carry, tuple(put(o, p) for o, p in zip(outputs, parts, strict=True))

    return lax.fori_loop(0, more, body, (carry, outputs))
