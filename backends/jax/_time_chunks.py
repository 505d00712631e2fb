"""Scans long sequences chunk by chunk, to keep temporaries small.

Computed at once, every temporary would be as large as the arguments: it would be written to memory
and read back, and on a CPU its pages would first have to be allocated.
"""

import functools

import jax.numpy as jnp
from jax import lax

MIN_TOKENS = 32  # in a chunk; with fewer, the overhead of a step would dominate
# Number of elements of a tensor in a chunk. On a CPU the chunk should fit the second-level cache.
# On a GPU chunks cost time (an H200 takes 0.30 ms for a scan of 8 x 2048 x 2560 at once, 0.62 ms in
# chunks of 2**22), and only bound the memory of the longest sequences.
ELEMENTS = {"cpu": 2**16, "default": 2**26}


def scan_chunks(step, carry, tensors, reverse=False, min_tokens=MIN_TOKENS):
    """Calls `step` for each chunk of the tensors along time, and concatenates its outputs.

    Args:
        step: a function of `carry`, `start` and the chunks [B, C, ...] of the tensors, which
            returns the next carry and a tuple of outputs [B, C, ...]. `start` is the index of the
            chunk's first token: the integer 0, or a traced integer.
        carry: the carry of the first step.
        tensors: a tuple of tensors [B, T, ...], some of them None, whose chunks are None too.
        reverse: boolean, scans from the last chunk to the first.
        min_tokens: integer, the smallest number of tokens in one of several chunks.

    Returns:
        `(carry, outputs)`, the outputs [B, T, D].
    """
    runs = {
        platform: functools.partial(
            _run, step, reverse, max(min_tokens, MIN_TOKENS, _tokens(tensors, limit))
        )
        for platform, limit in ELEMENTS.items()
    }
    if tensors[0].shape[1] < 2 * runs["cpu"].args[-1]:
        return step(carry, 0, *tensors)
    return lax.platform_dependent(carry, tensors, **runs)


def elements_before(x, start, first):
    """The last N elements of x [B, T, ...] before `start`; `first` [B, N, ...] if `start` is 0."""
    if isinstance(start, int) and start == 0:
        return first
    found = lax.dynamic_slice_in_dim(x, start - first.shape[1], first.shape[1], axis=1)
    return jnp.where(start == 0, first, found.astype(first.dtype))


def _tokens(tensors, elements):
    """The number of tokens of the first tensor that have this number of elements."""
    x = tensors[0]
    return elements // max(1, x.size // x.shape[1])


def _run(step, reverse, size, carry, tensors):
    length = tensors[0].shape[1]
    full_chunks = length // size - 1
    if full_chunks < 1:
        return step(carry, 0, *tensors)

    def step_at(carry, start, size):
        cut = functools.partial(
            lax.dynamic_slice_in_dim, start_index=start, slice_size=size, axis=1
        )
        return step(carry, start, *[t if t is None else cut(t) for t in tensors])

    # The first step also takes the tokens by which `length` exceeds a multiple of `size`.
    rest = length - full_chunks * size
    start = length - rest if reverse else 0
    carry, parts = step_at(carry, start, rest)
    around = [(0, 0, 0), (start, length - rest - start, 0)]
    outputs = tuple(lax.pad(p, jnp.zeros((), p.dtype), [*around, (0, 0, 0)]) for p in parts)

    def body(k, loop):
        carry, outputs = loop
        start = (full_chunks - 1 - k) * size if reverse else rest + k * size
        carry, parts = step_at(carry, start, size)
        put = functools.partial(lax.dynamic_update_slice_in_dim, start_index=start, axis=1)
        return carry, tuple(put(o, p) for o, p in zip(outputs, parts, strict=True))

    return lax.fori_loop(0, full_chunks, body, (carry, outputs))
