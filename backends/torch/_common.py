"""Helpers shared by the operations in plain torch. Names ending in `_` modify a tensor in place."""

import inspect

import torch
from torch.autograd import forward_ad

from ..constants import PADDING, STARTS
from ..kernel import Kernel
from ..signatures import SIGNATURES, TOKENS
from . import _sharding
from ._autograd import call_without_gradient, register_autograd


def accumulation_dtype(*tensors):
    """The dtype of states and sums: float64 if any tensor is float64, else float32."""
    dtypes = [t.dtype for t in tensors if t is not None]
    return torch.float64 if torch.float64 in dtypes else torch.float32


_capabilities: dict = {}


def capability(device):
    """The compute capability of an NVIDIA GPU, such as (9, 0)."""
    if device not in _capabilities:
        _capabilities[device] = torch.cuda.get_device_capability(device)
    return _capabilities[device]


@torch.compiler.assume_constant_result
def has_capability(device, lowest):
    """Returns True if an NVIDIA GPU has at least a compute capability, such as (9, 0).

    While torch compiles, this is called, not traced: its compiler cannot read the capability.
    """
    return capability(device) >= lowest


@torch.compiler.assume_constant_result
def capability_reason(device, lowest):
    """Reason an NVIDIA GPU does not have a compute capability, or None."""
    found = capability(device)
    if found >= lowest:
        return None
    lowest, found = (".".join(map(str, version)) for version in (lowest, found))
    return f"needs a GPU of compute capability {lowest} or later, got one of {found}"


def is_exporting():
    """True while `torch.export` traces; torch 2.11's function is also True in `torch.compile`."""
    return torch.compiler._is_exporting_flag


PLATFORMS = {"cudnn": "cuda", "triton": "cuda"}  # of implementations that run on one platform only


def platform_reason(arguments, platform):
    """Reason why a kernel for `platform` cannot run on the device of the first tensor, or None."""
    device = next(iter(arguments.values())).device
    return None if device.type == platform else f"needs CUDA tensors, got one on {device}"


def state_or_zeros(initial_state, shape, dtype, like):
    """The initial state in `dtype`; None means zeros, on the device of `like`."""
    if initial_state is None:
        return like.new_zeros(shape, dtype=dtype)
    return initial_state.to(dtype)


def product(a, b, dtype):
    """a b, accumulated and returned in `dtype`."""
    if a.dtype == b.dtype == dtype:
        return a @ b
    if a.is_cuda and a.dtype == b.dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def fresh(tensor, dtype):
    """A contiguous copy with its own memory: operators must not return views."""
    return tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)


def elements_per_launch(tensor):
    """The number of elements that one torch call should process.

    On a CPU, as many as stay in the cache until the next call; on a GPU, enough to hide the launch
    overhead.
    """
    return 1 << 16 if tensor.device.type == "cpu" else 1 << 22


def spans(tensor):
    """Slices of the time axis that cut [B, T, D] into spans of `elements_per_launch` elements."""
    batch, length, width = tensor.shape
    step = max(1, elements_per_launch(tensor) // max(1, batch * width))
    return [slice(i, min(i + step, length)) for i in range(0, length, step)]


def blocks(*tensors):
    """Cuts tensors [B, T, ...] along time as `spans` does, the first being [B, T, D].

    Returns a tuple of blocks for each span; None stays None. A single block is not copied.
    """
    cuts = spans(tensors[0])
    if len(cuts) == 1:
        return [tensors]
    return [tuple(t if t is None else t[:, cut] for t in tensors) for cut in cuts]


def is_one_token(x, *tensors):
    """Returns True if x [B, T, ...] is a single token and no tensor needs a gradient.

    This holds for every decoding step. Plain torch operators then replace the custom ones: they are
    fewer than for a sequence, and a compiler fuses them with adjacent operators.
    """
    given = [t for t in (x, *tensors) if t is not None]
    return x.shape[1] == 1 and not (torch.is_grad_enabled() and any(map(is_differentiated, given)))


def is_differentiated(tensor):
    """Returns True if a tensor requires a gradient, at any level of nested transforms."""
    if not torch.compiler.is_compiling():
        while not tensor.requires_grad and torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.requires_grad


def step_masks(token_kind, ndim):
    """`kind_masks` of one token per sequence, broadcastable to [B, ...] of `ndim` dimensions."""
    masks = kind_masks(token_kind)
    return [mask if mask is None else mask.view(-1, *[1] * (ndim - 1)) for mask in masks]


def where(mask, value, tensor):
    """`value` where `mask` is set, else `tensor`; mask None changes nothing."""
    return tensor if mask is None else torch.where(mask, value, tensor)


def kind_masks(token_kind, span=slice(None)):
    """Boolean masks (starts, padding) [B, T]; both None if all tokens continue a document.

    span: a slice of the time axis.
    """
    if token_kind is None:
        return None, None
    token_kind = token_kind[:, span]
    return token_kind == STARTS, token_kind == PADDING


def masks_of_tokens(token_kind):
    """`kind_masks` [B, T, 1] inside a custom operator: on a CPU, None instead of an unset mask.

    Elsewhere, reading the kinds would wait for the device.
    """
    if token_kind is None:
        return None, None
    largest, kind = PADDING, token_kind.unsqueeze(2)
    if kind.device.type == "cpu" and kind.numel():
        largest = int(kind.max())
    starts = kind == STARTS if largest >= STARTS else None
    return starts, kind == PADDING if largest >= PADDING else None


def filled(tensor, mask, value):
    """`tensor` [B, T, ...] with `value` where `mask` [B, T] is set; mask None changes nothing."""
    return tensor if mask is None else tensor.masked_fill(_expand_mask(tensor, mask), value)


def fill_(tensor, mask, value):
    """`filled`, in place."""
    return tensor if mask is None else tensor.masked_fill_(_expand_mask(tensor, mask), value)


def _expand_mask(tensor, mask):
    return mask.reshape(*mask.shape, *[1] * (tensor.ndim - mask.ndim))


def total_(parts):
    """The sum of a list of tensors, in place of the first."""
    first, *others = parts
    for part in others:
        first.add_(part)
    return first


def applied_decay_(a, starts, padding):
    """The decay applied to the state, in place of a: 0 at a start, 1 at padding."""
    return fill_(fill_(a, starts, 0), padding, 1)


def kernel_over_time(
    operation,
    forward,
    backward,
    state_shape,
    step=None,
    keep_output=True,
    dropped=(),
    options=None,
):
    """Returns the `Kernel` of an operation over time: a custom operator that has a gradient.

    The schemas and the fake results of the operator and of its gradient follow from the
    operation's signature. `register_gradient` describes the arguments that are not listed here.

    Args:
        forward: a function `(*tensors, initial_state, token_kind, *options)` that returns the
            output and the final state.
        backward: a function `(*tensors, initial_state, token_kind, output, d_output, d_final_state,
            *options)` that returns a gradient for each tensor and the initial state, empty for a
            tensor that is None.
        state_shape: a function of the tensors that returns the shape of the state.
        step: a function like `forward`, of torch's own operators, for a single token; or None.
        options: `{name: type}` of the parameters after the token kinds, with types of schemas.
    """
    signature, options = SIGNATURES[operation], options or {}
    names, like = list(signature.tensors), signature.results[0].dtype
    optional = (*signature.optional, "initial_state", "token_kind")

    def fake_results(*arguments):
        tensors, initial_state = arguments[: len(names)], arguments[len(names)]
        output = tensors[names.index(like)]
        dtype = accumulation_dtype(*tensors, initial_state)
        final_state = output.new_empty(state_shape(*tensors), dtype=dtype)
        return output.new_empty(output.shape), final_state

    def fake_gradients(*arguments):
        *tensors, _, _, output, _, d_state = arguments[: len(names) + 5]
        # An input that is not saved has the shape and the dtype of the output.
        tensors = [output if i in dropped else x for i, x in enumerate(tensors)]
        found = (d_state.new_empty(0) if x is None else x.new_empty(x.shape) for x in tensors)
        return *found, d_state.new_empty(d_state.shape)

    def define(name, function, fake, num_results, default):
        types = options | dict.fromkeys(optional, "Tensor?")
        parameters = inspect.signature(function).parameters
        schema = ", ".join(f"{types.get(n, default)} {n}" for n in parameters)
        schema = f"({schema}) -> ({', '.join(['Tensor'] * num_results)})"
        defined = torch.library.custom_op(
            f"keras_recurrent::{name}", function, mutates_args=(), schema=schema
        )
        defined.register_fake(fake)
        return defined

    operator = define(operation, forward, fake_results, 2, "Tensor")
    gradient = define(f"{operation}_backward", backward, fake_gradients, len(names) + 1, "Tensor?")
    saved = {"keep_output": keep_output, "dropped": dropped}
    apply = register_gradient(operation, operator, gradient, **saved, options=len(options))

    def function(initial_state=None, token_kind=None, **arguments):
        tensors = *[arguments.get(name) for name in names], initial_state
        others = [arguments.get(name) for name in options]
        run = step if step is not None and is_one_token(*tensors) else apply
        return run(*tensors, token_kind, *others)

    return Kernel(function)


def register_gradient(
    operation,
    forward,
    backward,
    *,
    keep_output,
    dropped=(),
    options=0,
    residuals=(),
    undifferentiated=1,
    integers=0,
    materializes=True,
    shards=True,
):
    """Registers `backward` as gradient of the operator `forward(*inputs) -> results`.

    `backward` is called with the input tensors, the output, the residuals, the gradients of the
    results, and the options. It returns a gradient for each differentiable input; gradients of
    inputs that need none, or are None, are dropped. Returns a function that calls `forward`.

    Args:
        operation: string, the name of the operation, whose signature has the dimensions.
        forward: an operator that returns the results of the operation, then the residuals.
        backward: an operator.
        keep_output: boolean; if False, the output is not saved, and `backward` gets None.
        dropped: positions of inputs that are not saved; `backward` gets None in their place.
        options: the number of inputs after the tensors.
        residuals: the dimension names of each further result, which only the backward pass needs.
        undifferentiated: the number of tensors without a gradient, the last inputs.
        integers: the number of results without a gradient, the last ones of the operation.
        materializes: boolean; if False, `backward` gets None for the gradient of an unused result,
            except the first one.
        shards: boolean, whether to register sharding rules for DTensors.
    """
    tensors, results, channels = SIGNATURES[operation].layout
    differentiable = tensors[: len(tensors) - undifferentiated]
    num_differentiable = len(results) - integers  # results

    def save(ctx, inputs, output):
        outputs = output if isinstance(output, tuple) else (output,)
        found = outputs[len(results) :]
        ctx.options = inputs[len(tensors) :]
        ctx.mark_non_differentiable(*outputs[num_differentiable:])
        ctx.set_materialize_grads(materializes)
        ctx.output = outputs[0].shape, outputs[0].dtype
        ctx.save_for_backward(
            *[None if i in dropped else x for i, x in enumerate(inputs[: len(tensors)])],
            outputs[0] if keep_output else None,
            *found,
        )

    def gradients(ctx, *d_results):
        # Read once: inside a checkpoint, each access recomputes the forward pass.
        saved = ctx.saved_tensors
        d_output, *d_others = d_results[:num_differentiable]
        if d_output is None:
            shape, dtype = ctx.output
            d_output = next(d for d in d_others if d is not None).new_zeros(shape, dtype=dtype)
        found = call_without_gradient(backward, *saved, d_output, *d_others, *ctx.options)
        found = (found,) if isinstance(found, torch.Tensor) else found
        needed = ctx.needs_input_grad[: len(differentiable)]
        given = [dx if need else None for need, dx in zip(needed, found, strict=True)]
        return *given, *[None] * (undifferentiated + options)

    apply = register_autograd(forward, gradients, save, backward)
    if shards:
        tensors, results, residuals = (
            tuple(dimensions.replace("...", TOKENS) for dimensions in group)
            for group in (tensors, results, residuals)
        )
        _sharding.register(forward, tensors, (*results, *residuals), channels)
        _sharding.register(
            backward,
            (*tensors, results[0], *residuals, *results[:num_differentiable]),
            tensors[: len(differentiable)],
            channels,
            [None if i in dropped else i for i in range(len(differentiable))],
        )
    return apply


def slope_of_gated(s, u, z_du):
    """The derivative s + z u' s σ(-u) of z σ(u), from s = σ(u), u and z u'.

    torch's own derivatives compute σ(-u) as 1 - σ(u), which loses the digits of a nearly open gate.
    """
    return torch.addcmul(s, z_du * torch.sigmoid(torch.neg(u)), s)


def forward_mode_active():
    """Returns True if inputs may have tangents, for which an autograd function has no rule.

    torch's own operators are used then. The compiler, which rejects functions with such a rule,
    gets no tangents.
    """
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0
