"""Gradients of custom operators, which also work inside the transforms of `torch.func`.

The autograd kernel of `CustomOpDef.register_autograd` silently drops the tangents of forward mode,
so that derivatives are zero, and rejects `torch.func.grad`. The kernel here raises an error for
tangents, and computes gradients at each level of nested transforms.

In eager mode, operators are called without torch's dispatcher, which takes longer on the host than
most launches of an operator. `RecurrentBlock(32)` on 8×8 tokens takes 2.2 ms forward on one busy
CPU core. If `is_eager` returns False, it takes 3.0 ms; only in the argument checks of
`ops/operation.py`, 2.9 ms.
"""

import torch
from torch._C._dynamo import eval_frame as _dynamo
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from . import _sharding

# Devices for which a kernel takes precedence over torch's own, which is for all devices.
_DEVICES = (
    *("CPU", "CUDA", "Meta", "MPS", "XPU", "XLA", "HPU", "IPU", "Lazy", "Other", "NestedTensor"),
    *("PrivateUse1", "PrivateUse2", "PrivateUse3"),
)
_library = torch.library.Library("keras_recurrent", "FRAGMENT")
_EAGER_TYPES = frozenset(
    (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, type(None), bool, int, float, str)
)


def compile_only_in_graphs(function):
    """Decorates a gradient function that torch's compiler must skip outside of graphs.

    Outside of graphs the compiler would trace functions that autograd calls: it would read saved
    tensors twice, which a checkpoint recomputes only once. Inside graphs the function is compiled,
    which `torch.compiler.disable` would prevent.
    """
    strategy = _dynamo._FrameExecStrategy(_dynamo._FrameAction.SKIP, _dynamo._FrameAction.DEFAULT)
    _dynamo.set_code_exec_strategy(function.__code__, strategy)
    return function


def is_eager(inputs):
    """Returns True if a call can bypass torch's dispatcher, apart from autograd.

    No compiler, tracer, mode, transform, meta tensor or tensor subclass is involved.
    """
    first = None
    for first in inputs:
        if first is not None:
            break
    return (
        not torch.compiler.is_compiling()
        and _EAGER_TYPES.issuperset(map(type, inputs))
        and not getattr(first, "is_meta", False)
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and torch._C._get_tracing_state() is None
    )


def apply_function(function, *inputs):
    """Computes `function.apply(*inputs)`, in eager mode without its overhead.

    That inspects the signature of `forward`, which takes longer than most launches.
    """
    if not is_eager(inputs):
        return function.apply(*inputs)
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
        return super(torch.autograd.Function, function).apply(*inputs)
    return function.forward(*inputs)


def cast_output(tensor, dtype):
    """Casts the output of an autograd function; returns the tensor itself if it has this dtype.

    If `to` returned its argument, a function compiled by torch 2.11 would return one tensor as two
    outputs, and gradients would be 0.
    """
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def call_without_gradient(operator, *inputs):
    """Calls a custom operator that computes gradients, without the dispatcher in eager mode."""
    if torch.is_grad_enabled() or not is_eager(inputs):
        return operator(*inputs)
    return operator._init_fn(*inputs)


def register_autograd(operator, gradients, save, backward):
    """Registers `gradients` for a custom operator; its other derivatives raise errors.

    Returns a function that calls the operator, without the dispatcher in eager mode.

    Args:
        operator: the result of `torch.library.custom_op`.
        gradients: as in `CustomOpDef.register_autograd`. Not called if all incoming gradients are
            None, which requires `ctx.set_materialize_grads(False)`.
        save: the `setup_context` of `CustomOpDef.register_autograd`.
        backward: a non-differentiable custom operator, which `gradients` calls through
            `call_without_gradient`.
    """

    def save_nothing(ctx, inputs, output):
        pass

    def no_gradient(ctx, *d_results):
        raise NotImplementedError(_no_second_derivatives(operator))

    _register(backward, no_gradient, save_nothing)
    return _register(operator, gradients, save)


def _register(operator, compute_gradients, save):
    @compile_only_in_graphs
    def gradients(ctx, *d_results):
        if all(d is None for d in d_results):  # autograd calls this even then
            return (None,) * len(ctx.needs_input_grad)
        return compute_gradients(ctx, *d_results)

    operator.register_autograd(gradients, setup_context=save)  # for other devices
    overload = operator._opoverload

    compile_only_in_graphs(compute_gradients)
    compile_only_in_graphs(save)

    @compile_only_in_graphs
    def compute(keyset, inputs):
        with torch._C._AutoDispatchBelowAutograd():
            return overload.redispatch(keyset & torch._C._after_autograd_keyset, *inputs)

    class Gradient(torch.autograd.Function):
        @staticmethod
        @compile_only_in_graphs
        def forward(ctx, *inputs_and_call):
            *inputs, (keyset, transformed) = inputs_and_call
            if transformed:  # an outer transform may differentiate this computation
                with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
                    output = compute(keyset, inputs)
            else:
                output = compute(keyset, inputs)
            save(ctx, inputs, output)
            return output

        @staticmethod
        @compile_only_in_graphs
        def backward(ctx, *d_results):
            needs_input_grad = ctx.needs_input_grad
            ctx.needs_input_grad = needs_input_grad[:-1]
            try:
                found = gradients(ctx, *_sharding.as_dtensors(d_results))
            finally:
                ctx.needs_input_grad = needs_input_grad
            return *found, None

    class EagerGradient(torch.autograd.Function):
        @staticmethod
        @compile_only_in_graphs
        def forward(ctx, *inputs):
            output = operator._init_fn(*inputs)
            save(ctx, inputs, output)
            return output

        backward = staticmethod(gradients)

    @compile_only_in_graphs
    def kernel(keyset, *inputs):
        if forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled():
            _refuse_tangents(operator, inputs)
        if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs)):
            return compute(keyset, inputs)
        if not torch._C._are_functorch_transforms_active():
            return Gradient.apply(*inputs, (keyset, False))
        # torch has already selected the level of the transform, and needs the gradient at that
        # level: `Gradient.apply` would select one again.
        with enable_single_level_autograd_function():
            return super(torch.autograd.Function, Gradient).apply(*inputs, (keyset, True))

    for device in _DEVICES:
        _library.impl(overload.name(), kernel, f"Autograd{device}", with_keyset=True)

    def call(*inputs):
        if not is_eager(inputs):
            return operator(*inputs)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
            return super(torch.autograd.Function, EagerGradient).apply(*inputs)
        return operator._init_fn(*inputs)

    return call


def _refuse_tangents(operator, inputs):
    for tensor in inputs:
        if not isinstance(tensor, torch.Tensor):
            continue
        if forward_ad.unpack_dual(tensor).tangent is not None:
            name, is_gradient, plain = _describe(operator)
            if is_gradient:
                raise NotImplementedError(_no_second_derivatives(operator))
            raise NotImplementedError(
                f"`{name}` on torch has no derivative in forward mode (`torch.func.jvp`, "
                "`jacfwd` and `linearize`, `torch.autograd.forward_ad`). Use reverse mode: "
                "`torch.func.vjp` or `jacrev`, or `torch.autograd.grad`, or the Keras backend "
                f"tensorflow, which has both{plain}."
            )


def _no_second_derivatives(operator):
    name, _, plain = _describe(operator)
    return (
        f"`{name}` on torch has no second derivatives: its gradient cannot be differentiated "
        "(`create_graph=True`, `torch.func.hessian`, a gradient inside a gradient). Take "
        f"differences of gradients, or the Keras backend jax or tensorflow, which have them{plain}."
    )


def _describe(operator):
    """Name of the operation, True if the operator is its gradient, and an alternative, if any."""
    name = operator._opoverload.name().partition("::")[2]
    operation = name.removesuffix("_backward").removeprefix("triton_")
    plain = ""
    if not hasattr(torch.ops.keras_recurrent, operation):
        # In plain torch it is a function of torch's own operators.
        plain = ", or `with keras_recurrent.implementation('torch')`, which takes all derivatives"
    return operation, name.endswith("_backward"), plain
