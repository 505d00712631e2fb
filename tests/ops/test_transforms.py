"""Function transforms and higher derivatives on torch: exact, or an error with an alternative."""

import keras
import pytest

from keras_recurrent import ops
from tests.ops import cases, native, small, token_wise

if keras.config.backend() != "torch":
    pytest.skip("transforms of torch", allow_module_level=True)

import torch
from torch.autograd import forward_ad

from keras_recurrent.backends.torch._autograd import is_eager
from tests.operators import operator_names
from tests.ops.judge import every_implementation, kernels, parametrize_kernels

KERNELS = [k for k in kernels(small.OPERATIONS) if k[1] != "cudnn"]  # which needs long sequences
# All operators are registered by the same code. In Triton's interpreter others take seconds.
CHEAP = [k for k in KERNELS if k[1] == "torch" or k[0] in token_wise.DRAW]
every_kernel = parametrize_kernels(KERNELS)
every_cheap_kernel = parametrize_kernels(CHEAP)

# torch computes members of `vmap` one after another, and warns once.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


def operator_name(operation, implementation):
    return operation if implementation == "torch" else f"{implementation}_{operation}"


def is_one_operator(operation, implementation):
    return hasattr(torch.ops.keras_recurrent, operator_name(operation, implementation))


def draw_loss(operation, implementation, drawn=None):
    """A scalar loss of an operation's results, and the dict of tensors that it differentiates."""
    drawn = drawn or small.draw(operation)
    tensors = native.tensors(drawn)
    constants = cases.CONSTANTS.get(operation, ())
    floats = {n: tensors.pop(n) for n in drawn.differentiated if n not in constants}

    def loss(floats):
        arguments = {**cases.nest({**tensors, **floats}), **drawn.options}
        results = getattr(ops, operation)(**arguments, implementation=implementation)
        results = keras.tree.flatten(results)
        return sum(result.sin().sum() for result in results if result.is_floating_point())

    if operation != "log_forget_gate":
        return loss, floats
    # log β and log(1 - β) depend on each other: differentiate by the logits of β.
    log_beta, log_rest = floats.pop("lower_bound")

    def loss_of_logits(floats):
        p = floats["logits of beta"]
        bound = torch.stack((torch.nn.functional.logsigmoid(p), torch.nn.functional.logsigmoid(-p)))
        return loss({"logits": floats["logits"], "lower_bound": bound})

    return loss_of_logits, {**floats, "logits of beta": log_beta - log_rest}


def gradients(loss, tensors):
    leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
    return dict(zip(leaves, torch.autograd.grad(loss(leaves), leaves.values()), strict=True))


def dot(a, b):
    return sum((a[name] * b[name]).sum() for name in a)


@every_kernel
def test_forward_mode_is_exact_or_an_error(operation, implementation):
    """A derivative in forward mode is wrong or zero, without an error."""
    loss, tensors = draw_loss(operation, implementation)
    tangents = {name: torch.randn_like(t) for name, t in tensors.items()}

    def dual():
        with forward_ad.dual_level():
            duals = {n: forward_ad.make_dual(t, tangents[n]) for n, t in tensors.items()}
            return forward_ad.unpack_dual(loss(duals)).tangent

    for derivative in (lambda: torch.func.jvp(loss, (tensors,), (tangents,))[1], dual):
        if is_one_operator(operation, implementation):
            with pytest.raises(NotImplementedError, match=f"`{operation}` .* Use reverse mode"):
                derivative()
        else:
            expected = dot(gradients(loss, tensors), tangents)
            torch.testing.assert_close(derivative(), expected, rtol=1e-4, atol=1e-5)


def test_forward_mode_by_other_tensors_is_exact():
    """A derivative in forward mode fails although the operation does not depend on the tangent."""
    loss, tensors = draw_loss("linear_scan", "torch")
    one = torch.ones(())
    _, derivative = torch.func.jvp(lambda scale: scale * loss(tensors), (one,), (one,))
    torch.testing.assert_close(derivative, loss(tensors))


@parametrize_kernels([k for k in CHEAP if is_one_operator(*k) and "crossentropy" not in k[0]])
def test_eager_call_without_dispatcher_equals_operator(operation, implementation, monkeypatch):
    """Eager calls differ from operators, or bypass a dispatch mode that must see the operator.

    Such an operator would be missing in traced programs and FLOP counts.
    """
    loss, tensors = draw_loss(operation, implementation)
    dispatched, names = operator_names(lambda: gradients(loss, tensors))
    name = operator_name(operation, implementation)
    assert {name, f"{name}_backward"} <= names
    monkeypatch.setattr(torch.library.CustomOpDef, "__call__", None)
    direct = gradients(loss, tensors)
    assert all(torch.equal(direct[n], dispatched[n]) for n in dispatched)


@every_implementation("rms_norm")
def test_kernel_of_negated_view_equals_kernel_of_tensor(implementation):
    """A kernel reads the memory of a view whose numbers are negated when they are read."""
    loss, tensors = draw_loss("rms_norm", implementation)
    expected = gradients(loss, tensors)
    negated = gradients(loss, {n: torch._neg_view(-t) for n, t in tensors.items()})
    assert all(torch.equal(negated[n], expected[n]) for n in expected)


def test_meta_tensor_after_none_is_not_eager():
    """A gradient on meta tensors, whose first input may be None, runs a kernel."""
    assert is_eager((None, torch.ones(1), 1e-5))
    assert not is_eager((None, torch.ones(1, device="meta"), 1e-5))


def nested_loss(loss):
    """A loss that contains the gradient of another one, by a scale; it equals the loss."""
    scale = torch.tensor(2.0, requires_grad=True)
    return lambda tensors: torch.func.grad(lambda scale: scale * loss(tensors))(scale)


@every_cheap_kernel
def test_functional_gradients_equal_autograd(operation, implementation):
    """`torch.func.grad` or `vjp` differ, also of a gradient inside of a gradient."""
    loss, tensors = draw_loss(operation, implementation)
    expected = gradients(loss, tensors)
    torch.testing.assert_close(torch.func.grad(loss)(tensors), expected)
    value, pullback = torch.func.vjp(loss, tensors)
    torch.testing.assert_close(pullback(torch.ones_like(value))[0], expected)
    torch.testing.assert_close(torch.func.grad(nested_loss(loss))(tensors), expected)
    torch.testing.assert_close(gradients(nested_loss(loss), tensors), expected)


@pytest.mark.parametrize("operation", cases.DRAW)
def test_nested_gradient_of_single_token_equals_autograd(operation):
    """A single token runs the code without gradients, although an outer gradient is needed."""
    drawn = cases.draw(operation, cases.Case(2, 1, 3, state=True, heads=(2, 1)))
    loss, tensors = draw_loss(operation, "torch", drawn)
    expected = gradients(loss, tensors)
    torch.testing.assert_close(torch.func.grad(nested_loss(loss))(tensors), expected)


@every_implementation("linear_scan")
def test_vmap_of_gradients_and_jacobian_equal_autograd(implementation):
    """Gradients of each sequence of a batch, or the Jacobian of their losses, are wrong."""
    loss, tensors = draw_loss("linear_scan", implementation)
    sequences = {name: t[:, None] for name, t in tensors.items()}
    expected = gradients(loss, tensors)
    mapped = torch.func.vmap(torch.func.grad(loss))(sequences)
    torch.testing.assert_close({n: t[:, 0] for n, t in mapped.items()}, expected)
    jacobian = torch.func.jacrev(torch.func.vmap(loss))(sequences)
    for name, t in jacobian.items():
        torch.testing.assert_close(t.sum(0)[:, 0], expected[name])
        assert not t[0, 1].any()


@every_cheap_kernel
def test_second_derivatives_are_exact_or_an_error(operation, implementation):
    """A second derivative is wrong or zero, without an error."""
    loss, tensors = draw_loss(operation, implementation)
    ones = {name: torch.ones_like(t) for name, t in tensors.items()}

    def slope(tensors):
        return dot(torch.func.grad(loss)(tensors), ones)

    def twice(tensors):
        leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
        first = torch.autograd.grad(loss(leaves), leaves.values(), create_graph=True)
        second = torch.autograd.grad(sum(t.sum() for t in first), leaves.values())
        return dict(zip(leaves, second, strict=True))

    if is_one_operator(operation, implementation):
        message = f"`{operation}` on torch has no (second derivatives|derivative in forward mode)"
        for derivative in (torch.func.grad(slope), twice, torch.func.jacfwd(torch.func.grad(loss))):
            with pytest.raises(NotImplementedError, match=message):
                derivative(tensors)
        return
    right, left = ({n: t + step for n, t in tensors.items()} for step in (1e-2, -1e-2))
    expected = (slope(right) - slope(left)) / 2e-2
    for derivative in (torch.func.grad(slope), twice):
        torch.testing.assert_close(dot(derivative(tensors), ones), expected, rtol=1e-2, atol=1e-2)
