"""Launches on torch, and custom operators made of them.

An operation is a custom operator of torch with a custom operator for its gradients: one node for
`torch.compile`, no graph breaks, and the same limitations as `backends/torch`.
"""

import concurrent.futures
import contextlib
import threading

import torch
import triton
from torch.autograd import forward_ad

from ...constants import LOWEST_CAPABILITY
from ...kernel import Kernel
from ...torch import _sharding
from ...torch._common import (
    capability,
    capability_reason,
    has_capability,
    product,
    register_gradient,
)
from ...torch._states import permission
from .._device.common import INTERPRETED, assembler_error_note
from .launch import flat
from .operation import parameters_of, tensors_among

_SCHEMA_TYPES: dict = {float: "float", bool: "bool", int: "int", str: "str"}
_SCHEMA_TYPES |= {str | None: "str?", int | None: "int?", float | None: "float?"}
_PDL_CAPABILITY = (9, 0)  # lowest compute capability with programmatic dependent launch


def unsupported_reason(*arguments, **named):
    """Reason why kernels cannot take the tensors among arguments, or None."""
    tensors = tensors_among((*arguments, *named.values()))
    if torch.float64 in [tensor.dtype for tensor in tensors]:
        return "computes in float32, got a float64 tensor"
    for device, is_cuda in {tensor.device: tensor.is_cuda for tensor in tensors}.items():
        if is_cuda:
            reason = capability_reason(device, LOWEST_CAPABILITY)
            if reason is not None:
                return reason
        elif not (INTERPRETED and device.type == "cpu"):
            return f"needs CUDA tensors, got one on {device}"
    return None


def token_wise_unsupported_reason(*arguments, **named):
    """Reason why kernels of operations without a state cannot take the tensors, or None."""
    tensors = tensors_among((*arguments, *named.values()))
    if any(map(_sharding.is_sharded, tensors)):
        return "does not support DTensors (plain torch does)"
    return unsupported_reason(*tensors)


def step_unsupported_reason(*arguments, **named):
    """Reason why kernels without gradients cannot take the tensors, or None."""
    present = tensors_among((*arguments, *named.values()))
    if torch.is_grad_enabled() and any(t.requires_grad for t in present):
        return "has no gradients, but a tensor requires one (plain torch has them)"
    has_tangents = forward_ad._current_level >= 0  # tensors have none outside `dual_level`
    if has_tangents and any(forward_ad.unpack_dual(t).tangent is not None for t in present):
        return "has no derivative in forward mode (plain torch has it)"
    return token_wise_unsupported_reason(*present)


def run(launch):
    """Runs a launch on the device of its inputs; returns its outputs."""
    outputs = make_outputs(launch, launch.in_place or _thread.updates_in_place)
    try:
        start(launch, (*launch.inputs, *outputs))
    except triton.runtime.errors.PTXASError as error:
        error.add_note(assembler_error_note(launch.kernel, "torch"))
        raise
    return outputs


def make_outputs(launch, in_place):
    """The outputs before a launch. in_place: boolean, whether updated inputs are their outputs."""
    first = _first_tensor(launch.inputs)

    def new(array):
        if type(array) is tuple:
            return tuple(map(new, array))
        return None if array is None else allocate(array, first)

    outputs = list(launch.outputs)
    for index, out in launch.updates:
        x = launch.inputs[index]
        outputs[out] = x if in_place else cast(x, outputs[out].dtype)
    updated = [out for _, out in launch.updates]
    return tuple([x if i in updated else new(x) for i, x in enumerate(outputs)])


# {key of a launch: (compiled kernel, constants, kernel)}. An entry keeps the kernel in memory, so
# that no other one gets its `id`, which takes less time than its hash.
_compiled: dict = {}
_MAX_COMPILED = 4096


def start(launch, tensors):
    """Starts a launch's kernel on its inputs and outputs.

    A later launch with an equal key starts the compiled kernel, which Triton would look up by the
    specialization of every argument. The key has the properties of tensors that kernels are
    specialized on, and all numbers.
    """
    kernel, arguments, given = launch.kernel, (*tensors, *launch.numbers), flat(tensors)
    if _thread.compiles_only:
        kernel.run(*arguments, grid=(launch.programs,), warmup=True, **launch.options)
        return
    device = _first_tensor(given).device
    types = [t if t is None else t.dtype for t in given]
    are_unaligned = [t is not None and t.data_ptr() % 16 for t in given]
    names_and_values = *launch.options, *launch.options.values()
    key = id(kernel), device, *names_and_values, *launch.numbers, *types, *are_unaligned
    found = _compiled.get(key)  # looked up once: another thread may clear the entries
    if found is not None:
        compiled, constants, _ = found
        _start_compiled(compiled, launch.programs, device, (*arguments, *constants))
        return
    compiled = kernel[(launch.programs,)](*arguments, **launch.options)
    if isinstance(compiled, triton.compiler.CompiledKernel):  # not in the interpreter
        if len(_compiled) >= _MAX_COMPILED:
            _compiled.clear()
        names = kernel.arg_names[len(arguments) :]
        _compiled[key] = compiled, tuple(launch.options[name] for name in names), kernel


def _start_compiled(compiled, programs, device, arguments):
    """Calls `compiled[programs, 1, 1](*arguments)`, without what only the hooks of Triton need."""
    enter, leave = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
        compiled[programs, 1, 1](*arguments)
        return
    handles = current_stream(device), compiled.function, compiled.packed_metadata
    compiled.run(programs, 1, 1, *handles, None, None, None, *arguments)


def current_stream(device):
    """The address of torch's current stream of a device."""
    return triton.runtime.driver.active.get_current_stream(device.index)


class _Thread(threading.local):
    """Flags of a thread.

    Attributes:
        updates_in_place: launches write updated states into the memory of the previous ones.
        compiles_only: launches compile their kernels, but do not run; see `compile_ahead`.
    """

    updates_in_place = False
    compiles_only = False


_thread = _Thread()


@contextlib.contextmanager
def compile_ahead():
    """Context manager in which launches do not run: threads compile their kernels until its end.

    Launches return zeros, which are valid indices. Yields True. Without a GPU, it yields
    False, and launches run. If contexts are nested, the outermost one waits for the threads.
    """
    if INTERPRETED or not torch.cuda.is_available() or _thread.compiles_only:
        yield _thread.compiles_only
        return
    threads = concurrent.futures.ThreadPoolExecutor()
    # An error is raised when the kernel is first launched.
    with threads, triton.AsyncCompileMode(threads, ignore_errors=True):
        _thread.compiles_only = True
        try:
            yield True
        finally:
            _thread.compiles_only = False


def allocate(array, like):
    """A tensor for an `Array`, on the device of `like`."""
    is_zero = array.zeros or _thread.compiles_only
    make = torch.zeros if is_zero else torch.empty  # faster than `like.new_empty`
    return make(array.shape, dtype=getattr(torch, array.dtype), device=like.device)


def cast(x, dtype, copy=True):
    """Returns x in a dtype, contiguous, in memory that it shares with no other tensor.

    Results of an operator must not share memory with other tensors.
    copy: False for a new tensor x, which is then returned itself if it already has the dtype.
    """
    return x.to(getattr(torch, dtype), copy=copy, memory_format=torch.contiguous_format)


zeros_like = torch.zeros_like


def matrix_product(a, b, dtype):
    if torch.is_autocast_enabled(a.device.type):  # which would return another dtype
        with torch.autocast(a.device.type, enabled=False):
            return product(a, b, getattr(torch, dtype))
    return product(a, b, getattr(torch, dtype))


def search_sorted_rows(rows, count, right=False):
    """The insertion index of 0, 1, ..., count - 1 in each sorted row: int32 [B, count].

    Of several possible indices it is the first, or, if `right`, the last, as in `searchsorted`.
    """
    numbers = torch.arange(count, device=rows.device, dtype=torch.int32)
    numbers = numbers.expand(rows.shape[0], count).contiguous()
    return torch.searchsorted(rows, numbers, right=right, out_int32=True)


def compute_capability(x):
    return capability(x.device) if x.is_cuda else None


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
    """The name of a device in reports."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def milliseconds(call, warmup, repetition):
    """The median time of a call on the device, with the L2 cache cleared before each call."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "`autotune` cannot time kernels while a CUDA graph is captured. Call the model once at "
            "this batch size and length inside `autotune` before the capture."
        )
    return triton.testing.do_bench(call, warmup, repetition, return_mode="median")


def _operator(name, function, fake, parameters, count, updates=()):
    """Registers a custom operator for a function that returns `count` arrays.

    fake: the function of the same arguments that returns `Array`s. parameters: the `Parameters`.
    count: None if it depends on the arguments; the results are then a list. updates: the names of
    tensors updated in place.
    """
    names, num_tensors = [*parameters.tensors, *parameters.options], len(parameters.tensors)

    def split_arguments(arguments):
        # PyTorch leaves out the last arguments if they equal their defaults.
        missing = [parameters.defaults[name] for name in names[len(arguments) :]]
        arguments = *arguments, *missing
        chosen = dict(zip(parameters.options, arguments[num_tensors:], strict=True))
        return arguments[:num_tensors], chosen

    def call(*arguments):
        tensors, chosen = split_arguments(arguments)
        with device_guard(_first_tensor(tensors)):
            outputs = function(*contiguous(*tensors), **chosen)[:count]
            return _operator_outputs(outputs, count, lambda x: x, tensors)

    def call_fake(*arguments):
        tensors, chosen = split_arguments(arguments)
        outputs = fake(*tensors, **chosen)[:count]
        first = _first_tensor(tensors)
        return _operator_outputs(outputs, count, lambda array: allocate(array, first), tensors)

    types = dict.fromkeys(parameters.tensors, "Tensor?")
    types |= dict.fromkeys(parameters.lists, "Tensor?[]")
    types |= {name: f"Tensor({name}!)?" for name in updates}
    types |= {name: _SCHEMA_TYPES[kind] for name, kind in parameters.options.items()}
    defaults = {name: f"={default}" for name, default in parameters.defaults.items()}
    given = ", ".join(f"{kind} {name}{defaults.get(name, '')}" for name, kind in types.items())
    results = f"({', '.join(['Tensor'] * (count or 0))})"
    results = {None: "Tensor[]", 1: "Tensor"}.get(count, results)
    schema = f"({given}) -> {results}"
    operator = torch.library.custom_op(name, call, mutates_args=updates, schema=schema)
    operator.register_fake(call_fake)
    return operator


def decoding_step(unsupported, results, count=None, updates=(), name=None, on_jax=True):
    """Decorator that makes the function of a decoding step a `Kernel`, without gradients.

    The kernel calls a custom operator. unsupported: the kernel's function of this name; None is
    `step_unsupported_reason`. on_jax: False if XLA replaces the kernel on JAX.

    The function takes tensors (or Nones), lists of tensors, annotated `list`, and options, which
    have other annotations. It returns `count` arrays, or, if that is None, a list of any length;
    `results` takes the same arguments and returns `Array`s. The last ones are the new values of the
    tensors named in `updates`. Where states may be overwritten (`backends/torch/_states.py`), a
    second operator updates these tensors in place. name: of the operator, if not the function's.
    """

    del on_jax
    unsupported = unsupported or step_unsupported_reason

    def decorate(forward):
        parameters = parameters_of(forward)
        operator_name = f"keras_recurrent::triton_{name or forward.__name__}"
        operator = _operator(operator_name, forward, results, parameters, count)
        if not updates:
            return Kernel(lambda *given, **named: operator(*given, **named), unsupported)

        def overwrite(*given, **chosen):
            _thread.updates_in_place = True
            try:
                return forward(*given, **chosen)
            finally:
                _thread.updates_in_place = False

        num_new = count - len(updates)
        in_place = _operator(f"{operator_name}_", overwrite, results, parameters, num_new, updates)

        def call(*given, **named):
            arguments = dict(zip(parameters.tensors, given, strict=False)) | named
            states = [arguments[name] for name in updates]
            present = [state for state in states if state is not None]
            if not permission.inplace or not all(t.is_contiguous() for t in present):
                return operator(*given, **named)
            outputs = in_place(*given, **named)
            return *(outputs if num_new > 1 else (outputs,)), *states

        return Kernel(call, unsupported)

    return decorate


def operation(definition):
    """Makes an `Operation` a differentiable `Kernel`, of two custom operators."""
    parameters = definition.parameters
    tensors, options, *_ = parameters
    num_differentiable = len(definition.differentiable)
    num_results = definition.num_results
    name = f"keras_recurrent::triton_{definition.name}"

    residuals = [f"kept_{i}" for i in range(len(definition.residuals))]
    d_results = [f"d_result_{i}" for i in range(num_results)]
    num_outputs = num_results + len(residuals)
    forward = _operator(name, definition.forward, definition.results, parameters, num_outputs)
    parameters = parameters._replace(tensors=[*tensors, "output", *residuals, *d_results])
    backward = _operator(
        *(f"{name}_backward", definition.backward, definition.gradients),
        *(parameters, num_differentiable),
    )
    apply = register_gradient(
        definition.name,
        forward,
        backward,
        keep_output=definition.saves_output,
        dropped=[tensors.index(name) for name in definition.unused_in_backward],
        options=len(options),
        residuals=definition.residuals,
        undifferentiated=len(tensors) - num_differentiable,
        materializes=False,
        shards=not definition.is_token_wise,
    )
    names = *tensors, *options

    def function(**arguments):
        outputs = apply(*[arguments.get(name) for name in names])
        if not residuals:
            return outputs
        return outputs[0] if num_results == 1 else outputs[:num_results]

    effect = definition.effect_on_state
    return Kernel(function, definition.unsupported, effect_on_state=effect)


def _first_tensor(tensors):
    for first in tensors:
        if first is not None:
            return _first_tensor(first) if type(first) is tuple else first


def contiguous(*tensors):
    """The tensors, and those in lists, in the contiguous layout that kernels expect, or None.

    Kernels read the memory of a tensor, so a view with torch's negative bit is copied.
    """
    return [contiguous(*x) if isinstance(x, list) else _contiguous(x) for x in tensors]


def _contiguous(x):
    return None if x is None else (x.resolve_neg() if x.is_neg() else x).contiguous()


def are_aligned(*tensors):
    """Returns True if all tensors begin at multiples of 16 bytes, which views may not do."""
    return all(x is None or x.data_ptr() % 16 == 0 for x in tensors)


def device_guard(tensor):
    """A context in which Triton launches on the tensor's device instead of torch's current one."""
    # From an index, torch makes the context faster than from a device.
    return torch.cuda.device(tensor.get_device()) if tensor.is_cuda else contextlib.nullcontext()


def _operator_outputs(outputs, count, tensor, given):
    """The outputs of an operator; None, the gradient of an absent tensor, becomes an empty one."""
    outputs = [_first_tensor(given).new_empty(0) if x is None else tensor(x) for x in outputs]
    if count is None:
        return outputs
    return tuple(outputs) if count > 1 else outputs[0]
