"""Transforms of functions and higher derivatives on torch: right, or an error that says the way."""

import keras
import pytest

from keras_recurrent import dispatch, ops
from tests.ops import cases, test_linear_crossentropy, token_wise
from tests.ops.test_ops import OPTIONS

if keras.config.backend() != "torch":
    pytest.skip("transforms of torch", allow_module_level=True)

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from keras_recurrent.backends.torch._autograd import is_eager
from tests.ops.judge import kernels
from tests.ops.native import tensor

KERNELS = [
    (operation, implementation)
    for operation in (*cases.DRAW, *token_wise.DRAW, "linear_crossentropy")
    for implementation, module in dispatch.IMPLEMENTATIONS[operation].items()
    if not isinstance(module, str) and implementation != "cudnn"  # which needs long sequences
]
# All are registered in one way. In Triton's interpreter most take seconds.
CHEAP = [k for k in KERNELS if k[1] == "torch" or k[0] in (*token_wise.DRAW, "linear_scan")]
every_kernel = pytest.mark.parametrize(("operation", "implementation"), KERNELS)
every_cheap_kernel = pytest.mark.parametrize(("operation", "implementation"), CHEAP)

# torch takes the rows of `vmap` one by one, and says so once.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


def arguments_of(operation):
    """`({name: tensor}, options, names of those that have gradients)` of an operation."""
    if operation == "linear_crossentropy":
        floats, integers = test_linear_crossentropy.draw(test_linear_crossentropy.Case((2, 3)))
        given = {n: tensor(t, "float32") for n, t in floats.items()}
        return given | {n: tensor(t, "int32") for n, t in integers.items()}, {}, [*floats]
    if operation in token_wise.DRAW:
        drawn = token_wise.draw(operation, token_wise.Case((2, 5, 8)))
        options, differentiated = drawn.options, drawn.differentiated
    else:
        drawn = cases.draw(operation, cases.Case(2, 5, 3))
        options = OPTIONS.get(operation, {})
        differentiated = [n for n in drawn.tensors if n not in cases.CONSTANTS]
    given = {n: tensor(t, drawn.dtypes[n]) for n, t in drawn.tensors.items() if t is not None}
    return given, options, differentiated


def example(operation, implementation):
    """A function of a dict of tensors with a number as its result, and such a dict."""
    given, options, differentiated = arguments_of(operation)
    options = {**options, "implementation": implementation}

    def loss(tensors):
        arguments = {**given, **tensors}
        results = keras.tree.flatten(getattr(ops, operation)(**arguments, **options))
        return sum(result.sin().sum() for result in results if result.is_floating_point())

    tensors = {name: given[name] for name in differentiated}
    if operation != "log_forget_gate":
        return loss, tensors
    # Steps to all sides would part log β and log(1 - β), which belong together.
    log_beta, log_rest = tensors.pop("lower_bound")

    def loss_of_logits(tensors):
        p = tensors["logits of beta"]
        bound = torch.stack((torch.nn.functional.logsigmoid(p), torch.nn.functional.logsigmoid(-p)))
        return loss({"logits": tensors["logits"], "lower_bound": bound})

    return loss_of_logits, {**tensors, "logits of beta": log_beta - log_rest}


def gradients(loss, tensors, **kwargs):
    leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
    found = torch.autograd.grad(loss(leaves), leaves.values(), **kwargs)
    return dict(zip(leaves, found, strict=True))


def dot(a, b):
    return sum((a[name] * b[name]).sum() for name in a)


class Operators(TorchDispatchMode):
    """Notes the names of operators."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@every_kernel
def test_forward_mode_is_right_or_refused(operation, implementation):
    loss, tensors = example(operation, implementation)
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
            wanted = dot(gradients(loss, tensors), tangents)
            torch.testing.assert_close(derivative(), wanted, rtol=1e-4, atol=1e-5)


def test_forward_mode_beside_an_operation_is_not_refused():
    loss, tensors = example("linear_scan", "torch")
    one = torch.ones(())
    _, derivative = torch.func.jvp(lambda scale: scale * loss(tensors), (one,), (one,))
    torch.testing.assert_close(derivative, loss(tensors))


def is_one_operator(operation, implementation):
    name = operation if implementation == "torch" else f"{implementation}_{operation}"
    return hasattr(torch.ops.keras_recurrent, name)


@pytest.mark.parametrize(
    ("operation", "implementation"),
    [k for k in CHEAP if is_one_operator(*k) and "crossentropy" not in k[0]],
)
def test_calls_without_the_dispatcher(operation, implementation, monkeypatch):
    """Eager calls have the results of the operators, which are called where a mode must see them.

    An operator that a mode did not see would be missing in traced programs and FLOP counts.
    """
    loss, tensors = example(operation, implementation)
    with Operators() as operators:
        dispatched = gradients(loss, tensors)
    name = operation if implementation == "torch" else f"{implementation}_{operation}"
    assert {name, f"{name}_backward"} <= operators.names
    monkeypatch.setattr(torch.library.CustomOpDef, "__call__", None)
    directly = gradients(loss, tensors)
    assert all(torch.equal(directly[n], dispatched[n]) for n in dispatched)


@pytest.mark.parametrize(
    ("operation", "implementation"), [k for k in KERNELS if k[0] == "rms_norm"]
)
def test_negative_bit(operation, implementation):
    """Fails if a kernel reads the memory of a view whose numbers are negated when they are read."""
    loss, tensors = example(operation, implementation)
    expected = gradients(loss, tensors)
    found = gradients(loss, {n: torch._neg_view(-t) for n, t in tensors.items()})
    assert all(torch.equal(found[n], expected[n]) for n in found)


def test_meta_tensor_after_none_is_not_eager():
    """Fails if a gradient on meta tensors, whose first input may be None, runs a kernel."""
    assert is_eager((None, torch.ones(1), 1e-5))
    assert not is_eager((None, torch.ones(1, device="meta"), 1e-5))


@every_cheap_kernel
def test_gradients_of_functions(operation, implementation):
    loss, tensors = example(operation, implementation)
    wanted = gradients(loss, tensors)
    torch.testing.assert_close(torch.func.grad(loss)(tensors), wanted)
    value, pullback = torch.func.vjp(loss, tensors)
    torch.testing.assert_close(pullback(torch.ones_like(value))[0], wanted)
    # A gradient inside a gradient, where only one of them is the operation's.
    scale = torch.tensor(2.0, requires_grad=True)

    def inner(tensors):
        return torch.func.grad(lambda scale: scale * loss(tensors))(scale)

    torch.testing.assert_close(torch.func.grad(inner)(tensors), wanted)
    torch.testing.assert_close(gradients(inner, tensors), wanted)


@pytest.mark.parametrize("operation", cases.DRAW)
def test_gradients_of_one_token_inside_another_gradient(operation):
    """Where no gradient is asked for, plain operators compute a token; here one is, further out."""
    drawn = cases.draw(operation, cases.Case(2, 1, 3, state=True, heads=(2, 1)))
    given = {n: tensor(t, drawn.dtypes[n]) for n, t in drawn.tensors.items() if t is not None}
    states = cases.named("state", drawn.initial_state)
    state = {n: tensor(t, drawn.dtypes.get(n, "int32")) for n, t in states.items()}
    options = {**drawn.options, "initial_state": cases.unnamed("state", state)}
    options["implementation"] = "torch"
    tensors = {n: given[n] for n in given if n not in cases.CONSTANTS}

    def loss(tensors):
        results = keras.tree.flatten(getattr(ops, operation)(**{**given, **tensors}, **options))
        return sum(result.sin().sum() for result in results if result.is_floating_point())

    scale = torch.tensor(2.0, requires_grad=True)

    def inner(tensors):
        return torch.func.grad(lambda scale: scale * loss(tensors))(scale)

    torch.testing.assert_close(torch.func.grad(inner)(tensors), gradients(loss, tensors))


@pytest.mark.parametrize("implementation", [name for _, name in kernels(["linear_scan"])])
def test_gradients_row_by_row(implementation):
    """One gradient for each of a batch of rows, and the Jacobian of their losses."""
    loss, tensors = example("linear_scan", implementation)
    rows = {name: t[:, None] for name, t in tensors.items()}
    found = torch.func.vmap(torch.func.grad(loss))(rows)
    wanted = gradients(loss, tensors)
    torch.testing.assert_close({n: t[:, 0] for n, t in found.items()}, wanted)
    jacobian = torch.func.jacrev(torch.func.vmap(loss))(rows)
    for name, t in jacobian.items():
        torch.testing.assert_close(t.sum(0)[:, 0], wanted[name])
        assert not t[0, 1].any()


@every_cheap_kernel
def test_second_derivatives_are_right_or_refused(operation, implementation):
    loss, tensors = example(operation, implementation)
    one = {name: torch.ones_like(t) for name, t in tensors.items()}

    def slope(tensors):
        return dot(torch.func.grad(loss)(tensors), one)

    def twice(tensors):
        leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
        found = torch.autograd.grad(loss(leaves), leaves.values(), create_graph=True)
        slope = sum(t.sum() for t in found)
        return dict(zip(leaves, torch.autograd.grad(slope, leaves.values()), strict=True))

    ways = torch.func.grad(slope), twice, torch.func.jacfwd(torch.func.grad(loss))
    if is_one_operator(operation, implementation):
        refusal = f"`{operation}` on torch has no (second derivatives|derivative in forward mode)"
        for derivative in ways:
            with pytest.raises(NotImplementedError, match=refusal):
                derivative(tensors)
        return
    step = {name: t + 1e-2 for name, t in tensors.items()}
    back = {name: t - 1e-2 for name, t in tensors.items()}
    second = (slope(step) - slope(back)) / 2e-2
    for derivative in ways[:2]:
        torch.testing.assert_close(dot(derivative(tensors), one), second, rtol=1e-2, atol=1e-2)


def test_what_has_no_rule_may_be_given_one():
    """Inside a function with a forward rule of its own, nothing is refused."""

    class Shifted(torch.autograd.Function):
        @staticmethod
        def forward(x, log_a):
            return ops.linear_scan(x, log_a)[0]

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_forward(inputs[1])

        @staticmethod
        def jvp(ctx, dx, _):
            return ops.linear_scan(dx, *ctx.saved_tensors)[0]

    _, tensors = example("linear_scan", "torch")
    x, log_a = tensors.values()
    dx = torch.randn_like(x)
    _, found = torch.func.jvp(lambda x: Shifted.apply(x, log_a), (x,), (dx,))
    torch.testing.assert_close(found, ops.linear_scan(dx, log_a)[0])
