"""S_t = diag(exp(log_f_t)) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t,  in every head.

Qin et al. 2024, arXiv:2404.07904, section 3 (HGRN2, where k_t = 1 - exp(log_f_t)); Yang et al.
2023, arXiv:2312.06635, section 4 (gated linear attention).

The states between chunks are stored in device memory, then all chunks are computed at once. The
backward computes the states again, and their gradients from the last chunk to the first. Where k is
None, keys are computed in registers, and neither they nor their gradients are stored.
"""

import torch
import triton
from torch import Tensor

from keras_recurrent.backends.torch._common import register_gradient
from keras_recurrent.backends.triton import _search
from keras_recurrent.backends.triton._common import contiguous, empty_like, on_device_of
from keras_recurrent.backends.triton._gated_chunks import attend_kernel, gradient_kernel
from keras_recurrent.backends.triton._gated_output import output_kernel
from keras_recurrent.backends.triton._gated_states import walk
from keras_recurrent.backends.triton._linear_attention import Blocks, refusal, sizes_of
from keras_recurrent.backends.triton._linear_attention_step import step

# Candidates by `short` and the tokens of a chunk, the default first. A thread keeps its rows of all
# tiles in registers: two warps for 32 tokens, four for 64. With 64 tokens, products are
# asynchronous, and a kernel with more warps, 32 or 128 channels of keys, or fewer registers is not
# compiled correctly (`_products.py`).
ATTEND_BLOCKS = {
    (True, 64): (Blocks(64, 128, 4),),
    (True, 32): (Blocks(64, 128, 2), Blocks(64, 128, 2, num_stages=2), Blocks(32, 128, 2)),
    (False, 32): (Blocks(32, 64, 4), Blocks(64, 64, 4), Blocks(32, 64, 2), Blocks(32, 128, 8)),
}
GRADIENT_BLOCKS = {  # by `short`
    True: (
        Blocks(64, 64, 4, maxnreg=168),  # three programs on a multiprocessor
        Blocks(64, 64, 4),
        Blocks(32, 64, 2),
    ),
    False: (Blocks(32, 32, 4), Blocks(16, 32, 4), Blocks(16, 16, 4), Blocks(32, 32, 8)),
}


def unsupported(q, k, v, log_f, initial_state=None, token_kind=None) -> str | None:
    """Why this implementation refuses these arguments; None if it accepts them."""
    return refusal(q, k, v, log_f, initial_state, token_kind)


def gated_linear_attention(q, k, v, log_f, initial_state=None, token_kind=None):
    """q, k, log_f: [B, T, H, K]; v: [B, T, H, V]; log_f <= 0. k None stands for 1 - exp(log_f).

    Returns ([B, T, H, V] in v's dtype, [B, H, K, V] in float32).
    """
    return _forward(q, k, v, log_f, initial_state, token_kind)


def _parts(sizes, log_f):
    """How many numbers of bfloat16 a logarithm of a decay is split into (`_products.py`)."""
    if not sizes.short:
        return 3
    return 1 if log_f.dtype == torch.bfloat16 else 2


def _attend(sizes, q, k, v, states, output, *, log_f, token_kind, parts, reverse=False):
    """Fills and returns `output`; if `reverse`, the gradient of v, with that of the output as v."""
    kernel, flags = attend_kernel, {"SHORT": sizes.short, "REVERSE": reverse}
    if sizes.short and not reverse:
        kernel, flags = output_kernel, {}

    def launch(blocks):
        options = blocks.options(sizes)
        kernel[(sizes.programs * triton.cdiv(sizes.values, options["BLOCK_V"]),)](
            q,
            k,
            v,
            log_f,
            token_kind,
            states,
            output,
            *sizes.numbers,
            sizes.chunks,
            CHUNK=sizes.chunk,
            LEVELS=sizes.levels,
            PARTS=parts,
            **flags,
            **options,
        )

    name = "gated_linear_attention " + ("gradient of v" if reverse else "output")
    candidates = ATTEND_BLOCKS[sizes.short, sizes.chunk]
    _search.run(name, candidates, launch, (q, k, v, log_f, token_kind), sizes)
    return output


def _differentiate(
    sizes, q, k, v, d_output, states, d_states, gradients, *, log_f, token_kind, parts
):  # fmt: skip
    """Writes `gradients`, those of q, k and log_f."""

    def launch(blocks):
        options = blocks.options(sizes)
        gradient_kernel[(sizes.programs * triton.cdiv(sizes.keys, options["BLOCK_K"]),)](
            q,
            k,
            v,
            log_f,
            token_kind,
            d_output,
            states,
            d_states,
            *gradients,
            *sizes.numbers,
            sizes.chunks,
            CHUNK=sizes.chunk,
            LEVELS=sizes.levels,
            SHORT=sizes.short,
            PARTS=parts,
            GAIN_PARTS=1 if sizes.short else 3,
            **options,
        )

    name = "gated_linear_attention gradients"
    candidates = GRADIENT_BLOCKS[sizes.short]
    _search.run(name, candidates, launch, (q, k, v, log_f, token_kind), sizes)


@torch.library.custom_op("keras_recurrent::triton_gated_linear_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    log_f: Tensor,
    initial_state: Tensor | None,
    token_kind: Tensor | None,
) -> tuple[Tensor, Tensor]:
    sizes = sizes_of(q, k, v)
    q, k, v, log_f, initial_state, token_kind = contiguous(
        q, k, v, log_f, initial_state, token_kind
    )
    decays = {"log_f": log_f, "token_kind": token_kind}
    with on_device_of(q):
        if sizes.length == 1:
            return step(sizes, q, k, v, initial_state, **decays)
        decays["parts"] = _parts(sizes, log_f)
        states, final_state = walk(sizes, k, v, initial_state, **decays)
        return _attend(sizes, q, k, v, states, v.new_empty(v.shape), **decays), final_state


@_forward.register_fake
def _(q, k, v, log_f, initial_state, token_kind):
    state_shape = sizes_of(q, k, v).state_shape
    return v.new_empty(v.shape), v.new_empty(state_shape, dtype=torch.float32)


@torch.library.custom_op("keras_recurrent::triton_gated_linear_attention_backward", mutates_args=())
def _backward(
    d_output: Tensor,
    d_final_state: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    log_f: Tensor,
    initial_state: Tensor | None,
    token_kind: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    sizes = sizes_of(q, k, v, chunk=32)
    q, k, v, log_f, initial_state, token_kind, d_output, d_final_state = contiguous(
        q, k, v, log_f, initial_state, token_kind, d_output, d_final_state
    )
    decays = {"log_f": log_f, "token_kind": token_kind, "parts": _parts(sizes, log_f)}
    d_q, d_v, d_log_f = empty_like(q, v, log_f)
    d_k = q.new_empty(0) if k is None else k.new_empty(k.shape)
    with on_device_of(q):
        states, _ = walk(sizes, k, v, initial_state, **decays)
        d_states, d_initial = walk(sizes, q, d_output, d_final_state, **decays, reverse=True)
        _attend(sizes, q, k, d_output, d_states, d_v, **decays, reverse=True)
        gradients = d_q, d_k, d_log_f
        _differentiate(sizes, q, k, v, d_output, states, d_states, gradients, **decays)
    return d_q, d_k, d_v, d_log_f, d_initial


@_backward.register_fake
def _(d_output, d_final_state, q, k, v, log_f, initial_state, token_kind):
    return (
        q.new_empty(q.shape),
        q.new_empty(0) if k is None else k.new_empty(k.shape),
        v.new_empty(v.shape),
        log_f.new_empty(log_f.shape),
        d_final_state.new_empty(d_final_state.shape),
    )


register_gradient(_forward, _backward, keep_output=False)
