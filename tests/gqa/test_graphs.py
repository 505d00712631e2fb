"""Functional and sequential models with multi-head attention, and layers that hold it."""

import keras
import keras_hub
import numpy as np
import pytest

from keras_recurrent.conversion import convert_to_gqa
from tests.gqa.oracle import assert_equal, numpy, set_weights, share_heads

HEADS, WIDTH, LENGTH = 4, 12, 5
PROJECTIONS = {"/key/kernel": 1, "/value/kernel": 1, "/key/bias": 0, "/value/bias": 0}


def attention(name, **kwargs):
    return keras.layers.MultiHeadAttention(HEADS, 3, name=name, **kwargs)


@keras.saving.register_keras_serializable("tests.gqa")
class Block(keras.layers.Layer):
    """A user's own layer: attention as an attribute, and in a list."""

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
    """Causal attention, an encoder's, and attention to it; one layer is called twice."""
    tokens, source = keras.Input((None, WIDTH)), keras.Input((None, WIDTH))
    encoded = attention("encoder")(source, source)
    causal = attention("causal", use_bias=False)
    x = causal(tokens, tokens, use_causal_mask=True)
    x = causal(x, x, use_causal_mask=True)
    inner = keras.Input((None, WIDTH))
    x = keras.Model(inner, attention("inner")(inner, inner, use_causal_mask=True), name="sub")(x)
    x = x + attention("cross", dropout=0.1)(x, encoded)
    return keras.Model([tokens, source], [x, encoded], name="decoder")


def holders():
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


def made(build):
    model = build()
    set_weights(model)
    return model


@pytest.mark.parametrize("pooling", ["mean", pytest.param("first", marks=pytest.mark.once)])
def test_decoder_equals_shared_heads(pooling):
    model, oracle = made(decoder), made(decoder)
    grouped = convert_to_gqa(model, 2, pooling=pooling)
    chosen = {f"{n}{p}": a for n in ("causal", "inner", "cross") for p, a in PROJECTIONS.items()}
    share_heads(oracle, chosen, HEADS, 2, pooling)
    assert_equal(outputs(grouped, data())[0], outputs(oracle, data())[0])
    # What is not a decoder's stays, and so do names, number and order of the weights.
    np.testing.assert_array_equal(outputs(grouped, data())[1], outputs(model, data())[1])
    assert [w.path for w in grouped.weights] == [w.path for w in model.weights]
    assert type(grouped.get_layer("causal")) is keras.layers.GroupQueryAttention
    assert type(grouped.get_layer("encoder")) is keras.layers.MultiHeadAttention
    assert grouped.get_layer("cross").dropout == 0.1
    assert grouped.get_layer("causal").use_bias is False


@pytest.mark.once
def test_holders_equal_shared_heads(tmp_path):
    model, oracle = made(holders), made(holders)
    grouped = convert_to_gqa(model, 2, where=lambda layer: "encoder/" not in layer.path)
    chosen = {
        f"{n}{p}": a
        for n in ("first", "second", "decoder/self_attention", "decoder/cross_attention")
        for p, a in PROJECTIONS.items()
    }
    share_heads(oracle, chosen, HEADS, 2)
    expected = outputs(oracle, data())[0]
    assert_equal(outputs(grouped, data())[0], expected)
    assert [w.path for w in grouped.weights] == [w.path for w in model.weights]
    assert type(grouped.get_layer("block")) is Block

    grouped.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(outputs(loaded, data())[0], outputs(grouped, data())[0])
    assert [w.path for w in loaded.weights] == [w.path for w in grouped.weights]
    # One layer at a time comes to the same, also of a model that was saved.
    further = convert_to_gqa(loaded, 1, where=["first", "second"])
    once = convert_to_gqa(made(holders), 1, where=["first", "second"])
    for name in ("first", "second"):
        assert_equal(weight(further, name, "key/kernel"), weight(once, name, "key/kernel"))
    untouched = "decoder/self_attention"
    assert_equal(weight(further, untouched, "key/kernel"), weight(grouped, untouched, "key/kernel"))


def weight(model, *parts):
    (found,) = [w for w in model.weights if "/".join(parts) in w.path]
    return found


@pytest.mark.once
def test_all_groups_change_nothing():
    model = made(decoder)
    for actual, expected in zip(
        outputs(convert_to_gqa(model, HEADS), data()), outputs(model, data()), strict=True
    ):
        assert_equal(actual, expected)


@pytest.mark.once
def test_grouped_further_is_grouped_at_once():
    model = made(decoder)
    twice = convert_to_gqa(convert_to_gqa(model, 2), 1)
    once = convert_to_gqa(model, 1)
    for actual, expected in zip(twice.weights, once.weights, strict=True):
        np.testing.assert_allclose(numpy(actual), numpy(expected), rtol=1e-6, atol=1e-7)
    assert twice.get_layer("causal").num_key_value_heads == 1


# Keras's GroupQueryAttention hands its inputs on with their masks, which it has read by then.
@pytest.mark.filterwarnings("ignore:Layer .* \\(of type EinsumDense\\) was passed an input with a")
def test_sequential_with_masked_tokens_saves(tmp_path):
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


@pytest.mark.once
def test_given_model_is_untouched_and_stays_usable_while_the_new_one_learns():
    model = made(decoder)
    model.compile("sgd", ["mse", "mse"])
    before = outputs(model, data())
    grouped = convert_to_gqa(model, 2)
    assert grouped.compiled
    x, y = data(LENGTH, LENGTH), data(LENGTH, LENGTH)
    start = numpy(weight(grouped, "causal", "key/kernel"))
    grouped.fit(x, y, verbose=0)
    assert np.abs(numpy(weight(grouped, "causal", "key/kernel")) - start).max() > 0
    for actual, expected in zip(outputs(model, data()), before, strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.once
def test_random_heads_are_drawn_anew_by_the_seed():
    model = made(decoder)
    kernels = {
        seed: numpy(weight(convert_to_gqa(model, 2, "random", seed=seed), "causal", "key/kernel"))
        for seed in (0, 1)
    }
    again = convert_to_gqa(model, 2, "random", seed=0)
    np.testing.assert_array_equal(kernels[0], numpy(weight(again, "causal", "key/kernel")))
    values = numpy(weight(again, "causal", "value/kernel"))
    assert np.abs(kernels[0] - kernels[1]).max() > 0.1
    assert np.abs(kernels[0] - values).max() > 0.1  # each weight has numbers of its own
    np.testing.assert_array_equal(  # queries are no heads of keys
        numpy(weight(again, "causal", "query/kernel")),
        numpy(weight(model, "causal", "query/kernel")),
    )


@pytest.mark.once
def test_policy_trainability_window_and_gate_stay():
    tokens = keras.Input((None, WIDTH))
    layer = attention("a", dtype="mixed_bfloat16", sliding_window=2, use_gate=True)
    model = keras.Model(tokens, layer(tokens, tokens, use_causal_mask=True))
    set_weights(model)
    layer.key_dense.trainable = False
    same = convert_to_gqa(model, HEADS)
    found, expected = (numpy(net(data(LENGTH)[0])) for net in (same, model))
    assert np.linalg.norm(found - expected) < 2**-7 * np.linalg.norm(expected)  # as bfloat16
    grouped = convert_to_gqa(model, 2).get_layer("a")
    assert grouped.dtype_policy.name == "mixed_bfloat16"
    assert (grouped.sliding_window, grouped.use_gate) == (2, True)
    assert [w.path for w in grouped.trainable_weights] == [w.path for w in layer.trainable_weights]


@pytest.mark.once
def test_flash_attention_stays_in_all_layers():
    """Fails if a converted layer or an encoder's loses `flash_attention`."""
    x = keras.Input((None, WIDTH))
    encoded = attention("encoder", flash_attention=True)(x, x)
    causal = attention("causal", flash_attention=True)(encoded, encoded, use_causal_mask=True)
    grouped = convert_to_gqa(keras.Model(x, attention("plain")(causal, causal)), 2)
    flash = {layer.name: bool(layer._flash_attention) for layer in grouped.layers[1:]}
    assert flash == {"encoder": True, "causal": True, "plain": False}


def tril_in_graph(x):
    return keras.ops.tril(keras.ops.ones_like(keras.ops.matmul(x, keras.ops.swapaxes(x, 1, 2))))


@pytest.mark.once
@pytest.mark.parametrize(
    ("mask", "converted"),
    [
        (lambda x: np.tril(np.ones((1, LENGTH, LENGTH), bool)), True),
        (lambda x: keras.ops.logical_and(tril_in_graph(x) > 0, x[:, :, 0][:, None] > 0), False),
        (lambda x: keras.ops.cast(tril_in_graph(x), "bool"), True),
        (lambda x: np.ones((1, LENGTH, LENGTH), bool), False),
        (lambda x: keras.ops.expand_dims(x[:, :, 0] > 0, 1), None),
    ],
    ids=["constant", "unknown operation", "tril", "not causal", "padding"],
)
def test_masks_that_the_graph_shows(mask, converted):
    """None: an encoder with padding, and no question; False: it cannot be told."""
    x = keras.Input((LENGTH, WIDTH))
    model = keras.Model(x, attention("a")(x, x, attention_mask=mask(x)))
    if converted:
        assert convert_to_gqa(model, 2).get_layer("a").num_key_value_heads == 2
    else:
        message = "nothing to convert" if converted is None else "It is unknown whether"
        with pytest.raises(ValueError, match=message):
            convert_to_gqa(model, 2)
        grouped = convert_to_gqa(model, 2, where="a")
        assert grouped.get_layer("a").num_key_value_heads == 2
