"""A decoding step of HGRN2 that writes its memory every few tokens only.

The bandwidth of the GPU limits `hgrn2_step` for many sequences, and nearly half of the bytes that
it moves are writes of the memory.
"""

from . import hgrn2_step as every_token
from ._runtime.framework import decoding_step, run
from ._runtime.launch import Array


def results(q, f, v, memory, recent, count, lower_bound, norm_scale, token_kind):
    output, squares, next_memory = every_token.results(
        q, f, v, memory, lower_bound, norm_scale, token_kind
    )
    next_recent = Array(tuple(recent.shape), "float32")
    return output, squares, Array(tuple(count.shape), "int32"), next_memory, next_recent


@decoding_step(every_token.unsupported, results, count=5, updates=("memory", "recent"))
def hgrn2_delayed_step(
    q, f, v, memory, recent, count, lower_bound=None, norm_scale=None, token_kind=None
):
    tensors = q, f, v, memory, recent, count, lower_bound, norm_scale, token_kind
    return run(every_token.launch(tensors, results(*tensors), updates=((3, 3), (4, 4))))
