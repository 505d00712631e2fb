"""Attention in Pallas: precision of its products, blocks of rows, and refused arguments."""

import base64
import functools
import re

import keras
import pytest

if keras.config.backend() != "jax":
    pytest.skip("runs on JAX", allow_module_level=True)

import jax
import jax.numpy as jnp
from jax._src.interpreters import mlir
from jax._src.lib import tpu

from keras_recurrent import dispatch
from tests.ops.cases import Case, draw
from tests.ops.judge import check

LINEAR = ("gated_linear_attention", "lightning_attention")


@pytest.mark.nightly
@pytest.mark.parametrize("operation", LINEAR)
def test_several_blocks(operation, monkeypatch):
    """Three blocks of a chunk: their first states are collected, and the last block is short."""
    monkeypatch.setattr("keras_recurrent.backends.pallas._linear_attention.vmem_bytes", lambda: 1)
    check(operation, "pallas", draw(operation, Case(1, 300, 6, kinds=True, state=True)))


@pytest.mark.parametrize("operation", LINEAR)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_product_keeps_the_digits_of_its_operands(operation, dtype):
    """The interpreter cannot show it: its products are exact. So what Mosaic compiles is read."""
    module = dispatch.IMPLEMENTATIONS[operation]["pallas"]
    x, state = jnp.ones((1, 300, 1, 128), dtype), jnp.ones((1, 1, 128, 128))
    log_decay = -x if operation == "gated_linear_attention" else -jnp.ones(1)
    given = (x, x, x, log_decay, state, None)
    wanted = {"float32": ("f32", "fp32"), "bfloat16": ("bf16", None)}[dtype]
    for function, arguments in (
        (module.forward, given),
        (module.backward, (*given, None, x, state)),
    ):
        found = products(mosaic(function, *arguments))
        assert len(found) >= 4
        assert set(found) == {wanted}


def mosaic(function, *arguments):
    """The text of the kernels in a program for TPU, as they go to their compiler."""
    traced = jax.jit(function).trace(*arguments)
    program = traced.lower(lowering_platforms=("tpu",)).as_text()
    texts = []
    for body in re.findall(r"\\22body\\22: \\22([\w+/=]+)", program):
        context = mlir.make_ir_context()
        context.allow_unregistered_dialects = True  # names of operations that last over versions
        tpu.register_dialect(context)
        with context:
            texts.append(str(mlir.ir.Module.parse(base64.b64decode(body))))
    return "".join(texts)


def products(text):
    """The dtype of both operands of each matrix product, and its precision where one is asked."""
    found = []
    for line in text.splitlines():
        if "tpu.matmul" in line:
            operands = re.search(r": \(vector<[\dx]+x(\w+)>, vector<[\dx]+x\1>,", line)
            precision = re.search(r"#tpu.contract_precision<(\w+)>", line)
            found.append((operands[1], precision and precision[1]))
    return found


def test_one_token_is_left_to_xla():
    x = jnp.ones((1, 1, 2, 4))
    for operation in LINEAR:
        assert "more than one token" in dispatch.IMPLEMENTATIONS[operation]["pallas"].unsupported(
            x, x, x, x
        )


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [(1, 1), (6, 2)])
def test_blocks_of_a_window(dtype, heads, monkeypatch):
    """Four in the ring, of seven; behind the last, each head's step writes one that is left."""
    monkeypatch.setattr("keras_recurrent.backends.pallas._window.BLOCKS", (128,))
    case = Case(1, 390, 6, dtype, heads=heads, window=300, kinds=True, state=True)
    check("sliding_window_attention", "pallas", draw("sliding_window_attention", case))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_product_of_attention_keeps_the_digits_of_its_operands(dtype):
    module = dispatch.IMPLEMENTATIONS["sliding_window_attention"]["pallas"]
    q, k = jnp.ones((1, 300, 1, 2, 128), dtype), jnp.ones((1, 300, 1, 128), dtype)
    documents, sums = jnp.ones((1, 300), "int32"), jnp.ones((1, 300, 1, 2))
    given = (q, k, k, documents, documents)
    wanted = {"float32": ("f32", "fp32"), "bfloat16": ("bf16", None)}[dtype]
    for function, arguments in (
        (module.forward, given),
        (module.backward, (*given, (sums, sums), q)),
    ):
        attention = functools.partial(function, window=200, dtype=jnp.float32)
        assert set(products(mosaic(attention, *arguments))) == {wanted}


def test_a_window_must_fit_vmem():
    unsupported = dispatch.IMPLEMENTATIONS["sliding_window_attention"]["pallas"].unsupported
    x = jnp.ones((1, 50_000, 1, 128), "bfloat16")
    assert unsupported(x, x, x, 2048) is None
    assert "14 MiB are too small for 50000 keys of 128" in unsupported(x, x, x)
    state = {"key": jnp.ones((1, 30_000, 1, 128), "bfloat16")}
    x = x[:, :5]
    assert unsupported(x, x, x, 2048, state) is None
    assert "too small for 30005 keys" in unsupported(x, x, x, None, state)
