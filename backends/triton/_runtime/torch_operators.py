"""Launches on torch, and the custom operators made of them.

An operation is a custom operator of torch with a custom operator for its gradients: one node for
`torch.compile`, no graph breaks, and the same limits as `backends/torch`.
"""

import contextlib
import threading

import torch
import triton
from torch.autograd import forward_ad

from ...constants import LOWEST_CAPABILITY
from ...torch import _sharding
from ...torch._autograd import register_autograd
from ...torch._common import has_capability, capability_reason
from ...torch._states import inplace_states_allowed
from .._device.common import INTERPRETED, assembler_error_note
from .operation import options_of, tensors_of

_PDL_CAPABILITY = (9, 0)  # the compute capability from which launches may pdl_options
_SCHEMA_TYPES: dict = {float: "float", bool: "bool", int: "int", str: "str"}
_SCHEMA_TYPES |= {str | None: "str?", int | None: "int?"}


def unsupported_reason(*tensors):
    """Reason why kernels cannot take these tensors (or Nones), or None."""
    given = [t for t in tensors if t is not None]
    for tensor in given:
        if tensor.dtype == torch.float64:
            return "computes in float32, got a float64 tensor"
        if tensor.is_cuda:
            reason = capability_reason(tensor.device, LOWEST_CAPABILITY)
            if reason is not None:
                return reason
        elif not (INTERPRETED and tensor.device.type == "cpu"):
            return f"needs CUDA tensors, got one on {tensor.device}"
    return None


def token_wise_unsupported_reason(*tensors):
    """Reason why kernels of operations without a state cannot take these tensors, or None."""
    if any(map(_sharding.is_sharded, tensors)):
        return "does not support DTensors (plain torch does)"
    return unsupported_reason(*tensors)


fusible_unsupported_reason = token_wise_unsupported_reason  # on JAX, XLA fuses these operations


def step_unsupported_reason(*tensors):
    """Reason why kernels without gradients cannot take these tensors, or None."""
    given = [t for t in tensors if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return "has no gradients, but a tensor requires one (plain torch has them)"
    if any(forward_ad.unpack_dual(t).tangent is not None for t in _dual_candidates(given)):
        return "has no derivative in forward mode (plain torch has it)"
    return token_wise_unsupported_reason(*tensors)


def _dual_candidates(tensors):
    """The tensors inside a forward-mode level, where they may have tangents; else none."""
    return tensors if forward_ad._current_level >= 0 else ()


def run(launch):
    """Runs a kernel on the device of its inputs; returns what it writes."""
    first, before = _first(launch.inputs), {out: place for place, out in launch.updates}

    def output(i, array):
        if array is None:
            return None
        if i not in before:
            return new(array, first)
        given = launch.inputs[before[i]]
        return given if launch.in_place or _overwrites.now else cast(given, array.dtype)

    outputs = tuple(output(i, array) for i, array in enumerate(launch.outputs))
    arguments = *launch.inputs, *outputs, *launch.numbers
    try:
        launch.kernel[(launch.programs,)](*arguments, **launch.options)
    except triton.runtime.errors.PTXASError as error:
        error.add_note(assembler_error_note(launch.kernel, "torch"))
        raise
    return outputs


class _Overwrites(threading.local):
    """Whether launches write updated states into the memory of those before."""

    now = False


_overwrites = _Overwrites()


def new(array, like):
    """A tensor for an `Array`, on the device of `like`."""
    make = like.new_zeros if array.zeros else like.new_empty
    return make(array.shape, dtype=getattr(torch, array.dtype))


def cast(x, dtype):
    """A contiguous copy that shares no memory: what an operator returns must not be a view."""
    return x.to(getattr(torch, dtype), copy=True, memory_format=torch.contiguous_format)


zeros_like = torch.zeros_like


def search_sorted_rows(rows, count, right=False):
    """The insertion index of 0, 1, ..., count - 1 in each sorted row: int32 [B, count].

    Of several possible indices it is the first, or, if `right`, the last, as in `searchsorted`.
    """
    numbers = torch.arange(count, device=rows.device, dtype=torch.int32)
    numbers = numbers.expand(rows.shape[0], count).contiguous()
    return torch.searchsorted(rows, numbers, right=right, out_int32=True)


def pdl_options(x):
    """Launch options for programmatic dependent launch (`pdl.py`), where x's device has it."""
    capable = x.is_cuda and has_capability(x.device, _PDL_CAPABILITY)
    return {"PDL": True, "launch_pdl": True} if capable else {"PDL": False}


def tuning_unavailable_reason() -> str | None:
    """Reason why kernels cannot be timed here, or None."""
    if INTERPRETED:
        return "TRITON_INTERPRET=1 runs the Triton kernels in NumPy"
    return None if torch.cuda.is_available() else "torch finds no NVIDIA GPU"


def device_name(device):
    """The kind of a device, as reports name it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def milliseconds(call, warmup, repetition):
    """The median time of a call on the device, whose L2 cache is cleared before each call."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "`autotune` cannot time kernels while a CUDA graph is captured. Call the model once at "
            "this batch size and length inside `autotune` before the capture."
        )
    return triton.testing.do_bench(call, warmup, repetition, return_mode="median")


def _operator(name, function, fake, names, options, count):
    """The custom operator of a function that returns `count` arrays, and of its `Array`s."""

    def arguments_of(arguments):
        given = arguments[: len(names)]
        return given, dict(zip(options, arguments[len(names) :], strict=True))

    def call(*arguments):
        given, chosen = arguments_of(arguments)
        with on_device_of(_first(given)):
            found = function(*contiguous(*given), **chosen)[:count]
            return _results(found, lambda x: x, given)

    def call_fake(*arguments):
        given, chosen = arguments_of(arguments)
        found = fake(*given, **chosen)[:count]
        return _results(found, lambda array: new(array, _first(given)), given)

    results = "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"
    schema = f"({_parameters(names, options)}) -> {results}"
    operator = torch.library.custom_op(name, call, mutates_args=(), schema=schema)
    operator.register_fake(call_fake)
    return operator


def _parameters(names, options, updated=()):
    """The parameters in the schema of a custom operator."""
    tensors = [f"Tensor({n}!)? {n}" if n in updated else f"Tensor? {n}" for n in names]
    others = [f"{_SCHEMA_TYPES[kind]} {option}" for option, kind in options.items()]
    return ", ".join(tensors + others)


def forward_operation(name, forward, results, count, updates=()):
    """The function of an operation's tensors and options, without gradients, as a custom operator.

    forward and results are as those of an `Operation`, and return `count` arrays. updates: the
    tensors of which the last ones are the new values. Where states may be overwritten
    (`backends/torch/_states.py`), these are written in their places.
    """
    tensors, options = tensors_of(forward), options_of(forward)
    operator = _operator(
        f"keras_recurrent::triton_{name}", forward, results, tensors, options, count
    )
    if not updates:
        return lambda *given, **chosen: operator(*given, *(chosen[name] for name in options))
    places, new_ones = [tensors.index(updated) for updated in updates], count - len(updates)

    def overwrite(*arguments):
        given = contiguous(*arguments[: len(tensors)])
        chosen = dict(zip(options, arguments[len(tensors) :], strict=True))
        _overwrites.now = True
        try:
            with on_device_of(_first(given)):
                return _results(forward(*given, **chosen)[:new_ones], lambda x: x, given)
        finally:
            _overwrites.now = False

    def overwrite_fake(*arguments):
        given = arguments[: len(tensors)]
        chosen = dict(zip(options, arguments[len(tensors) :], strict=True))
        found = results(*given, **chosen)[:new_ones]
        return _results(found, lambda array: new(array, _first(given)), given)

    outputs = "Tensor" if new_ones == 1 else f"({', '.join(['Tensor'] * new_ones)})"
    in_place = torch.library.custom_op(
        f"keras_recurrent::triton_{name}_",
        overwrite,
        mutates_args=tuple(updates),
        schema=f"({_parameters(tensors, options, updates)}) -> {outputs}",
    )
    in_place.register_fake(overwrite_fake)

    def call(*given, **chosen):
        arguments = *given, *(chosen[name] for name in options)
        updated = [given[i] for i in places if given[i] is not None]
        if not inplace_states_allowed() or not all(t.is_contiguous() for t in updated):
            return operator(*arguments)
        found = in_place(*arguments)
        return *(found if new_ones > 1 else (found,)), *(given[i] for i in places)

    return call


def operation(definition):
    """The function of an `Operation`'s tensors and options, as a custom operator."""
    tensors, options = definition.tensors, definition.options
    with_gradient = len(definition.differentiable)
    num_results = definition.num_results
    name = f"keras_recurrent::triton_{definition.name}"

    kept = [f"kept_{i}" for i in range(definition.kept)]
    d_results = [f"d_result_{i}" for i in range(num_results)]
    forward = _operator(
        *(name, definition.forward, definition.results),
        *(tensors, options, num_results + len(kept)),
    )
    backward = _operator(
        *(f"{name}_backward", definition.backward, definition.gradients),
        *([*tensors, "output", *kept, *d_results], options, with_gradient),
    )

    def save(ctx, inputs, output):
        results = output if isinstance(output, tuple) else (output,)
        only_for_backward = results[num_results:]
        ctx.options = inputs[len(tensors) :]
        ctx.mark_non_differentiable(*only_for_backward)
        ctx.set_materialize_grads(False)  # nothing reads zeros of a state's size
        ctx.output = results[0].shape, results[0].dtype
        read = zip(tensors, inputs, strict=False)
        ctx.save_for_backward(
            *(None if name in definition.without else x for name, x in read),
            results[0] if definition.keeps_output else None,
            *only_for_backward,
        )

    def gradients(ctx, *d_results):
        # Read once: inside a checkpoint, each access computes the forward pass again.
        saved = ctx.saved_tensors
        d_output, *d_others = d_results[:num_results]
        if d_output is None:
            shape, dtype = ctx.output
            d_output = _first(d_others).new_zeros(shape, dtype=dtype)
        found = backward(*saved, d_output, *d_others, *ctx.options)
        found = (found,) if isinstance(found, torch.Tensor) else found
        needed = ctx.needs_input_grad[:with_gradient]
        given = (dx if need else None for need, dx in zip(needed, found, strict=True))
        return *given, *[None] * (len(tensors) - with_gradient + len(options))

    register_autograd(forward, gradients, save, backward)
    if not definition.is_token_wise:
        _register_sharding(definition, forward, backward)

    def call(*tensors, **chosen):
        found = forward(*tensors, *(chosen[name] for name in options))
        if not kept:
            return found
        return found[0] if num_results == 1 else found[:num_results]

    return call


def _register_sharding(definition, forward, backward):
    """Lets both operators of an operation over time take DTensors."""
    tensors, results = definition.dimensions, definition.result_dimensions
    with_gradient, num_results = len(definition.differentiable), definition.num_results
    _sharding.register(forward, tensors, results, definition.channels)
    _sharding.register(
        backward,
        (*tensors, results[0], *results[num_results:], *results[:num_results]),
        tensors[:with_gradient],
        definition.channels,
        [None if x in definition.without else i for i, x in enumerate(definition.differentiable)],
    )


def _first(tensors):
    return next(x for x in tensors if x is not None)


def contiguous(*tensors):
    """The tensors in the memory layout that kernels assume; None stays None."""
    return [None if x is None else x.contiguous() for x in tensors]


def aligned(*tensors):
    """Whether all begin at a multiple of 16 bytes, which parts of tensors need not."""
    return all(x is None or x.data_ptr() % 16 == 0 for x in tensors)


def on_device_of(tensor):
    """A context in which Triton launches on the tensor's device, not on torch's current one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def _results(found, tensor, given):
    """What an operator returns: an empty tensor stands for the gradient of an absent one."""
    found = tuple(_first(given).new_empty(0) if x is None else tensor(x) for x in found)
    return found if len(found) > 1 else found[0]
