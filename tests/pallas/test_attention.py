"""What is special to attention in Pallas: how rows are cut, and what is refused."""

import keras
import pytest

if keras.config.backend() != "jax":
    pytest.skip("runs on JAX", allow_module_level=True)

import jax
import jax.numpy as jnp

from keras_recurrent import dispatch
from tests.ops.cases import Case, draw
from tests.ops.test_kernels import check

LINEAR = ("gated_linear_attention", "lightning_attention")


@pytest.mark.slow
@pytest.mark.parametrize("operation", LINEAR)
def test_several_blocks(operation, monkeypatch):
    """Three blocks of a chunk: their first states are collected, and the last block is short."""
    monkeypatch.setattr("keras_recurrent.backends.pallas._linear_attention.vmem_bytes", lambda: 1)
    check(operation, "pallas", draw(operation, Case(1, 300, 6, kinds=True, state=True)))


@pytest.mark.parametrize("operation", LINEAR)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_product_keeps_the_digits_of_its_operands(operation, dtype):
    """The interpreter cannot show it: its products are exact."""
    module = dispatch.KERNELS[operation]["pallas"]
    x, state = jnp.ones((1, 300, 1, 128), dtype), jnp.ones((1, 1, 128, 128))
    log_decay = -x if operation == "gated_linear_attention" else -jnp.ones(1)
    given = (x, x, x, log_decay, state, None)
    for function, arguments in (
        (module.forward, given),
        (module.backward, (*given, None, x, state)),
    ):
        text = str(jax.make_jaxpr(function)(*arguments))
        products = text.count("dot_general[")
        precise = text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)")
        assert products >= 4
        assert precise == (products if dtype == "float32" else 0)


def test_one_token_is_left_to_xla():
    x = jnp.ones((1, 1, 2, 4))
    for operation in LINEAR:
        assert "more than one token" in dispatch.KERNELS[operation]["pallas"].unsupported(
            x, x, x, x
        )


def test_what_splash_attention_cannot_do():
    unsupported = dispatch.KERNELS["sliding_window_attention"]["pallas"].unsupported
    x = jnp.ones((1, 128, 2, 4), "bfloat16")
    assert unsupported(x, x, x, 6) is None
    assert "multiplies in bfloat16, got float32" in unsupported(x, x, x.astype("float32"))
    assert "a multiple of 128 tokens, got 5" in unsupported(*[x[:, :5]] * 3)
    assert "no place for the keys" in unsupported(x, x, x, 6, {"key": x, "value": x})
