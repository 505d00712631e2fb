"""Attention in Pallas: precision of its products, blocks of a sequence, and unsupported calls."""

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
PALLAS = {o: row["pallas"] for o, row in dispatch.IMPLEMENTATIONS.items()}


@pytest.mark.nightly
@pytest.mark.parametrize("operation", LINEAR)
def test_linear_attention_of_several_blocks_matches_definition(operation, monkeypatch):
    """Of three blocks of a chunk, the last one incomplete, a state or a block is wrong."""
    monkeypatch.setattr("keras_recurrent.backends.pallas._linear_attention.vmem_bytes", lambda: 1)
    check(operation, "pallas", draw(operation, Case(1, 300, 6, kinds=True, state=True)))


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [(1, 1), (6, 2)])
def test_attention_of_several_blocks_in_a_window_matches_definition(dtype, heads, monkeypatch):
    """A block is wrong when four of seven are in VMEM, or is written in a later step of a head."""
    monkeypatch.setattr("keras_recurrent.backends.pallas._window.BLOCKS", (128,))
    case = Case(1, 390, 6, dtype, heads=heads, window=300, kinds=True, state=True)
    check("sliding_window_attention", "pallas", draw("sliding_window_attention", case))


def linear_attention_calls(operation, dtype):
    """Forward and backward, with arguments."""
    module = PALLAS[operation]
    x, state = jnp.ones((1, 300, 1, 128), dtype), jnp.ones((1, 1, 128, 128))
    log_decay = -x if operation == "gated_linear_attention" else -jnp.ones(1)
    tensors = (x, x, x, log_decay, state, None)
    yield module.forward, tensors
    yield module.backward, (*tensors, None, x, state)


def softmax_attention_calls(operation, dtype):
    options = {"window": 200, "dtype": jnp.float32}
    q, k = jnp.ones((1, 300, 1, 2, 128), dtype), jnp.ones((1, 300, 1, 128), dtype)
    documents, sums = jnp.ones((1, 300), "int32"), jnp.ones((1, 300, 1, 2))
    tensors = (q, k, k, documents, documents)
    yield functools.partial(PALLAS[operation].forward, **options), tensors
    yield functools.partial(PALLAS[operation].backward, **options), (*tensors, (sums, sums), q)


@pytest.mark.parametrize("operation", [*LINEAR, "sliding_window_attention"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_have_the_precision_of_their_operands(operation, dtype):
    """Mosaic multiplies float32 in bfloat16, which the interpreter's exact products hide."""
    expected = {"float32": ("f32", "fp32"), "bfloat16": ("bf16", None)}[dtype]
    calls = linear_attention_calls if operation in LINEAR else softmax_attention_calls
    for function, arguments in calls(operation, dtype):
        products = find_products(mosaic_text(function, *arguments))
        assert len(products) >= (4 if operation in LINEAR else 1)
        assert set(products) == {expected}


def mosaic_text(function, *arguments):
    """The kernels of a program for TPUs, as Mosaic compiles them."""
    traced = jax.jit(function).trace(*arguments)
    program = traced.lower(lowering_platforms=("tpu",)).as_text()
    texts = []
    for body in re.findall(r"\\22body\\22: \\22([\w+/=]+)", program):
        context = mlir.make_ir_context()
        context.allow_unregistered_dialects = True  # Operations have version-independent names.
        tpu.register_dialect(context)
        with context:
            texts.append(str(mlir.ir.Module.parse(base64.b64decode(body))))
    return "".join(texts)


def find_products(text):
    """The dtype of both operands of each matrix product, and its precision or None."""
    products = []
    for line in text.splitlines():
        if "tpu.matmul" in line:
            operands = re.search(r": \(vector<[\dx]+x(\w+)>, vector<[\dx]+x\1>,", line)
            precision = re.search(r"#tpu.contract_precision<(\w+)>", line)
            products.append((operands[1], precision and precision[1]))
    return products


@pytest.mark.parametrize("operation", LINEAR)
def test_linear_attention_of_single_token_is_unsupported(operation):
    """A decoding step, which XLA compiles well, runs a kernel for many tokens."""
    x = jnp.ones((1, 1, 2, 4))
    assert "more than one token" in PALLAS[operation].unsupported(q=x, k=x, v=x, decay=x)


def test_attention_to_more_keys_than_fit_in_vmem_is_unsupported():
    """A long sequence without a window, or a long state, does not compile for TPUs."""
    unsupported = PALLAS["sliding_window_attention"].unsupported
    x = jnp.ones((1, 50_000, 1, 128), "bfloat16")
    assert unsupported(x, x, x, 2048) is None
    assert "14 MiB are too small for 50000 keys of 128" in unsupported(x, x, x)
    state = {"key": jnp.ones((1, 30_000, 1, 128), "bfloat16")}
    x = x[:, :5]
    assert unsupported(x, x, x, 2048, state) is None
    assert "too small for 30005 keys" in unsupported(x, x, x, None, state)
