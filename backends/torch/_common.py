"""What the torch kernels share: dtypes, token kinds, states and cache-sized blocks."""

import torch

STARTS, PADDING = 1, 2


def accumulation_dtype(*tensors):
    """float64 if any tensor is float64, else float32."""
    if any(t is not None and t.dtype == torch.float64 for t in tensors):
        return torch.float64
    return torch.float32


def state_or_zeros(initial_state, shape, like, dtype):
    """The initial state in `dtype`; None stands for zeros."""
    if initial_state is None:
        return like.new_zeros(shape, dtype=dtype)
    return initial_state.to(dtype)


def fresh(tensor, dtype):
    """A contiguous copy that shares no memory, as an operator's output must be."""
    return tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)


def slab_size(tensor):
    """How many elements one launch should touch.

    On a CPU as many as stay in the cache until the next one, elsewhere as many as hide the launch.
    """
    return 1 << 16 if tensor.device.type == "cpu" else 1 << 22


def row_blocks(tensor):
    """Slices of the time axis that cut [B, T, D] into slabs."""
    batch, length, width = tensor.shape
    step = max(1, slab_size(tensor) // max(1, batch * width))
    return [slice(i, min(i + step, length)) for i in range(0, length, step)]


def kind_masks(token_kind, rows=slice(None)):
    """(restart, padding) of some rows, boolean [B, T, 1]; both None when every token goes on."""
    if token_kind is None:
        return None, None
    token_kind = token_kind[:, rows].unsqueeze(-1)
    return token_kind == STARTS, token_kind == PADDING


def fill_(tensor, mask, value):
    """Overwrites `tensor` with `value` where `mask` is set; no mask, no change."""
    return tensor if mask is None else tensor.masked_fill_(mask, value)


def register_gradient(
    forward, backward, keep_output=True, without=(), token_kinds=True, options=0, sums=0
):  # fmt: skip
    """Makes `backward` the gradient of the operator `forward(*inputs) -> (output, final_state)`.

    `backward(d_output, d_final_state, output, *inputs)`, without `output` unless that is kept,
    returns a gradient for each input up to the token kinds. What it returns for an input that
    needs none, as None does, is dropped. It is not handed the inputs whose positions are in
    `without`, and nobody has to keep them. So many `options`, which are no tensors, follow the
    token kinds. An operation without a state has no `token_kinds`, and one result. The last so many
    results, `sums`, are for the backward alone: it is handed them in place of their gradients.
    """
    undifferentiated = token_kinds + options

    def save(ctx, inputs, output):
        tensors = inputs[: len(inputs) - options]
        ctx.options = inputs[len(tensors) :]
        kept = [x for i, x in enumerate(tensors) if i not in without]
        found = output[-sums:] if sums else ()
        ctx.mark_non_differentiable(*found)
        ctx.save_for_backward(*found, *(output[:1] if keep_output else ()), *kept)

    def gradients(ctx, *d_results):
        saved = ctx.saved_tensors  # once: a checkpoint recomputes what is asked for again
        found = backward(*d_results[: len(d_results) - sums], *saved, *ctx.options)
        found = (found,) if isinstance(found, torch.Tensor) else found
        needed = ctx.needs_input_grad[: len(ctx.needs_input_grad) - undifferentiated]
        given = (dx if need else None for need, dx in zip(needed, found, strict=True))
        return *given, *[None] * undifferentiated

    forward.register_autograd(gradients, setup_context=save)
