"""o_t = sum_s softmax_s(q_t · k_s) v_s over a window of keys.  De et al. 2024, arXiv:2402.19427.

JAX's own kernel computes it, splash attention, which skips the blocks outside the window. It has no
place for keys from before the sequence, none for a tail of a block, and multiplies in bfloat16.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention

from keras_recurrent.backends.jax import sliding_window_attention as plain
from keras_recurrent.backends.pallas._common import LANES, refusal
from keras_recurrent.backends.pallas._platform import per_shard

BLOCKS = (512, 256, LANES)  # tokens; the first that divides a row


def unsupported(
    q, k, v, sliding_window=None, initial_state=None, token_kind=None, capacity=None
) -> str | None:
    """Why this kernel refuses these arguments; None if it accepts them."""
    if reason := refusal(q, k, v):
        return reason
    for tensor in (q, k, v):
        if tensor.dtype != jnp.bfloat16:
            return f"multiplies in bfloat16, got {tensor.dtype}"
    if q.shape[1] % LANES:
        return f"needs a multiple of {LANES} tokens, got {q.shape[1]}"
    if initial_state is not None:
        return "begins with the sequence: it has no place for the keys of a state"
    return None


def forward(q, k, v, of_queries, of_keys, *, window, dtype):
    def local(*tensors):
        return _attention(*tensors, window=window, save_residuals=True)

    run = _per_shard(local, k, (*_TENSORS, *_DOCUMENTS), (_OUTPUT, "b t g r"))
    return run(q, k, v, of_queries, of_keys)


def backward(q, k, v, of_queries, of_keys, _, d_output, *, window, dtype):
    def local(q, k, v, of_queries, of_keys, d_output):
        def attention(q, k, v):
            return _attention(q, k, v, of_queries, of_keys, window=window, save_residuals=False)

        # The kernel keeps its sums in a form of its own: it goes forward once more.
        return jax.vjp(attention, q, k, v)[1](d_output)

    run = _per_shard(local, k, (*_TENSORS, *_DOCUMENTS, _OUTPUT), _TENSORS)
    gradients = run(q, k, v, of_queries, of_keys, d_output)
    return tuple(d.astype(dtype) for d in gradients)


_TENSORS, _DOCUMENTS, _OUTPUT = ("b t g r k", "b t g k", "b t g v"), ("b t", "b t"), "b t g r v"


def _per_shard(local, k, arguments, results):
    """Heads of keys are split, or those of queries where all share one of keys."""
    return per_shard(local, arguments, results, "r" if k.shape[2] == 1 else "g")


def _attention(q, k, v, of_queries, of_keys, *, window, save_residuals):
    """The kernel has one mask for all rows: so they follow each other as if they were one."""
    batch, length, groups, shared, _ = q.shape
    block = next(size for size in BLOCKS if length % size == 0)
    kernel = splash_attention.make_splash_mha_single_device(
        splash_attention.MultiHeadMask([_Rows(batch, length, window)] * (groups * shared)),
        block_sizes=splash_attention.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        save_residuals=save_residuals,
    )

    def of_heads(x, heads):
        return jnp.swapaxes(x.reshape(batch * length, heads, -1), 0, 1)

    def beside_queries(x):
        return jnp.swapaxes(x, 0, 1).reshape(batch, length, groups, shared, *x.shape[2:])

    result = kernel(
        of_heads(q, groups * shared),
        of_heads(k, groups),
        of_heads(v, groups),
        splash_attention.SegmentIds(of_queries.reshape(-1), of_keys.reshape(-1)),
    )
    if not save_residuals:
        return beside_queries(result)
    output, (log_total,) = result
    return beside_queries(output), beside_queries(log_total)


class _Rows(splash_attention.LocalMask):
    """A window in rows that follow each other; what lies in different ones is never asked for."""

    def __init__(self, batch, length, window):
        size = (None if window is None else window - 1, 0)
        super().__init__((batch * length, batch * length), size, offset=0)
        self.length = length

    def __getitem__(self, block):
        # A block of queries, and one of keys, is in one row.
        queries, keys = (part.start // self.length for part in block)
        seen = super().__getitem__(block)
        return seen if queries == keys else np.zeros_like(seen)

    def __eq__(self, other):
        return super().__eq__(other) and self.length == other.length

    def __hash__(self):
        return hash((super().__hash__(), self.length))


sliding_window_attention = plain.operation(forward, backward)
