"""Models that cannot be converted: errors before anything is built, and their remedies."""

import functools

import keras
import keras_hub
import numpy as np
import pytest

from keras_recurrent.conversion import convert_to_gqa, gqa_report
from tests.gqa.families import make_backbone
from tests.layers.table import assert_rejects
from tests.models.tiny import tiny_backbone

pytestmark = pytest.mark.once

hub = keras_hub.models
gpt2, llama = (functools.partial(make_backbone, name) for name in ("GPT2", "Llama"))
WIDTH = 8
CUSTOM_GRAPH = "what that class adds to its graph would be lost"


def attention(*args, **kwargs):
    return keras.layers.MultiHeadAttention(*(args or (4, 2)), **kwargs)


def apply(layer):
    """A functional model that calls a layer, or a model, with one input."""
    x = keras.Input((3, WIDTH))
    return keras.Model(x, layer(x))


def cross_attention(layer, source_width=WIDTH):
    x, y = keras.Input((3, WIDTH)), keras.Input((3, source_width))
    return keras.Model([x, y], layer(x, y))


def encoder():
    return apply(lambda x: attention()(x, x))


class CustomAttention(keras.layers.MultiHeadAttention):
    pass


class CustomFunctionalModel(keras.Model):
    def __init__(self):
        x = keras.Input((3, WIDTH))
        super().__init__(x, attention()(x, x, use_causal_mask=True))


class SelfAttention:
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = attention(name="inner")

    def call(self, x):
        return self.attention(x, x)


@keras.saving.register_keras_serializable(package="test_errors")
class SubclassedModel(SelfAttention, keras.Model):
    pass


class CustomLayer(SelfAttention, keras.layers.Layer):
    pass


def custom_layer():
    return apply(CustomLayer(name="custom"))


def quantized():
    model = cross_attention(attention())
    model.quantize("int8")
    return model


def lora():
    layer = attention()
    model = cross_attention(layer)
    layer.key_dense.enable_lora(1)
    return model


SIZES = {"vocabulary_size": 5, "num_layers": 1, "hidden_dim": 4, "intermediate_dim": 4}
bert = functools.partial(hub.BertBackbone, **SIZES, num_heads=2, max_sequence_length=4)
falcon = functools.partial(hub.FalconBackbone, **SIZES, num_attention_heads=2)


class CustomLlama(hub.LlamaBackbone):
    pass


def custom_llama():
    return CustomLlama.from_config(llama().get_config())


def gpt2_with_lora():
    model = gpt2()
    model.enable_lora(1)
    return model


class CustomTask(hub.GPT2CausalLM):
    pass


@pytest.mark.parametrize(
    ("model", "groups", "message"),
    [
        (lambda: cross_attention(attention()), 0, "`num_key_value_heads` must be an integer"),
        (lambda: cross_attention(attention()), 2.0, "`num_key_value_heads` must be an integer"),
        (lambda: cross_attention(attention()), 3, "4 key and value heads, which 3 does not divide"),
        (lambda: cross_attention(attention(4, 2, 3)), 2, "`value_dim` is 3"),
        (lambda: cross_attention(attention(output_shape=5)), 2, "`output_shape` is \\(5,\\)"),
        (lambda: cross_attention(attention(), source_width=6), 2, "width 8 and values 6"),
        (lambda: cross_attention(CustomAttention(4, 2)), 2, "CustomAttention is a custom class"),
        (CustomFunctionalModel, 2, CUSTOM_GRAPH),
        (lambda: apply(CustomFunctionalModel()), 2, CUSTOM_GRAPH),
        (lambda: apply(keras.layers.Dense(2)), 2, "no attention layers of Keras or Keras"),
        (SubclassedModel, 2, r"is not a .* convert `keras.Model\(x, model\(x\)\)`.* by `where`"),
        (custom_layer, 2, "is unknown whether 'custom/inner' attends causally"),
        (encoder, 2, "of 1 attention layers none is causal .*Bidirectional .*pass `where`"),
        (quantized, 2, "is quantized \\(int8\\)"),
        (lora, 2, "has LoRA weights"),
        (gpt2, 3, "4 key and value heads, which 3 does not divide"),
        (gpt2_with_lora, 2, "has LoRA weights"),
        (llama, 3, "must divide the 4 key and value heads of the LlamaBackbone .*; got 3"),
        (custom_llama, 2, "`CustomLlama` cannot be converted: it is a custom class"),
        (bert, 1, "`BertBackbone` cannot be converted: it has no cache"),
        (falcon, 1, "`FalconBackbone` cannot be converted: .* its attention has no grouped"),
        (lambda: CustomTask(gpt2()), 2, "`CustomTask` cannot be converted"),
        (tiny_backbone, 1, "`GriffinBackbone` cannot be converted: build it with"),
    ],
)
def test_unsupported_conversion_raises_with_reason_and_keeps_the_model(model, groups, message):
    model = model()
    weights = [id(weight) for weight in model.weights]
    assert_rejects(message, convert_to_gqa, model, groups)
    assert [id(weight) for weight in model.weights] == weights


def attention_over_two_axes():
    x = keras.Input((3, 3, WIDTH))
    return keras.Model(x, attention(name="a")(x, x))


@pytest.mark.parametrize(
    ("model", "where", "message"),
    [
        (encoder, ["nothing"], "`where` names 'nothing'; the attention layers here are"),
        (encoder, lambda layer: False, "`where` chooses none"),
        (attention_over_two_axes, "a", "more than one axis"),
        (llama, lambda layer: True, "`where` cannot choose among the layers of a LlamaBackbone"),
        (gpt2, lambda layer: "layer_0" in layer.path, "chooses 1 of 2 causal attention layers"),
    ],
)
def test_invalid_where_raises_with_the_layers(model, where, message):
    assert_rejects(message, convert_to_gqa, model(), 2, where=where)


def test_invalid_model_or_pooling_raises():
    with pytest.raises(TypeError, match="must be a Keras model; got a Dense"):
        convert_to_gqa(keras.layers.Dense(1), 1)
    with pytest.raises(ValueError, match="`pooling` must be one of 'mean', 'first', 'random'"):
        convert_to_gqa(encoder(), 1, "median")
    with pytest.raises(ValueError, match="has no weights yet"):
        convert_to_gqa(keras.Sequential([keras.layers.Dense(1)]), 1)


def test_remedies_of_the_errors_convert_the_model():
    """The `where` or the functional model that an error recommends is rejected, too."""
    custom, x = CustomFunctionalModel(), np.zeros((1, 3, WIDTH), "float32")
    functional = keras.Model(custom.input, custom.output)
    for model in (functional, custom_layer(), apply(SubclassedModel()), encoder()):
        where = None if model is functional else lambda layer: True
        grouped = convert_to_gqa(model, 2, where=where)
        assert grouped(x).shape == (1, 3, WIDTH)
        assert grouped.count_params() < model.count_params()


def test_report_of_encoder_has_no_cache_and_requires_weights():
    with pytest.raises(ValueError, match="`before` has no weights yet"):
        gqa_report(keras.Sequential([attention()]), encoder())
    report = gqa_report(encoder(), convert_to_gqa(encoder(), 2, where=lambda layer: True))
    assert "| key-value bytes a token | 0 | 0 | – |" in report
