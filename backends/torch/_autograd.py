"""How torch differentiates a custom operator, inside the transforms of `torch.func` as well.

`CustomOpDef.register_autograd` makes a kernel for derivatives that drops the tangents of forward
mode, so that derivatives are zero without a word, and that refuses `torch.func.grad`. The kernel
here refuses tangents, and computes gradients at each level of nested transforms.
"""

import torch
from torch._C._dynamo import eval_frame as _dynamo
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from . import _sharding

# For these, a kernel can be registered that goes before torch's own, which is for all devices.
_DEVICES = (
    *("CPU", "CUDA", "Meta", "MPS", "XPU", "XLA", "HPU", "IPU", "Lazy", "Other", "NestedTensor"),
    *("PrivateUse1", "PrivateUse2", "PrivateUse3"),
)
_library = torch.library.Library("keras_recurrent", "FRAGMENT")


def compile_only_in_graphs(function):
    """A function of gradients that torch's compiler leaves alone where it runs outside of a graph.

    There the compiler would look into what torch calls by itself: it would read saved tensors
    twice, which a checkpoint computes again but once. What is in a graph is compiled as ever, which
    `torch.compiler.disable` would prevent.
    """
    strategy = _dynamo._FrameExecStrategy(_dynamo._FrameAction.SKIP, _dynamo._FrameAction.DEFAULT)
    _dynamo.set_code_exec_strategy(function.__code__, strategy)
    return function


def register_autograd(operator, gradients, save, backward):
    """Makes `gradients` the gradient of a custom operator; its other derivatives raise errors.

    Args:
        operator: what `torch.library.custom_op` returned.
        gradients: as `CustomOpDef.register_autograd` takes it. Not called where no gradient
            arrives, which is told from zeros after `ctx.set_materialize_grads(False)` alone.
        save: as it takes `setup_context`.
        backward: the custom operator that `gradients` calls, which has no gradient of its own.
    """

    def save_nothing(ctx, inputs, output):
        pass

    def no_gradient(ctx, *d_results):
        raise NotImplementedError(_no_second_derivatives(operator))

    _register(operator, gradients, save)
    _register(backward, no_gradient, save_nothing)


def _register(operator, of_some, save):
    @compile_only_in_graphs
    def gradients(ctx, *d_results):
        if all(d is None for d in d_results):  # autograd calls this even then
            return (None,) * len(ctx.needs_input_grad)
        return of_some(ctx, *d_results)

    operator.register_autograd(gradients, setup_context=save)  # for other devices
    overload = operator._opoverload

    compile_only_in_graphs(of_some)
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
            if transformed:  # an outer transform may differentiate what is computed here
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
                found = gradients(ctx, *_sharding.alike(d_results))
            finally:
                ctx.needs_input_grad = needs_input_grad
            return *found, None

    @compile_only_in_graphs
    def kernel(keyset, *inputs):
        if forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled():
            _refuse_tangents(operator, inputs)
        if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs)):
            return compute(keyset, inputs)
        if not torch._C._are_functorch_transforms_active():
            return Gradient.apply(*inputs, (keyset, False))
        # torch has found the level of the transform already, and wants the gradient at that one:
        # `Gradient.apply` would look for the level once more.
        with enable_single_level_autograd_function():
            return super(torch.autograd.Function, Gradient).apply(*inputs, (keyset, True))

    for device in _DEVICES:
        _library.impl(overload.name(), kernel, f"Autograd{device}", with_keyset=True)


def _refuse_tangents(operator, inputs):
    for tensor in inputs:
        if not isinstance(tensor, torch.Tensor):
            continue
        if forward_ad.unpack_dual(tensor).tangent is not None:
            name, is_gradient, plain = _described(operator)
            if is_gradient:
                raise NotImplementedError(_no_second_derivatives(operator))
            raise NotImplementedError(
                f"`{name}` on torch has no derivative in forward mode (`torch.func.jvp`, "
                "`jacfwd` and `linearize`, `torch.autograd.forward_ad`). Use reverse mode: "
                "`torch.func.vjp` or `jacrev`, or `torch.autograd.grad`, or the Keras backend "
                f"tensorflow, which has both{plain}."
            )


def _no_second_derivatives(operator):
    name, _, plain = _described(operator)
    return (
        f"`{name}` on torch has no second derivatives: its gradient cannot be differentiated "
        "(`create_graph=True`, `torch.func.hessian`, a gradient inside a gradient). Take "
        f"differences of gradients, or the Keras backend jax or tensorflow, which have them{plain}."
    )


def _described(operator):
    """The operation's name; whether the operator is its gradient; and another way out, if any."""
    name = operator._opoverload.name().partition("::")[2]
    operation = name.removesuffix("_backward").removeprefix("triton_")
    plain = ""
    if not hasattr(torch.ops.keras_recurrent, operation):
        # Plain torch has it as a function of torch's own operators.
        plain = ", or `with keras_recurrent.implementation('torch')`, which takes all derivatives"
    return operation, name.endswith("_backward"), plain
