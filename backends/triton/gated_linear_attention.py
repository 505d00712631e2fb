"""S_t = diag(exp(log_f_t)) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t,  in every head.

Qin et al. 2024, arXiv:2404.07904, section 3 (HGRN2, where k_t = 1 - exp(log_f_t)); Yang et al.
2023, arXiv:2312.06635, section 4 (gated linear attention).

For bfloat16 and heads of up to 128 channels of keys, `_linear_attention/gated_output.py` has the
kernels of the forward, `gated_gradients.py` those of the backward. Otherwise the states between
chunks are stored in device memory (`gated_states.py`), and then all chunks are computed in one
launch (`gated_chunks.py`). The backward recomputes the states in this way, and computes their
gradients from the last chunk to the first. If k is None, keys are computed in registers, and their
gradients are not stored.
"""

from ._linear_attention.gated_chunks import attend_kernel, gradient_kernel
from ._linear_attention.gated_gradients import differentiate
from ._linear_attention.gated_operands import pairs_array, prepare
from ._linear_attention.gated_output import MAX_KEYS, stream
from ._linear_attention.gated_states import effect, walk
from ._linear_attention.linear_attention import (
    Blocks,
    sizes_of,
    unsupported_reason,
)
from ._linear_attention.linear_attention_step import step
from ._runtime import search
from ._runtime.framework import operation, run, zeros_like
from ._runtime.launch import Array, Launch, cdiv, dtype_name, like
from ._runtime.operation import Operation

# Candidates by `short`, the default first. A thread keeps its rows of all tiles in registers.
# Chunks have 32 tokens, so that their products are not asynchronous (`products.py`).
ATTEND_BLOCKS = {
    True: (Blocks(64, 128, 2), Blocks(64, 128, 2, num_stages=2), Blocks(32, 128, 2)),
    False: (Blocks(32, 64, 4), Blocks(64, 64, 4), Blocks(32, 64, 2), Blocks(32, 128, 8)),
}
GRADIENT_BLOCKS = {
    True: (Blocks(64, 128, 4), Blocks(64, 64, 4), Blocks(32, 64, 2)),
    False: (Blocks(32, 32, 4), Blocks(16, 32, 4), Blocks(16, 16, 4), Blocks(32, 32, 8)),
}


def effect_on_state(q, k, v, log_f, token_kind=None, d_output=None):
    """Returns the decay [B, H, K] and the total [B, H, K, V] by which the tokens change a state.

    From S before the first token, the state after the last is decay S + total. With the gradient of
    the output, the same holds for gradients of states from the last token to the first.
    """
    sizes = sizes_of(q, k, v, chunk=32)
    decays = {"log_f": log_f, "token_kind": token_kind, "parts": _parts(sizes, log_f)}
    if d_output is None:
        return effect(sizes, k, v, **decays)
    return effect(sizes, q, d_output, **decays, reverse=True)


def _parts(sizes, log_f):
    """Number of bfloat16 parts into which the logarithm of a decay is split (`products.py`)."""
    if not sizes.short:
        return 3
    return 1 if dtype_name(log_f) == "bfloat16" else 2


def _attend(sizes, q, k, v, states, dtype, *, log_f, token_kind, parts, reverse=False):
    """The output in `dtype`; if `reverse`, the gradient of v, where v is that of the output."""
    flags = {"SHORT": sizes.short, "REVERSE": reverse}
    inputs = q, k, log_f, token_kind, v

    def launch(blocks):
        options = {"CHUNK": sizes.chunk, "LEVELS": sizes.levels, "PARTS": parts, **flags}
        options |= blocks.options(sizes)
        programs = sizes.programs * cdiv(sizes.values, options["BLOCK_V"])
        outputs, numbers = (like(v).astype(dtype),), (*sizes.numbers, sizes.chunks)
        return run(Launch(attend_kernel, programs, (inputs, states), outputs, numbers, options))

    name = "gated_linear_attention " + ("gradient of v" if reverse else "output")
    candidates = ATTEND_BLOCKS[sizes.short]
    (output,) = search.run(name, candidates, launch, inputs, sizes)
    return output


def _differentiate(sizes, q, k, v, d_output, states, d_states, *, log_f, token_kind, parts):
    """The gradients of q, k (None if k is None) and log_f."""
    inputs = q, k, log_f, token_kind, v
    outputs = like(q), None if k is None else like(k), like(log_f)

    def launch(blocks):
        options = {"CHUNK": sizes.chunk, "LEVELS": sizes.levels, "SHORT": sizes.short}
        options |= {"PARTS": parts, "GAIN_PARTS": 1 if sizes.short else 3}
        options |= blocks.options(sizes)
        programs = sizes.programs * cdiv(sizes.keys, options["BLOCK_K"])
        tensors, numbers = (inputs, d_output, states, d_states), (*sizes.numbers, sizes.chunks)
        return run(Launch(gradient_kernel, programs, tensors, outputs, numbers, options))

    name = "gated_linear_attention gradients"
    return search.run(name, GRADIENT_BLOCKS[sizes.short], launch, inputs, sizes)


def results(q, k, v, log_f, initial_state, token_kind):
    sizes = _streaming_sizes(q, k, v)
    pairs = like(_empty_pairs(q)) if sizes is None else pairs_array(sizes)
    return like(v), Array(sizes_of(q, k, v).state_shape, "float32"), pairs


def _streaming_sizes(q, k, v):
    """The `Sizes` for `gated_output.py`; None if other kernels must be used."""
    sizes = sizes_of(q, k, v)
    streamed = sizes.short and sizes.keys <= MAX_KEYS and sizes.length > 1
    return sizes if streamed else None


def _empty_pairs(q):
    """The empty residual of kernels that do not save pairs."""
    return zeros_like(q[:, 0, :, :0])


def forward(q, k, v, log_f, initial_state, token_kind):
    sizes = _streaming_sizes(q, k, v)
    decays = {"log_f": log_f, "token_kind": token_kind}
    if q.shape[1] == 1:
        output_and_state = step(sizes_of(q, k, v), q, k, v, initial_state, **decays)
        return *output_and_state, _empty_pairs(q)
    if sizes is not None:
        decays["parts"] = _parts(sizes, log_f)
        prepared = prepare(sizes, q, k, **decays)
        return *stream(sizes, prepared, v, initial_state, token_kind), prepared.pairs
    sizes = sizes_of(q, k, v, chunk=32)
    decays["parts"] = _parts(sizes, log_f)
    states, final_state = walk(sizes, k, v, initial_state, **decays)
    output = _attend(sizes, q, k, v, states, dtype_name(v), **decays)
    return output, final_state, _empty_pairs(q)


def backward(q, k, v, log_f, initial_state, token_kind, output, pairs, d_output, d_final):
    sizes = _streaming_sizes(q, k, v)
    decays = {"log_f": log_f, "token_kind": token_kind}
    if sizes is not None:
        decays["parts"] = _parts(sizes, log_f)
        arguments = q, k, v, initial_state, pairs, d_output, d_final
        return *differentiate(sizes, *arguments, **decays), None
    sizes = sizes_of(q, k, v, chunk=32)
    decays["parts"] = _parts(sizes, log_f)
    states, _ = walk(sizes, k, v, initial_state, **decays, ends=False)
    ends = initial_state is not None
    d_states, d_initial = walk(sizes, q, d_output, d_final, **decays, reverse=True, ends=ends)
    d_v = _attend(sizes, q, k, d_output, d_states, dtype_name(v), **decays, reverse=True)
    d_q, d_k, d_log_f = _differentiate(sizes, q, k, v, d_output, states, d_states, **decays)
    return d_q, d_k, d_v, d_log_f, d_initial, None


gated_linear_attention = operation(
    Operation(
        "gated_linear_attention",
        forward,
        results,
        backward,
        unsupported_reason,
        residuals=("B H P",),
        effect_on_state=effect_on_state,
    )
)
