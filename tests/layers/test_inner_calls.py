"""On torch, layers call inner layers without Keras's `__call__` where that is safe."""

import contextlib
import threading

import keras
import numpy as np
import pytest

if keras.config.backend() != "torch":
    pytest.skip("Keras traces every call on other backends", allow_module_level=True)

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from keras_recurrent import implementation
from keras_recurrent.compat import AutocastScope
from keras_recurrent.dispatch import chosen_name
from keras_recurrent.layers import (
    HGRN,
    HGRN2,
    RGLRU,
    BidirectionalHGRN2,
    LightningAttention,
    LocalAttention,
    RecurrentBlock,
)
from keras_recurrent.layers.block_diagonal import apply_blocks
from keras_recurrent.layers.gated_linear_unit import SwiGLU
from keras_recurrent.layers.torch_calls import call_plain, is_plain
from tests.models.tiny import tiny_causal_lm, training_batch

LAYERS = {
    "HGRN": lambda dtype: HGRN(dtype=dtype),
    "HGRN2": lambda dtype: HGRN2(expand_ratio=4, conv_size=4, dtype=dtype),
    "LightningAttention": lambda dtype: LightningAttention(2, head_dim=4, dtype=dtype),
    "LocalAttention": lambda dtype: LocalAttention(2, head_dim=4, sliding_window=5, dtype=dtype),
    "RecurrentBlock": lambda dtype: RecurrentBlock(8, dtype=dtype),
    "SwiGLU": lambda dtype: SwiGLU(16, dtype=dtype),
}


def swiglu(dtype=None):
    layer = SwiGLU(16, dtype=dtype)
    layer.build((None, None, 8))
    return layer, torch.ones(2, 3, 8, dtype=getattr(torch, layer.compute_dtype))


@contextlib.contextmanager
def calls_by_keras():
    """Makes all calls go through Keras, with a hook of all modules; yields the called layers."""
    calls = []
    register = torch.nn.modules.module.register_module_forward_hook
    handle = register(lambda module, *_: calls.append(module))
    try:
        yield calls
    finally:
        handle.remove()


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16", "bfloat16"])
@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients_equal_those_of_calls_by_keras(name, dtype):
    layer = LAYERS[name](dtype)
    x = keras.random.normal((2, 7, 8), seed=1)
    layer(x)

    def results():
        leaf = x.detach().clone().requires_grad_(True)
        output = layer(leaf)
        weights = [v.value for v in layer.trainable_variables]
        return [output, *torch.autograd.grad(output.float().square().sum(), [leaf, *weights])]

    direct = results()
    with calls_by_keras() as calls:
        expected = results()
    assert len(calls) > 1  # the layer and its sublayers
    biased = any(type(s) is keras.layers.Dense and s.use_bias for s in layer._flatten_layers())
    for a, b in zip(direct, expected, strict=True):
        assert a.dtype == b.dtype
        # Products that add their bias differ in the last digits.
        error = (4 if biased else 0) * torch.finfo(a.dtype).eps * b.abs().max().item()
        torch.testing.assert_close(a, b, rtol=0, atol=error)


class ProductDtypes(TorchDispatchMode):
    """Records the dtypes of all matrix products except those of operations over time."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in ("mm", "addmm"):
            self.dtypes |= {x.dtype for x in args if isinstance(x, torch.Tensor)}
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [None, "full"])
@pytest.mark.parametrize("family", ["griffin", "hgrn2"])
def test_training_step_in_mixed_precision_multiplies_in_bfloat16(family, mode):
    """A block multiplies float32 weights, in the forward pass or where it is recomputed."""
    with keras.RematScope(mode=mode):
        model = tiny_causal_lm(family=family, dtype="mixed_bfloat16")
    model.compile("sgd")
    model.train_on_batch(*training_batch())  # Keras computes shapes in float32 here
    with ProductDtypes() as products:
        model.train_on_batch(*training_batch())
    assert products.dtypes == {torch.bfloat16}


def dense_with_bias(dtype, **options):
    dense = keras.layers.Dense(
        16, kernel_initializer="glorot_normal", bias_initializer="normal", dtype=dtype, **options
    )
    dense.build((None, None, 32))
    x = keras.random.normal((2, 7, 32), seed=1).to(getattr(torch, dense.compute_dtype))
    return dense, x.requires_grad_(True)


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "mixed_bfloat16"])
def test_call_plain_rounds_the_sum_of_product_and_bias_once(dtype, activation):
    dense, x = dense_with_bias(dtype, activation=activation)
    found = call_plain(dense, x)
    rounded = getattr(torch, dense.compute_dtype)
    kernel, bias = (v.value.to(rounded).double() for v in (dense.kernel, dense.bias))
    exact = x.double() @ kernel + bias
    exact = exact if activation is None else exact.relu()
    assert found.dtype is rounded
    rounding = torch.finfo(rounded).eps / 2 * exact.abs()  # half a unit in the last place
    sums = 32 * torch.finfo(torch.float32).eps * (x.double().abs() @ kernel.abs() + bias.abs())
    assert ((found.double() - exact).abs() <= rounding + sums).all()


@pytest.mark.parametrize(
    ("dtype", "options", "scope"),
    [
        ("float32", {}, lambda: torch.autocast("cpu", torch.bfloat16)),
        ("mixed_bfloat16", {"autocast": False}, lambda: AutocastScope("bfloat16")),
    ],
    ids=["autocast of torch", "layer without autocast"],
)
def test_call_plain_equals_keras_where_casts_differ(dtype, options, scope):
    """`call_plain` casts under torch's autocast, or in a layer with `autocast=False`."""
    dense, x = dense_with_bias(dtype, **options)
    with scope():
        found, expected = call_plain(dense, x), dense(x)
    assert found.dtype is expected.dtype is torch.float32
    assert torch.equal(found, expected)


def test_call_plain_moves_inputs_to_the_device_of_keras():
    _, x = dense_with_bias("float32")
    with keras.device("meta"):
        dense, _ = dense_with_bias("float32")
        assert call_plain(dense, x).device.type == "meta"
        assert call_plain(dense, x.to("meta")).device.type == "meta"
        gates = RGLRU(num_blocks=2)
        gates.build((None, None, 8))
        (gate,) = apply_blocks([gates.input_gate], torch.ones(1, 3, 8))
        assert gate.device.type == "meta"


def test_call_plain_calls_a_method_that_was_replaced_in_its_class(monkeypatch):
    dense, x = dense_with_bias("float32")
    calls, call = [], keras.layers.Dense.call
    monkeypatch.setattr(keras.layers.Dense, "call", lambda *a: calls.append(a[0]) or call(*a))
    call_plain(dense, x)
    assert calls == [dense]


class SubclassedDense(keras.layers.Dense):
    pass


def test_is_plain_only_for_built_dense_layers_and_tensors_of_the_compute_dtype():
    layer, x = swiglu()
    assert is_plain(layer, layer.gate_proj, x)
    for other in (x.half(), np.ones((2, 3, 8), "float32"), keras.KerasTensor((2, 3, 8))):
        assert not is_plain(layer, layer.gate_proj, other)
    assert not is_plain(swiglu("mixed_bfloat16")[0], layer.gate_proj, x)
    assert not is_plain(layer, keras.layers.Dense(4), x)  # not built
    for inner in (SubclassedDense(4), keras.layers.Dense(4, activity_regularizer="l2")):
        inner.build((None, None, 8))
        assert not is_plain(layer, inner, x)


def test_network_calls_its_blocks_without_keras_unless_they_have_hooks(monkeypatch):
    backbone = tiny_causal_lm(family="hgrn2").backbone
    x = {name: torch.ones(2, 5, dtype=torch.int64) for name in ("token_ids", "padding_mask")}
    calls, call = [], keras.layers.Layer.__call__

    def recorded(layer, *args, **kwargs):
        calls.append(layer)
        return call(layer, *args, **kwargs)

    monkeypatch.setattr(keras.layers.Layer, "__call__", recorded)
    direct, block = backbone(x), backbone.transformer_layers[1]
    assert not {*calls} & {*backbone.transformer_layers}
    handle = block.register_forward_hook(lambda *_: None)
    assert torch.equal(backbone(x), direct)
    assert block in calls
    handle.remove()


def test_float32_layers_in_a_mixed_precision_layer_keep_their_weights():
    """A call of an inner layer's method computes in the policy of the outer layer."""
    policies = keras.dtype_policies.DTypePolicyMap(default_policy="mixed_bfloat16")
    policies["outer/.*"] = keras.DTypePolicy("float32")
    layer = BidirectionalHGRN2(expand_ratio=4, dtype=policies, name="outer")
    x = keras.random.normal((2, 7, 8), seed=1)
    direct = layer(x)
    with calls_by_keras():
        assert torch.equal(direct, layer(x))


@pytest.mark.parametrize("outer_dtype", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "mixed_bfloat16"])
def test_layer_inside_a_layer_of_another_dtype_keeps_its_dtype(dtype, outer_dtype):
    layer, x = swiglu(dtype)

    class Outer(keras.layers.Layer):
        def call(self, inputs):
            return layer.call(x)

    assert torch.equal(Outer(dtype=outer_dtype)(x), layer(x))


def test_recomputation_in_another_thread_uses_the_named_implementation():
    """On a GPU, torch recomputes in a separate thread."""
    with keras.RematScope(mode="full"):
        layer = SwiGLU(16)
    x = keras.random.normal((2, 3, 8), seed=1)
    layer(x)
    names, gated = [], layer.gated
    layer.gated = lambda *args: names.append(chosen_name()) or gated(*args)
    with implementation("torch"):
        loss = layer(x).sum()
        backward = threading.Thread(target=loss.backward)
        backward.start()
        backward.join()
    assert names == ["torch", "torch"]
    assert chosen_name() is None


def test_inner_layer_with_rematerialization_is_recomputed():
    layer, x = swiglu()
    with keras.RematScope(mode="full"):
        dense = keras.layers.Dense(4)
    dense.build((None, None, 8))
    calls = []
    dense.rematerialized_call = lambda call, *args, **kwargs: calls.append(call) or call
    layer.inner(dense, x)
    assert len(calls) == 1
