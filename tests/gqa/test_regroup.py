"""Constructor options of attention layers that get fewer key and value heads."""

import inspect

import keras
import keras_hub
import pytest

from keras_recurrent.compat import BloomAttention, GPTNeoXAttention, T5MultiHeadAttention
from keras_recurrent.gqa.regroup import regroup, regroup_built

pytestmark = pytest.mark.once

HEADS, WIDTH = 4, 32


def serialized(**options):
    """Options as `get_config` returns them."""
    return {name: keras.saving.serialize_keras_object(value) for name, value in options.items()}


# No value is a default.
LAYER = {"name": "attention", "trainable": False}
INITIALIZERS = serialized(
    kernel_initializer=keras.initializers.HeNormal(seed=3),
    bias_initializer=keras.initializers.Ones(),
)
KERAS = {
    **INITIALIZERS,
    **serialized(
        kernel_regularizer=keras.regularizers.L2(0.1),
        bias_regularizer=keras.regularizers.L1(0.2),
        activity_regularizer=keras.regularizers.L2(0.3),
        kernel_constraint=keras.constraints.NonNeg(),
        bias_constraint=keras.constraints.UnitNorm(),
    ),
    "use_bias": False,
    "use_gate": True,
    "sliding_window": 3,
    "seed": 5,
}
# {class: (required arguments by their names in the grouped class, options, options that it lacks)}
CLASSES = {
    keras.layers.MultiHeadAttention: (
        {"num_query_heads": HEADS, "head_dim": 4},
        KERAS,
        ("value_dim", "output_shape", "attention_axes"),
    ),
    keras.layers.GroupQueryAttention: ({"num_query_heads": HEADS, "head_dim": 4}, KERAS, ()),
    keras_hub.layers.CachedMultiHeadAttention: (
        {"num_heads": HEADS, "key_dim": 4},
        {**KERAS, "value_dim": 6, "output_shape": (WIDTH,), "attention_axes": (1,)},
        (),
    ),
    BloomAttention: ({"num_heads": HEADS}, INITIALIZERS, ()),
    GPTNeoXAttention: (
        {"num_heads": HEADS, "hidden_dim": WIDTH},
        {**INITIALIZERS, "rotary_percentage": 0.5, "rotary_max_wavelength": 100},
        ("max_sequence_length",),
    ),
    T5MultiHeadAttention: (
        {"num_heads": HEADS, "hidden_dim": WIDTH, "key_value_dim": 4, "is_decoder": True},
        {"use_relative_attention_bias": True},
        (),
    ),
}
RENAMED = {"num_query_heads": "num_heads", "head_dim": "key_dim"}
any_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)


def make(cls, **options):
    required, others, _ = CLASSES[cls]
    if cls is keras.layers.MultiHeadAttention:
        required = {RENAMED[name]: value for name, value in required.items()}
    if cls is keras.layers.GroupQueryAttention:
        required = required | {"num_key_value_heads": HEADS}
    return cls(**{**LAYER, **required, **others, **options})


@any_class
def test_regroup_keeps_constructor_options(cls):
    required, options, _ = CLASSES[cls]
    new = regroup(make(cls, dtype="mixed_bfloat16", dropout=0.25), 2)
    expected = {**LAYER, **required, **options, "dropout": 0.25, "num_key_value_heads": 2}
    config = new.get_config()
    assert {name: config[name] for name in expected} == expected
    assert new.dtype_policy.name == "mixed_bfloat16"


@any_class
def test_classes_list_all_options_of_keras_and_keras_hub(cls):
    """A new release adds an option that `regroup` loses."""
    required, options, lost = CLASSES[cls]
    known = {*required, *map(RENAMED.get, required), *options, *lost, "dropout"}
    parameters = inspect.signature(cls.__init__).parameters.values()
    names = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD} - {"self"}
    assert names - {"flash_attention", "num_key_value_heads"} <= known


def make_built(cls, **options):
    layer = make(cls, **options)
    shape = (None, None, WIDTH)
    layer.build(shape, shape) if hasattr(layer, "use_gate") else layer.build(shape)
    return layer


@pytest.mark.parametrize("cls", [BloomAttention, GPTNeoXAttention])
def test_regroup_applies_dropout(cls):
    """The grouped layer stores `dropout` and does not apply it."""

    def rates(layer):
        return {i.rate for i in layer._flatten_layers() if isinstance(i, keras.layers.Dropout)}

    assert rates(regroup_built(make_built(cls, dropout=0.25), 2)) == {0.25}
