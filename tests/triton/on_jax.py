"""The Triton kernels in programs of JAX under `jax.vmap`, in Triton's interpreter.

`test_on_jax.py` runs these tests in a separate process: where the interpreter is on, nothing can be
lowered for a GPU.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from keras_recurrent import dispatch
from keras_recurrent.backends.triton._runtime import jax_functions
from tests.ops import small, test_linear_crossentropy, token_wise

# {name: operation, and its tensors of which several members are mapped at once}
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
    """The sum of all results, and its gradients."""
    function = dispatch.IMPLEMENTATIONS[operation][implementation].function

    def loss(tensors):
        results = jax.tree.leaves(function(**tensors, **options))
        floats = (x for x in results if jnp.issubdtype(x.dtype, jnp.floating))
        return sum(jnp.sum(jnp.sin(x)) for x in floats)

    return jax.value_and_grad(loss)(tensors)


def count_launches_in_loops(jaxpr, in_loop=False):
    count = 0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        count += in_loop and name == jax_functions.NAME
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                count += count_launches_in_loops(inner, in_loop or name in ("scan", "while"))
    return count


@pytest.mark.parametrize("name", MAPPED)
def test_vmap_of_a_kernel_is_one_launch_and_matches_plain_jax(name):
    """A mapped axis becomes a loop of launches, or a wrong axis of the batch, channels or heads."""
    operation, mapped = MAPPED[name]
    rng, drawn = np.random.default_rng(0), small.draw(operation, 21)
    tokens = [name for name in token_wise.INTEGERS if name in drawn.tensors]
    options = drawn.options | {n: jnp.asarray(drawn.tensors[n]) for n in tokens}
    tensors = {n: jnp.asarray(a, "float32") for n, a in drawn.tensors.items() if n not in tokens}
    for name in mapped:
        tensors[name] = tensors[name] * (1 + 0.1 * rng.normal(size=(3, *tensors[name].shape)))
    axes = {name: 0 if name in mapped else None for name in tensors}
    differentiate = functools.partial(gradients, operation, **options)
    mapped_gradients = jax.vmap(functools.partial(differentiate, "triton"), (axes,))
    results = mapped_gradients(tensors)
    assert not count_launches_in_loops(jax.make_jaxpr(mapped_gradients)(tensors).jaxpr)
    for i in range(3):
        member = {n: x if axes[n] is None else x[i] for n, x in tensors.items()}
        expected = jax.tree.leaves(differentiate("jax", member))
        for result, array in zip(jax.tree.leaves(results), expected, strict=True):
            bound = 1e-5 * (1 + np.abs(array).max())
            np.testing.assert_allclose(result[i], array, rtol=0, atol=bound)


def test_vmap_over_token_kinds_and_weights_matches_plain_jax():
    """Members that neither the batch nor the channels can hold are not launched in a loop."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(3, 2, 9, 4)), "float32")
    logit = jnp.asarray(rng.normal(size=(3, 4)), "float32")
    kinds = rng.integers(0, 3, size=(3, 2, 9)).astype("int8")

    def differentiate(implementation, x, logit, kind):
        tensors = {"x": x, "gate_a": x, "gate_x": -x, "a_logit": logit}
        return gradients("rg_lru", implementation, tensors, token_kind=kind)[1]

    mapped = jax.vmap(functools.partial(differentiate, "triton"))
    assert count_launches_in_loops(jax.make_jaxpr(mapped)(x, logit, kinds).jaxpr) == 2
    results = mapped(x, logit, kinds)
    for i in range(3):
        for name, expected in differentiate("jax", x[i], logit[i], kinds[i]).items():
            np.testing.assert_allclose(results[name][i], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mapped", [(0, None, 0, 0), (0, None, None, 0)])
def test_vmap_of_a_loss_of_several_chunks_matches_plain_jax(mapped, monkeypatch):
    monkeypatch.setattr(test_linear_crossentropy.PLAIN, "CROSSENTROPY_CHUNK", 8)
    case = test_linear_crossentropy.Case((3, 17), 6, 31, soft_cap=5.0)
    tensors = test_linear_crossentropy.draw(case).tensors
    x, embedding, weight = (
        jnp.asarray(tensors[n], "float32") for n in ("x", "embedding", "sample_weight")
    )
    weight = weight if mapped[2] == 0 else weight[0]

    def loss(implementation, x, embedding, weight, tokens):
        kernel = dispatch.IMPLEMENTATIONS["linear_crossentropy"][implementation]
        return kernel.function(x, embedding, tokens, weight)[0]

    found, expected = (
        jax.vmap(jax.grad(functools.partial(loss, name), (0, 1)), mapped)(
            x, embedding, weight, tensors["tokens"]
        )
        for name in ("triton", "jax")
    )
    for gradient, array in zip(found, expected, strict=True):
        np.testing.assert_allclose(gradient, array, rtol=0, atol=1e-5)
