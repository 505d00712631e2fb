"""What cannot be converted, and what the error says, before anything is built."""

import keras
import keras_hub
import numpy as np
import pytest

from keras_recurrent.conversion import convert_to_gqa, gqa_report
from tests.models.tiny import tiny_backbone

pytestmark = pytest.mark.once

hub = keras_hub.models
WIDTH = 8


def model_of(layer, source_width=WIDTH):
    x, y = keras.Input((3, WIDTH)), keras.Input((3, source_width))
    return keras.Model([x, y], layer(x, y))


def attention(*args, **kwargs):
    return keras.layers.MultiHeadAttention(*(args or (4, 2)), **kwargs)


class OwnAttention(keras.layers.MultiHeadAttention):
    pass


class OwnModel(keras.Model):
    """A functional model of a class of its own."""

    def __init__(self):
        x = keras.Input((3, WIDTH))
        super().__init__(x, attention()(x, x, use_causal_mask=True))


@keras.saving.register_keras_serializable(package="test_refusals")
class Code(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = attention(name="held")

    def call(self, x):
        return self.attention(x, x)


class Holder(keras.layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = attention(name="held")

    def call(self, x):
        return self.attention(x, x)


def holder():
    x = keras.Input((3, WIDTH))
    return keras.Model(x, Holder(name="holder")(x))


def encoder():
    x = keras.Input((3, WIDTH))
    return keras.Model(x, attention()(x, x))


def quantized():
    model = model_of(attention())
    model.quantize("int8")
    return model


def with_lora():
    layer = attention()
    model = model_of(layer)
    layer.key_dense.enable_lora(1)
    return model


def nested(inner):
    x = keras.Input((3, WIDTH))
    return keras.Model(x, inner()(x))


def gpt2(**kwargs):
    sizes = {"num_layers": 2, "num_heads": 4, "hidden_dim": 16, "intermediate_dim": 4}
    return hub.GPT2Backbone(vocabulary_size=5, max_sequence_length=4, **sizes, **kwargs)


def llama():
    sizes = {"num_layers": 1, "hidden_dim": 16, "intermediate_dim": 4}
    return hub.LlamaBackbone(vocabulary_size=5, num_query_heads=4, num_key_value_heads=4, **sizes)


def bert():
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": 4, "intermediate_dim": 4}
    return hub.BertBackbone(vocabulary_size=5, max_sequence_length=4, **sizes)


def falcon():
    sizes = {"num_layers": 1, "num_attention_heads": 2, "hidden_dim": 4, "intermediate_dim": 4}
    return hub.FalconBackbone(vocabulary_size=5, **sizes)


class OwnLlama(hub.LlamaBackbone):
    pass


def own_llama():
    return OwnLlama.from_config(llama().get_config())


def gpt2_with_lora():
    model = gpt2()
    model.enable_lora(1)
    return model


class OwnTask(hub.GPT2CausalLM):
    pass


@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method")
@pytest.mark.parametrize(
    ("model", "groups", "message"),
    [
        (lambda: model_of(attention()), 0, "`num_key_value_heads` must be an integer"),
        (lambda: model_of(attention()), 2.0, "`num_key_value_heads` must be an integer"),
        (lambda: model_of(attention()), 3, "4 key and value heads, which 3 does not divide"),
        (lambda: model_of(attention(4, 2, 3)), 2, "`value_dim` is 3"),
        (lambda: model_of(attention(output_shape=5)), 2, "`output_shape` is \\(5,\\)"),
        (lambda: model_of(attention(), source_width=6), 2, "width 8 and values 6"),
        (lambda: model_of(OwnAttention(4, 2)), 2, "OwnAttention is a custom class"),
        (OwnModel, 2, "what that class adds to its graph would be lost"),
        (lambda: nested(OwnModel), 2, "what that class adds to its graph would be lost"),
        (lambda: nested(lambda: keras.layers.Dense(2)), 2, "no attention layers of Keras or Keras"),
        (Code, 2, r"`Code` is not a .* convert `keras.Model\(x, model\(x\)\)`.* by `where`"),
        (holder, 2, "is unknown whether 'holder/held' attends causally"),
        (encoder, 2, "of 1 attention layers none is causal .*Bidirectional .*pass `where`"),
        (quantized, 2, "is quantized \\(int8\\)"),
        (with_lora, 2, "has LoRA weights"),
        (gpt2, 3, "4 key and value heads, which 3 does not divide"),
        (gpt2_with_lora, 2, "has LoRA weights"),
        (llama, 3, "must divide the 4 key and value heads of the LlamaBackbone .*; got 3"),
        (own_llama, 2, "`OwnLlama` cannot be converted: it is a custom class"),
        (bert, 1, "`BertBackbone` cannot be converted: it has no cache"),
        (falcon, 1, "`FalconBackbone` cannot be converted: .* its attention has no grouped"),
        (lambda: OwnTask(gpt2()), 2, "`OwnTask` cannot be converted"),
        (tiny_backbone, 1, "`GriffinBackbone` cannot be converted: build it with"),
    ],
)
def test_refused(model, groups, message):
    model = model()
    weights = [id(weight) for weight in model.weights]
    with pytest.raises(ValueError, match=message):
        convert_to_gqa(model, groups)
    assert [id(weight) for weight in model.weights] == weights


def test_attention_over_images_is_refused():
    x = keras.Input((3, 3, WIDTH))
    model = keras.Model(x, attention(name="a")(x, x))
    with pytest.raises(ValueError, match="more than one axis"):
        convert_to_gqa(model, 2, where="a")


@pytest.mark.parametrize(
    ("model", "where", "message"),
    [
        (encoder, ["nothing"], "`where` names 'nothing'; the attention layers here are"),
        (encoder, lambda layer: False, "`where` chooses none"),
        (llama, lambda layer: True, "`where` cannot choose among the layers of a LlamaBackbone"),
        (gpt2, lambda layer: "layer_0" in layer.path, "chooses 1 of 2 causal attention layers"),
    ],
)
def test_where_is_refused(model, where, message):
    with pytest.raises(ValueError, match=message):
        convert_to_gqa(model(), 2, where=where)


def test_others_are_refused():
    with pytest.raises(TypeError, match="must be a Keras model; got a Dense"):
        convert_to_gqa(keras.layers.Dense(1), 1)
    with pytest.raises(ValueError, match="`pooling` must be one of 'mean', 'first', 'random'"):
        convert_to_gqa(encoder(), 1, "median")
    with pytest.raises(ValueError, match="has no weights yet"):
        convert_to_gqa(keras.Sequential([keras.layers.Dense(1)]), 1)


def test_chosen_layers_are_converted():
    """What the errors advise works."""
    x = np.zeros((1, 3, WIDTH), "float32")
    assert convert_to_gqa(holder(), 2, where=lambda layer: True)(x).shape == (1, 3, WIDTH)
    own = OwnModel()
    assert convert_to_gqa(keras.Model(own.input, own.output), 2)(x).shape == (1, 3, WIDTH)
    inputs = keras.Input((3, WIDTH))
    code = keras.Model(inputs, Code()(inputs))
    for model in (encoder(), code):
        grouped = convert_to_gqa(model, 2, where=lambda layer: True)
        assert grouped(x).shape == (1, 3, WIDTH)
        assert grouped.count_params() < model.count_params()
    # An encoder has no cache.
    with pytest.raises(ValueError, match="`before` has no weights yet"):
        gqa_report(keras.Sequential([attention()]), encoder())  # an AttributeError of Keras
    report = gqa_report(encoder(), convert_to_gqa(encoder(), 2, where=lambda layer: True))
    assert "| key-value bytes a token | 0 | 0 | – |" in report
