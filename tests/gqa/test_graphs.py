"""Conversion of functional and sequential models, and of layers that contain attention."""

import keras
import keras_hub
import numpy as np
import pytest

from keras_recurrent.conversion import convert_to_gqa
from tests.gqa.oracle import assert_equal, numpy, set_weights, share_heads

pytestmark = pytest.mark.once

HEADS, WIDTH, LENGTH = 4, 12, 5
PROJECTIONS = {"/key/kernel": 1, "/value/kernel": 1, "/key/bias": 0, "/value/bias": 0}


def attention(name, **kwargs):
    return keras.layers.MultiHeadAttention(HEADS, 3, name=name, **kwargs)


@keras.saving.register_keras_serializable("tests.gqa")
class Block(keras.layers.Layer):
    """A custom layer with attention as an attribute and in a list."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first = attention("first")
        self.rest = [keras.layers.Dense(WIDTH, name="dense"), attention("second")]
        self.norm = keras.layers.LayerNormalization(name="norm")
        self.supports_masking = True

    def build(self, shape):
        self.first.build(shape, shape)
        self.rest[0].build(shape)
        self.rest[1].build(shape, shape)
        self.norm.build(shape)

    def call(self, x):
        x = x + self.first(x, x, use_causal_mask=True)
        return self.norm(x + self.rest[1](self.rest[0](x), x, use_causal_mask=True))


def decoder():
    """A model of encoder, causal and cross-attention; one layer is called twice."""
    tokens, source = keras.Input((None, WIDTH)), keras.Input((None, WIDTH))
    encoded = attention("encoder")(source, source)
    causal = attention("causal", use_bias=False)
    x = causal(tokens, tokens, use_causal_mask=True)
    x = causal(x, x, use_causal_mask=True)
    inner = keras.Input((None, WIDTH))
    x = keras.Model(inner, attention("inner")(inner, inner, use_causal_mask=True), name="sub")(x)
    x = x + attention("cross", dropout=0.1)(x, encoded)
    return keras.Model([tokens, source], [x, encoded], name="decoder")


def layers_with_attention():
    """A model whose attention is inside a custom layer and KerasHub's layers."""
    tokens, source = keras.Input((None, WIDTH)), keras.Input((None, WIDTH))
    x = Block(name="block")(tokens)
    x = keras_hub.layers.TransformerDecoder(8, HEADS, name="decoder")(x, source)
    x = keras_hub.layers.TransformerEncoder(8, HEADS, name="encoder")(x)
    return keras.Model([tokens, source], x)


def data(*lengths):
    rng = np.random.default_rng(1)
    return [rng.normal(size=(2, n, WIDTH)).astype("float32") for n in lengths or (LENGTH, 7)]


def outputs(model, inputs):
    return [numpy(x) for x in keras.tree.flatten(model(inputs))]


def build_model(build):
    model = build()
    set_weights(model)
    return model


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_converted_decoder_matches_shared_heads_and_keeps_the_rest(pooling):
    """Pooling is wrong, or conversion changes an encoder, or names and options of layers."""
    model, oracle = build_model(decoder), build_model(decoder)
    grouped = convert_to_gqa(model, 2, pooling=pooling)
    axes = {f"{n}{p}": a for n in ("causal", "inner", "cross") for p, a in PROJECTIONS.items()}
    share_heads(oracle, axes, HEADS, 2, pooling)
    assert_equal(outputs(grouped, data())[0], outputs(oracle, data())[0])
    np.testing.assert_array_equal(outputs(grouped, data())[1], outputs(model, data())[1])
    assert [w.path for w in grouped.weights] == [w.path for w in model.weights]
    assert type(grouped.get_layer("causal")) is keras.layers.GroupQueryAttention
    assert type(grouped.get_layer("encoder")) is keras.layers.MultiHeadAttention
    assert grouped.get_layer("cross").dropout == 0.1
    assert grouped.get_layer("causal").use_bias is False


def test_converted_layers_match_shared_heads_and_convert_again_after_saving(tmp_path):
    model, oracle = build_model(layers_with_attention), build_model(layers_with_attention)
    grouped = convert_to_gqa(model, 2, where=lambda layer: "encoder/" not in layer.path)
    axes = {
        f"{n}{p}": a
        for n in ("first", "second", "decoder/self_attention", "decoder/cross_attention")
        for p, a in PROJECTIONS.items()
    }
    share_heads(oracle, axes, HEADS, 2)
    assert_equal(outputs(grouped, data())[0], outputs(oracle, data())[0])
    assert [w.path for w in grouped.weights] == [w.path for w in model.weights]
    assert type(grouped.get_layer("block")) is Block

    grouped.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(outputs(loaded, data())[0], outputs(grouped, data())[0])
    assert [w.path for w in loaded.weights] == [w.path for w in grouped.weights]

    further = convert_to_gqa(loaded, 1, where=["first", "second"])
    once = convert_to_gqa(model, 1, where=["first", "second"])
    for name in ("first", "second"):
        assert_equal(weight(further, name, "key/kernel"), weight(once, name, "key/kernel"))
    untouched = "decoder/self_attention", "key/kernel"
    assert_equal(weight(further, *untouched), weight(grouped, *untouched))


def weight(model, *parts):
    (weight,) = [w for w in model.weights if "/".join(parts) in w.path]
    return weight


# Keras's GroupQueryAttention passes its inputs on with their masks.
@pytest.mark.filterwarnings("ignore:Layer .* \\(of type EinsumDense\\) was passed an input with a")
def test_converted_sequential_with_masked_tokens_matches_and_is_saved(tmp_path):
    model = keras.Sequential(
        [
            keras.Input((LENGTH,)),
            keras.layers.Embedding(7, WIDTH, mask_zero=True),
            Block(name="block"),
        ]
    )
    set_weights(model)
    tokens = np.array([[3, 1, 2, 6, 5], [4, 2, 0, 0, 0]])
    same = convert_to_gqa(model, HEADS, where=lambda layer: True)
    real = tokens[..., None] > 0
    assert_equal(numpy(same(tokens)) * real, numpy(model(tokens)) * real)
    grouped = convert_to_gqa(model, 1, where=lambda layer: True)
    grouped.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(numpy(loaded(tokens)), numpy(grouped(tokens)))


def test_training_of_the_converted_model_does_not_change_the_original():
    model = build_model(decoder)
    model.compile("sgd", ["mse", "mse"])
    before = outputs(model, data())
    grouped = convert_to_gqa(model, 2)
    assert grouped.compiled
    x, y = data(LENGTH, LENGTH), data(LENGTH, LENGTH)
    start = numpy(weight(grouped, "causal", "key/kernel"))
    grouped.fit(x, y, verbose=0)
    assert np.abs(numpy(weight(grouped, "causal", "key/kernel")) - start).max() > 0
    keras.tree.map_structure(np.testing.assert_array_equal, outputs(model, data()), before)


def test_random_pooling_depends_on_the_seed_and_the_weight_and_keeps_queries():
    """The seed has no effect, keys and values get equal numbers, or queries change."""
    model = build_model(decoder)
    kernels = {
        seed: numpy(weight(convert_to_gqa(model, 2, "random", seed=seed), "causal", "key/kernel"))
        for seed in (0, 1)
    }
    again = convert_to_gqa(model, 2, "random", seed=0)
    np.testing.assert_array_equal(kernels[0], numpy(weight(again, "causal", "key/kernel")))
    values = numpy(weight(again, "causal", "value/kernel"))
    assert np.abs(kernels[0] - kernels[1]).max() > 0.1
    assert np.abs(kernels[0] - values).max() > 0.1
    np.testing.assert_array_equal(
        numpy(weight(again, "causal", "query/kernel")),
        numpy(weight(model, "causal", "query/kernel")),
    )


def test_conversion_keeps_policy_trainability_window_and_gate():
    tokens = keras.Input((None, WIDTH))
    layer = attention("a", dtype="mixed_bfloat16", sliding_window=2, use_gate=True)
    model = keras.Model(tokens, layer(tokens, tokens, use_causal_mask=True))
    set_weights(model)
    layer.key_dense.trainable = False
    same = convert_to_gqa(model, HEADS)
    actual, expected = (numpy(net(data(LENGTH)[0])) for net in (same, model))
    assert np.linalg.norm(actual - expected) < 2**-7 * np.linalg.norm(expected)
    grouped = convert_to_gqa(model, 2).get_layer("a")
    assert grouped.dtype_policy.name == "mixed_bfloat16"
    assert (grouped.sliding_window, grouped.use_gate) == (2, True)
    assert [w.path for w in grouped.trainable_weights] == [w.path for w in layer.trainable_weights]


def test_conversion_keeps_flash_attention_of_all_layers():
    x = keras.Input((None, WIDTH))
    encoded = attention("encoder", flash_attention=True)(x, x)
    causal = attention("causal", flash_attention=True)(encoded, encoded, use_causal_mask=True)
    grouped = convert_to_gqa(keras.Model(x, attention("plain")(causal, causal)), 2)
    flash = {layer.name: bool(layer._flash_attention) for layer in grouped.layers[1:]}
    assert flash == {"encoder": True, "causal": True, "plain": False}


UNKNOWN = "It is unknown whether"


def tril_in_graph(x):
    return keras.ops.tril(keras.ops.ones_like(keras.ops.matmul(x, keras.ops.swapaxes(x, 1, 2))))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (lambda x: np.tril(np.ones((1, LENGTH, LENGTH), bool)), None),
        (lambda x: keras.ops.logical_and(tril_in_graph(x) > 0, x[:, :, 0][:, None] > 0), UNKNOWN),
        (lambda x: keras.ops.cast(tril_in_graph(x), "bool"), None),
        (lambda x: np.ones((1, LENGTH, LENGTH), bool), UNKNOWN),
        (lambda x: keras.ops.expand_dims(x[:, :, 0] > 0, 1), "nothing to convert"),
    ],
    ids=["constant", "unknown operation", "tril", "not causal", "padding"],
)
def test_causal_attention_is_recognized_by_its_mask(mask, message):
    """Attention with a causal mask is left out, or attention with another mask is converted."""
    x = keras.Input((LENGTH, WIDTH))
    model = keras.Model(x, attention("a")(x, x, attention_mask=mask(x)))
    if message is not None:
        with pytest.raises(ValueError, match=message):
            convert_to_gqa(model, 2)
    grouped = convert_to_gqa(model, 2, where=None if message is None else "a")
    assert grouped.get_layer("a").num_key_value_heads == 2
