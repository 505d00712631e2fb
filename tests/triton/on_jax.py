"""The Triton kernels in programs of JAX, in Triton's interpreter. Prints JSON, {test: its error}.

Runs in a separate process: where Triton's interpreter is on, nothing can be lowered for a GPU.
"""

import functools
import json
import sys
import traceback

import jax
import jax.numpy as jnp
import numpy as np

from keras_recurrent import dispatch
from keras_recurrent.backends.triton._runtime import jax_functions
from tests.ops import judge, steps, test_linear_crossentropy, test_steps, token_wise
from tests.ops.cases import Case, draw

CASES = {
    "linear_scan": Case(2, 70, 5, kinds=True, state=True),
    "rg_lru": Case(2, 40, 5, "bfloat16", "float32", kinds=True, state=True),
    "causal_conv1d": Case(2, 21, 5, kinds=True, state=True),
    "gated_linear_attention": Case(2, 70, 3, "bfloat16", kinds=True, tied=True),
    "lightning_attention": Case(2, 40, 3, "bfloat16", kinds=True, state=True),
    "sliding_window_attention": Case(2, 21, 3, "bfloat16", kinds=True, state=True),
}
TOKEN_WISE = {
    "log_forget_gate": token_wise.Case((2, 5, 6), "bfloat16", "float32"),
    "token_crossentropy": token_wise.Case((2, 5, 6), "bfloat16"),
}
# Tensors of which several members are mapped side by side.
MAPPED = {
    "batch": ("rg_lru", ("x", "gate_a", "gate_x")),
    "weights": ("rg_lru", ("x", "gate_a", "gate_x", "a_logit")),
    "heads": ("lightning_attention", ("q", "k", "v", "log_decay")),
    "filters": ("causal_conv1d", ("x", "kernel", "bias")),
    "queries": ("sliding_window_attention", ("q", "k", "v")),
    "gates": ("log_forget_gate", ("logits",)),
    "gates and bounds": ("log_forget_gate", ("logits", "lower_bound")),
    "logits": ("token_crossentropy", ("logits",)),
}


def gradients(operation, implementation, tensors, **options):
    """Of a sum of all results, and the sum."""
    function = dispatch.IMPLEMENTATIONS[operation][implementation].function

    def loss(tensors):
        results = jax.tree.leaves(function(**tensors, **options))
        floats = (x for x in results if jnp.issubdtype(x.dtype, jnp.floating))
        return sum(jnp.sum(jnp.sin(x)) for x in floats)

    return jax.value_and_grad(loss)(tensors)


def check_vmap(operation, mapped):
    """All members are one launch: their axis is a part of the batch, or of channels or heads."""
    rng = np.random.default_rng(0)
    if operation in TOKEN_WISE:
        drawn = token_wise.draw(operation, TOKEN_WISE[operation]._replace(dtype="float32"))
    else:
        case = CASES[operation]._replace(dtype="float32", kinds=False, state=False)
        drawn = draw(operation, case)
    tokens = [name for name in token_wise.INTEGERS if name in drawn.tensors]
    options = drawn.options | {n: jnp.asarray(drawn.tensors[n]) for n in tokens}
    given = {n: jnp.asarray(a, "float32") for n, a in drawn.tensors.items() if a is not None}
    given = {n: a for n, a in given.items() if n not in tokens}
    for name in mapped:
        given[name] = given[name] * (1 + 0.1 * rng.normal(size=(3, *given[name].shape)))
    axes = {name: 0 if name in mapped else None for name in given}
    differentiate = functools.partial(gradients, operation, **options)
    by_members = jax.vmap(functools.partial(differentiate, "triton"), (axes,))
    results = by_members(given)
    assert not launches_in_loops(jax.make_jaxpr(by_members)(given).jaxpr)
    for i in range(3):
        member = {n: x if axes[n] is None else x[i] for n, x in given.items()}
        expected = jax.tree.leaves(differentiate("jax", member))
        for result, wanted in zip(jax.tree.leaves(results), expected, strict=True):
            bound = 1e-5 * (1 + np.abs(wanted).max())
            np.testing.assert_allclose(result[i], wanted, rtol=0, atol=bound)


def launches_in_loops(jaxpr, in_loop=False):
    """Number of launches in loops."""
    count = 0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        count += in_loop and name == jax_functions.NAME
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                count += launches_in_loops(inner, in_loop or name in ("scan", "while"))
    return count


def check_one_after_another():
    """Kinds and weights both differ: neither the batch nor the channels can hold the members."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(3, 2, 9, 4)), "float32")
    logit = jnp.asarray(rng.normal(size=(3, 4)), "float32")
    kinds = rng.integers(0, 3, size=(3, 2, 9)).astype("int8")

    def differentiate(implementation, x, logit, kind):
        tensors = {"x": x, "gate_a": x, "gate_x": -x, "a_logit": logit}
        return gradients("rg_lru", implementation, tensors, token_kind=kind)[1]

    by_members = jax.vmap(functools.partial(differentiate, "triton"))
    assert launches_in_loops(jax.make_jaxpr(by_members)(x, logit, kinds).jaxpr) == 2
    results = by_members(x, logit, kinds)
    for i in range(3):
        for name, wanted in differentiate("jax", x[i], logit[i], kinds[i]).items():
            np.testing.assert_allclose(results[name][i], wanted, rtol=0, atol=1e-5)


def check_operation(operation):
    if operation in TOKEN_WISE:
        drawn = token_wise.draw(operation, TOKEN_WISE[operation])
    else:
        drawn = draw(operation, CASES[operation])
    judge.check(operation, "triton", drawn)


LOSSES = {
    "float32": test_linear_crossentropy.Case((2, 5), 6, 9001, soft_cap=3.0),
    "bfloat16": test_linear_crossentropy.Case((7,), 6, 50, "bfloat16"),
}


def check_pieces():
    """More tokens than a piece holds, alone and with a mapped axis."""
    test_linear_crossentropy.PLAIN.CROSSENTROPY_CHUNK = 8
    case = test_linear_crossentropy.Case((3, 17), 6, 31, soft_cap=5.0)
    test_linear_crossentropy.check(case, "sum", "triton")
    drawn = test_linear_crossentropy.draw(case).tensors
    given = [jnp.asarray(drawn[n], "float32") for n in ("x", "embedding", "sample_weight")]

    def loss(implementation, x, embedding, weight, tokens):
        kernel = dispatch.IMPLEMENTATIONS["linear_crossentropy"][implementation]
        return kernel.function(x, embedding, tokens, weight)[0]

    for mapped in ((0, None, 0, 0), (0, None, None, 0)):
        found, expected = (
            jax.vmap(jax.grad(functools.partial(loss, of), (0, 1)), mapped)(
                given[0], given[1], given[2] if mapped[2] == 0 else given[2][0], drawn["tokens"]
            )
            for of in ("triton", "jax")
        )
        for f, e in zip(found, expected, strict=True):
            np.testing.assert_allclose(f, e, rtol=0, atol=1e-5)


STEPS = {
    f"{operation}, {name}": functools.partial(test_steps.check, operation, "triton", case)
    for operation in steps.DRAW
    for name, case in steps.CASES.items()
    if operation != "norm_quantized_linear" and name in ("bfloat16", "gelu", "one layer")
} | {
    f"norm_quantized_linear, {name}": functools.partial(
        test_steps.check, "norm_quantized_linear", "triton", case
    )
    for name, case in steps.QUANTIZED.items()
    if case.rows == 1 and case.channels < 1000
}
CHECKS = {
    **STEPS,
    **{of: functools.partial(check_operation, of) for of in (*CASES, *TOKEN_WISE)},
    **{
        f"linear_crossentropy, {dtype}, {reduction}": functools.partial(
            test_linear_crossentropy.check, case, reduction, "triton"
        )
        for dtype, case in LOSSES.items()
        for reduction in ("sum", None)
    },
    "linear_crossentropy, several pieces": check_pieces,
    **{f"vmap over {name}": functools.partial(check_vmap, *of) for name, of in MAPPED.items()},
    "vmap over kinds and weights": check_one_after_another,
}


def main(chosen):
    errors = {}
    for name in chosen or CHECKS:
        try:
            CHECKS[name]()
            errors[name] = None
        except Exception:
            errors[name] = traceback.format_exc()
    print(json.dumps(errors))


if __name__ == "__main__":
    main(sys.argv[1:])
