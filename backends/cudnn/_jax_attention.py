"""Softmax attention of cuDNN on JAX, or of the Triton kernels if documents are packed.

A program contains both, because packed documents are detected only when it runs. Padding follows
all real tokens, which do not attend to it: cuDNN processes it too, with inputs of zero.

`forward` and `backward` have the parameters of their counterparts in `backends/jax`. JAX's
primitives are bound directly: `jax.nn.dot_product_attention` would round the sums of the softmax,
which the backward pass needs, and can be traced only where there is a GPU.
"""

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as primitives

from ..jax import _gpu
from ..jax import sliding_window_attention as plain
from ..jax._attention_inputs import cond_on_flat_tensors
from ..jax._common import filled
from ..triton import sliding_window_attention as triton
from ..triton._attention import jax_attention as triton_kernels
from ..triton._attention.jax_attention import ARGUMENTS, OUTPUT, distributed, merge_heads

# The dimensions of the output and of the residuals after it: the softmax sums of cuDNN, and the
# residuals of Triton for 16-bit tensors that are not None.
_RESULTS = OUTPUT, "B G R T", OUTPUT, "B T G R"
_OPTIONS = {
    "scale": 1.0,
    "seed": 0,
    "dropout_rate": 0.0,
    "variadic_args": (False, False),  # no bias
    "mask_type": primitives.MaskType.CAUSAL,
    "layout": primitives.AttentionLayout.BTNH.value,
}


def unsupported_reason(q, k, v, window, token_kind, capability):
    """Reason JAX or a GPU below `capability` does not support these arguments, or None."""
    if not has_capability(q, capability):
        lowest, found = ".".join(map(str, capability)), _gpu.capability() / 10
        return f"needs a GPU of compute capability {lowest} or later, got one of {found}"
    return triton.unsupported(q, k, v, window, None, token_kind)


def has_capability(q, lowest):
    """Returns True if the GPU has compute capability `lowest`, such as (9, 0), or a later one."""
    return _gpu.capability() >= 10 * lowest[0] + lowest[1]


def forward(q, k, v, query_segments, key_segments, **options):
    names = _RESULTS[:2] if options["one_document"] else _RESULTS

    def launch(q, k, v, *segments):
        padding = None if options["one_document"] else segments[0] == 0

        def fused(q, k, v):
            k, v = (filled(x, padding, 0) for x in (k, v))
            output, sums = attend(merge_heads(q), k, v, options["window"])
            output = filled(output.reshape(*q.shape[:4], -1), padding, 0)
            if padding is not None:
                sums = jnp.where(padding[:, None], 0, sums)
            zeros = (jnp.zeros(x.shape, x.dtype) for x in shapes)
            return output, sums.reshape(_shape_of_sums(q)), *zeros

        def packed(q, k, v):
            output, (_, *residuals, _) = triton_kernels.forward(q, k, v, *segments, **options)
            return output, jnp.zeros(_shape_of_sums(q), jnp.float32), *residuals

        shapes = [] if options["one_document"] else jax.eval_shape(packed, q, k, v)[2:]
        return _choose(fused, packed, segments, options, (q, k, v))

    results = distributed(launch, k, ARGUMENTS, names)(q, k, v, query_segments, key_segments)
    return results[0], results


def backward(q, k, v, query_segments, key_segments, residuals, d_output, *, dtype, **options):
    names = _RESULTS[:2] if options["one_document"] else _RESULTS

    def launch(q, k, v, *others):
        *segments, output, sums = others[:4]
        *residuals, d_output = others[4:]
        padding = None if options["one_document"] else segments[0] == 0

        def fused(q, k, v, output, d_output):
            q, k, v, d_output = (filled(x, padding, 0) for x in (q, k, v, d_output))
            queries, output, d_output = map(merge_heads, (q, output, d_output))
            merged_sums = sums.reshape(len(q), -1, q.shape[1])
            d_q, d_k, d_v = attend_backward(
                queries, k, v, merged_sums, output, d_output, options["window"]
            )
            return d_q.reshape(q.shape).astype(dtype), d_k.astype(dtype), d_v.astype(dtype)

        def packed(q, k, v, output, d_output):
            given = *segments, [output, *residuals, None], d_output
            return triton_kernels.backward(q, k, v, *given, dtype=dtype, **options)

        return _choose(fused, packed, segments, options, (q, k, v, output, d_output))

    run = distributed(launch, k, (*ARGUMENTS, *names, OUTPUT), ARGUMENTS[:3])
    return run(q, k, v, query_segments, key_segments, *residuals, d_output)


def _choose(fused, packed, segments, options, tensors):
    """Calls `fused` if each sequence is one document followed by padding, otherwise `packed`."""
    if options["one_document"]:
        return fused(*tensors)
    of_queries, _ = segments
    one_document = jnp.all((of_queries == of_queries[:, :1]) | (of_queries == 0))
    return cond_on_flat_tensors(one_document, fused, packed, tensors)


def _shape_of_sums(q):
    """The shape of the softmax sums, [B, G, R, T]; q: [B, T, G, R, K]."""
    batch, length, *heads, _ = q.shape
    return batch, *heads, length


def attend(q, k, v, window):
    """The output [B, T, H, V] for one document per sequence, and the softmax sums [B, H, T]."""
    absent = [jnp.zeros(0, q.dtype)] * 7
    return primitives._dot_product_attention_fwd_p.bind(
        q, k, v, *absent, sliding_window_length=window, is_training=True, **_OPTIONS
    )


def attend_backward(q, k, v, sums, output, d_output, window):
    """Returns the gradients of q, k and v."""
    absent = [jnp.zeros(0, q.dtype)] * 7
    return primitives._dot_product_attention_bwd_p.bind(
        q, k, v, *absent, sums, output, d_output, sliding_window_length=window, **_OPTIONS
    )


sliding_window_attention = plain.sliding_window_attention.replace_passes(forward, backward)
