"""On torch, layers inside of a layer are called without Keras where nothing else would happen."""

import functools
import threading

import keras
import numpy as np
import pytest

if keras.config.backend() != "torch":
    pytest.skip("elsewhere Keras is in every call", allow_module_level=True)

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
from tests.models.tiny import VOCABULARY, tiny_causal_lm

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


def seen_by_all(hook):
    return torch.nn.modules.module.register_module_forward_hook(hook)


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16", "bfloat16"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_same_results_as_by_keras(name, dtype):
    layer = LAYERS[name](dtype)
    x = keras.random.normal((2, 7, 8), seed=1)
    layer(x)

    def results():
        leaf = x.detach().clone().requires_grad_(True)
        output = layer(leaf)
        weights = [v.value for v in layer.trainable_variables]
        return [output, *torch.autograd.grad(output.float().square().sum(), [leaf, *weights])]

    directly = results()
    calls = []
    handle = seen_by_all(lambda module, *_: calls.append(module))
    try:
        by_keras = results()
    finally:
        handle.remove()
    assert len(calls) > 1  # of the layer and of those inside
    biased = any(type(s) is keras.layers.Dense and s.use_bias for s in layer._flatten_layers())
    for found, expected in zip(directly, by_keras, strict=True):
        assert found.dtype == expected.dtype
        units = 4 if biased else 0  # in the last place, as a product adds its bias
        most = units * torch.finfo(found.dtype).eps * expected.abs().max().item()
        torch.testing.assert_close(found, expected, rtol=0, atol=most)


class Products(TorchDispatchMode):
    """Notes the dtypes of matrices that are multiplied, but for those of operations over time."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in ("mm", "addmm"):
            self.dtypes |= {x.dtype for x in args if isinstance(x, torch.Tensor)}
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [None, "full"])
@pytest.mark.parametrize("family", ["griffin", "hgrn2"])
def test_mixed_precision_multiplies_in_bfloat16(family, mode):
    """In models, whose blocks cast no weights, and where blocks are computed again."""
    with keras.RematScope(mode=mode):
        model = tiny_causal_lm(family=family, dtype="mixed_bfloat16")
    model.compile("sgd")
    token_ids = np.random.default_rng(0).integers(3, VOCABULARY, (2, 9)).astype("int32")
    x = {"token_ids": token_ids[:, :-1], "padding_mask": np.ones((2, 8), "int32")}
    model.train_on_batch(x, token_ids[:, 1:])  # Keras's first looks at shapes, in float32
    with Products() as products:
        model.train_on_batch(x, token_ids[:, 1:])
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
def test_a_product_adds_its_bias_before_it_rounds(dtype, activation):
    dense, x = dense_with_bias(dtype, activation=activation)
    found = call_plain(dense, x)
    rounded = getattr(torch, dense.compute_dtype)
    kernel, bias = (v.value.to(rounded).double() for v in (dense.kernel, dense.bias))
    exact = x.double() @ kernel + bias
    exact = exact if activation is None else exact.relu()
    assert found.dtype is rounded
    once = torch.finfo(rounded).eps / 2 * exact.abs()  # a half of a unit in the last place
    of_sums = 32 * torch.finfo(torch.float32).eps * (x.double().abs() @ kernel.abs() + bias.abs())
    assert ((found.double() - exact).abs() <= once + of_sums).all()


@pytest.mark.parametrize("rank", [None, 2])
def test_gradients_of_a_product_that_adds_its_bias(rank):
    dense, x = dense_with_bias("float32")
    if rank is not None:
        dense.enable_lora(rank)
        dense.lora_kernel_b.assign(keras.random.normal((rank, 16), seed=2))
    found, expected = (
        torch.autograd.grad(
            output.square().sum(), [x, *(v.value for v in dense.trainable_variables)]
        )
        for output in (call_plain(dense, x), dense(x))
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_dtypes_in_which_keras_multiplies_as_float32(dtype):
    if dtype == "float16" and torch.cuda.is_available():
        pytest.skip("on CPUs alone")
    dense, x = dense_with_bias(dtype)
    found, expected = call_plain(dense, x), dense(x)
    assert found.dtype is expected.dtype
    assert torch.equal(found, expected)


def test_autocast_of_torch():
    dense, x = dense_with_bias("float32")
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = call_plain(dense, x), dense(x)
    assert found.dtype is expected.dtype is torch.float32
    assert torch.equal(found, expected)


def test_a_layer_that_casts_nothing():
    dense, x = dense_with_bias("mixed_bfloat16", autocast=False)
    with AutocastScope("bfloat16"):
        found, expected = call_plain(dense, x), dense(x)
    assert found.dtype is expected.dtype is torch.float32
    assert torch.equal(found, expected)


def test_parts_of_a_sequence_are_rounded_as_copies_of_them():
    dense, x = dense_with_bias("bfloat16")
    assert torch.equal(call_plain(dense, x[:, -3:]), call_plain(dense, x[:, -3:].contiguous()))


def test_inputs_are_moved_to_the_device_of_keras():
    _, x = dense_with_bias("float32")
    with keras.device("meta"):
        dense, _ = dense_with_bias("float32")
        assert call_plain(dense, x).device.type == "meta"
        assert call_plain(dense, x.to("meta")).device.type == "meta"
        gates = RGLRU(num_blocks=2)
        gates.build((None, None, 8))
        (gate,) = apply_blocks([gates.input_gate], torch.ones(1, 3, 8))
        assert gate.device.type == "meta"


@pytest.mark.parametrize("owner", ["layer", "class"])
def test_a_call_of_others_is_called(owner, monkeypatch):
    dense, x = dense_with_bias("float32")
    call, calls = keras.layers.Dense.call, []

    def noted(layer, x):
        calls.append(layer)
        return call(layer, x)

    if owner == "layer":
        dense.call = functools.partial(noted, dense)
    else:
        monkeypatch.setattr(keras.layers.Dense, "call", noted)
    call_plain(dense, x)
    assert calls == [dense]


def test_what_is_plain():
    layer, x = swiglu()
    assert is_plain(layer, layer.gate_proj, x)
    assert not is_plain(layer, layer.gate_proj, x.half())
    assert not is_plain(layer, layer.gate_proj, np.ones((2, 3, 8), "float32"))
    assert not is_plain(layer, layer.gate_proj, keras.KerasTensor((2, 3, 8)))
    assert not is_plain(swiglu("mixed_bfloat16")[0], layer.gate_proj, x)

    class Other(keras.layers.Dense):
        pass

    other = Other(4)
    other.build((None, None, 8))
    assert not is_plain(layer, other, x)
    assert not is_plain(layer, keras.layers.Dense(4), x)  # not built
    noted = keras.layers.Dense(4, activity_regularizer="l2")
    noted.build((None, None, 8))
    assert not is_plain(layer, noted, x)


def test_blocks_of_a_network_are_called_directly(monkeypatch):
    """The graph of a network would call each block by Keras's `__call__`."""
    backbone = tiny_causal_lm(family="hgrn2").backbone
    x = {name: torch.ones(2, 5, dtype=torch.int64) for name in ("token_ids", "padding_mask")}
    calls, call = [], keras.layers.Layer.__call__

    def noted(layer, *args, **kwargs):
        calls.append(layer)
        return call(layer, *args, **kwargs)

    monkeypatch.setattr(keras.layers.Layer, "__call__", noted)
    directly, block = backbone(x), backbone.transformer_layers[1]
    assert not {*calls} & {*backbone.transformer_layers}
    handle = block.register_forward_hook(lambda *_: None)
    assert torch.equal(backbone(x), directly)
    assert block in calls
    handle.remove()


def test_hooks_of_torch_are_called():
    layer, x = swiglu()
    calls = []
    handle = layer.up_proj.register_forward_hook(lambda module, *_: calls.append(module))
    layer(x)
    assert calls == [layer.up_proj]
    handle.remove()
    layer(x)
    assert len(calls) == 1


def test_a_forward_of_others_is_called():
    layer, x = swiglu()
    forward, calls = layer.up_proj.forward, []
    layer.up_proj.forward = lambda x: calls.append(x) or forward(x)  # as accelerate does
    layer(x)
    assert len(calls) == 1


def test_layers_in_float32_inside_of_mixed_ones_keep_their_weights():
    """A layer may call methods of one inside of it, and then its own scope is around."""
    policies = keras.dtype_policies.DTypePolicyMap(default_policy="mixed_bfloat16")
    policies["mine/.*"] = keras.DTypePolicy("float32")
    layer = BidirectionalHGRN2(expand_ratio=4, dtype=policies, name="mine")
    x = keras.random.normal((2, 7, 8), seed=1)
    directly = layer(x)
    handle = seen_by_all(lambda *_: None)
    try:
        by_keras = layer(x)
    finally:
        handle.remove()
    assert torch.equal(directly, by_keras)


@pytest.mark.parametrize("around", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "mixed_bfloat16"])
def test_weights_have_the_dtype_of_their_layer_whatever_is_around(dtype, around):
    layer, x = swiglu(dtype)

    class Outer(keras.layers.Layer):
        def call(self, inputs):
            return layer.call(x)

    assert torch.equal(Outer(dtype=around)(x), layer(x))


def test_what_is_computed_again_takes_the_implementation_that_was_named():
    """On a GPU, torch computes again in a thread of its own."""
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


def test_quantized_layers_are_called_by_keras():
    layer, x = swiglu()
    exact = layer(x)
    layer.down_proj.quantize("int8")
    assert not is_plain(layer, layer.down_proj, torch.ones(2, 3, 16))
    found = layer(x)
    assert not torch.equal(found, exact)
    torch.testing.assert_close(found, exact, rtol=0.05, atol=0.02)


def test_a_layer_that_recomputes_still_does():
    layer, x = swiglu()
    with keras.RematScope(mode="full"):
        dense = keras.layers.Dense(4)
    dense.build((None, None, 8))
    calls = []
    dense.rematerialized_call = lambda call, *args, **kwargs: calls.append(call) or call
    layer.inner(dense, x)
    assert len(calls) == 1
