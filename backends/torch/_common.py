"""What the operations of this folder share. Names that end in `_` change a tensor in place."""

import torch
from torch.autograd import forward_ad

from ..constants import PADDING, STARTS
from . import _sharding
from ._autograd import register_autograd


def accumulation_dtype(*tensors):
    """The dtype of states and sums: float64 if any tensor is float64, else float32."""
    given = [t for t in tensors if t is not None]
    return torch.float64 if any(t.dtype == torch.float64 for t in given) else torch.float32


_capabilities: dict = {}


def _capability(device):
    if device not in _capabilities:
        _capabilities[device] = torch.cuda.get_device_capability(device)
    return _capabilities[device]


@torch.compiler.assume_constant_result
def has_capability(device, lowest):
    """Whether a GPU of NVIDIA has a compute capability, such as (9, 0).

    While torch compiles, this is called, not traced: its compiler cannot compare what a GPU has.
    """
    return _capability(device) >= lowest


@torch.compiler.assume_constant_result
def capability_reason(device, lowest):
    """Why a GPU of NVIDIA does not have a compute capability; None if it does."""
    found = _capability(device)
    if found >= lowest:
        return None
    lowest, found = (".".join(map(str, version)) for version in (lowest, found))
    return f"needs a GPU of compute capability {lowest} or later, got one of {found}"


def is_exporting():
    """Whether `torch.export` traces; torch 2.11's own function says so of `torch.compile`, too."""
    return torch.compiler._is_exporting_flag


def state_or_zeros(initial_state, shape, dtype, like):
    """The initial state in `dtype`; None stands for zeros, on the device of `like`."""
    if initial_state is None:
        return like.new_zeros(shape, dtype=dtype)
    return initial_state.to(dtype)


def fresh(tensor, dtype):
    """A contiguous copy that shares no memory: what an operator returns must not be a view."""
    return tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)


def elements_per_launch(tensor):
    """How many elements one torch call should process.

    On a CPU so many as stay in the cache until the next call; on a GPU enough for the time of the
    launch not to matter.
    """
    return 1 << 16 if tensor.device.type == "cpu" else 1 << 22


def spans(tensor):
    """Slices of the time axis that cut [B, T, D] into parts of `elements_per_launch` elements."""
    batch, length, width = tensor.shape
    step = max(1, elements_per_launch(tensor) // max(1, batch * width))
    return [slice(i, min(i + step, length)) for i in range(0, length, step)]


def is_one_token(x, *tensors):
    """Whether x [B, T, ...] is a single token, and no gradient of it or the others is asked for.

    So it is at every step of generation. Then plain operators of torch take the place of ours:
    fewer of them than for a row, and a compiler joins them with what stands beside them.
    """
    given = [t for t in (x, *tensors) if t is not None]
    return x.shape[1] == 1 and not (torch.is_grad_enabled() and any(map(is_differentiated, given)))


def is_differentiated(tensor):
    """Whether a gradient of a tensor is asked for, at any level of nested transforms."""
    if not torch.compiler.is_compiling():
        while not tensor.requires_grad and torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.requires_grad


def step_masks(token_kind, ndim):
    """`kind_masks` of one token a row, to select from tensors [B, ...] of `ndim` dimensions."""
    masks = kind_masks(token_kind)
    return [mask if mask is None else mask.view(-1, *[1] * (ndim - 1)) for mask in masks]


def where(mask, value, tensor):
    """`value` where `mask` is set, else `tensor`; mask None changes nothing."""
    return tensor if mask is None else torch.where(mask, value, tensor)


def kind_masks(token_kind, span=slice(None)):
    """(starts, padding), boolean [B, T]: which tokens are of that kind; both None if all go on.

    Of a span of the time axis alone, if one is given.
    """
    if token_kind is None:
        return None, None
    token_kind = token_kind[:, span]
    return token_kind == STARTS, token_kind == PADDING


def filled(tensor, mask, value):
    """`tensor` [B, T, ...] with `value` where `mask` [B, T] is set; mask None changes nothing."""
    return tensor if mask is None else tensor.masked_fill(_with_axes_of(tensor, mask), value)


def fill_(tensor, mask, value):
    """`filled`, in place."""
    return tensor if mask is None else tensor.masked_fill_(_with_axes_of(tensor, mask), value)


def _with_axes_of(tensor, mask):
    return mask.reshape(*mask.shape, *[1] * (tensor.ndim - mask.ndim))


def applied_decay_(a, starts, padding):
    """a, in place, as a token applies it to the state: 0 at a start, 1 at padding."""
    return fill_(fill_(a, starts, 0), padding, 1)


def register_gradient(
    forward,
    backward,
    dimensions,
    result_dimensions,
    channels="d",
    keep_output=True,
    without=(),
    options=0,
    sums=0,
):
    """Makes `backward` the gradient of the operator `forward(*inputs) -> (output, final_state)`.

    For the backward pass the inputs and the output are kept. `backward` is called with the
    gradients of the results, the output and the inputs. It returns a gradient for each input before
    the token kinds; one for an input that needs none, or is None, is dropped.

    Args:
        forward: an operator. An operation without a state returns the output alone.
        backward: an operator `(d_output, d_final_state, output, *inputs)`.
        dimensions: for each tensor that `forward` takes, the names of its dimensions, such as
            "b t d", the token kinds last; result_dimensions: for each that it returns.
        channels: the dimensions, beside the batch, whose members are independent.
        keep_output: whether the output is kept; if not, `backward` does not take it.
        without: positions of inputs that are not kept; `backward` does not take them.
        options: how many inputs follow the token kinds that are no tensors.
        sums: how many of the last results are for the backward pass alone. `backward` takes them,
            before the output, in place of their gradients.
    """
    undifferentiated = 1 + options

    def save(ctx, inputs, output):
        tensors = inputs[: len(inputs) - options]
        ctx.options = inputs[len(tensors) :]
        kept = [x for i, x in enumerate(tensors) if i not in without]
        found = output[-sums:] if sums else ()
        ctx.mark_non_differentiable(*found)
        ctx.save_for_backward(*found, *(output[:1] if keep_output else ()), *kept)

    def gradients(ctx, *d_results):
        # Read once: inside a checkpoint, each access computes the forward pass again.
        saved = ctx.saved_tensors
        found = backward(*d_results[: len(d_results) - sums], *saved, *ctx.options)
        found = (found,) if isinstance(found, torch.Tensor) else found
        needed = ctx.needs_input_grad[: len(ctx.needs_input_grad) - undifferentiated]
        given = (dx if need else None for need, dx in zip(needed, found, strict=True))
        return *given, *[None] * undifferentiated

    register_autograd(forward, gradients, save, backward)
    kept = [i for i in range(len(dimensions)) if i not in without]
    before = (*result_dimensions, *(result_dimensions[:1] if keep_output else ()))
    _sharding.register(forward, dimensions, result_dimensions, channels)
    _sharding.register(
        backward,
        (*before, *(dimensions[i] for i in kept)),
        dimensions[:-1],
        channels,
        [len(before) + kept.index(i) if i in kept else None for i in range(len(dimensions) - 1)],
    )


def slope_of_gated(s, u, z_du):
    """The derivative of z σ(u), which is s + z u' s σ(-u), of s = σ(u), u and z u'.

    torch's own derivatives take 1 - σ(u) for σ(-u), which loses the digits of a gate that is nearly
    open.
    """
    return torch.addcmul(s, z_du * torch.sigmoid(torch.neg(u)), s)


def forward_mode_active():
    """Whether tangents may be on their way, for which a function of autograd has no rule.

    torch's own operators then serve. The compiler, which refuses functions with such a rule, sees
    no tangents.
    """
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0
