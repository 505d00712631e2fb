"""Invalid arguments raise errors that name the argument and the remedy, before any computation."""

import functools
import inspect
import re

import keras
import numpy as np
import pytest

from keras_recurrent import layers
from tests.layers.table import (
    ALL_ROWS,
    ATTENTION,
    ROWS,
    STREAMING,
    WIDTH,
    arguments_of,
    assert_rejects,
    built,
    inputs,
    shared_by_layers,
    streaming_layer,
)

pytestmark = pytest.mark.once

RecurrentBlock = functools.partial(layers.RecurrentBlock, 8)
LocalAttention = functools.partial(layers.LocalAttention, 4)
LightningAttention = functools.partial(layers.LightningAttention, 4)


@streaming_layer
@pytest.mark.parametrize("shape", [(8,), (2, 8), (2, 3, 4, 8), (2, 3, None)])
def test_build_rejects_shapes_other_than_batch_time_width(name, shape):
    match = r"needs inputs of shape \[batch, time, width\]"
    assert_rejects(match, ROWS[name].make().build, shape)


@pytest.mark.parametrize("make", [layers.GatedMLP, layers.SGLU, layers.SwiGLU])
def test_gated_layers_reject_vectors_without_a_batch(make):
    for x in (np.ones(8, "float32"), keras.Input(batch_shape=(8,))):
        match = r"\[batch, ..., width\].* got the shape \(8,\)"
        assert_rejects(match, make(4), x)
    assert make(4)(np.ones((1, 8), "float32")).shape == (1, 8)


@streaming_layer
def test_call_rejects_inputs_without_tokens_or_of_another_width(name):
    layer = built(name)
    for x in (inputs()[:, :0], keras.Input((0, WIDTH))):
        assert_rejects(r"`inputs` must have at least one token; got .*, 0, 8", layer, x)
    match = "expected axis -1 of input shape to have value 8"
    assert_rejects(match, layer, np.zeros((2, 3, 6), "float32"))


INVALID_ARGUMENTS = [
    (layers.RGLRU, {"num_blocks": 5}, r"`num_blocks` must divide .*, 8; got 5.*is 4"),
    (layers.RGLRU, {"num_blocks": 16}, r"must divide .*, 8; got 16.*not set the width"),
    (layers.RGLRU, {"a_initializer": "hawk"}, '`a_initializer` must be "griffin"'),
    (layers.CGLRU, {"a_initializer": "hawk"}, '`a_initializer` must be "griffin"'),
    (layers.CGLRU, {"num_blocks": 3}, "`num_blocks` must divide"),
    (layers.CGLRU, {"num_blocks": 8}, "into blocks of even width; got 8"),
    (layers.CausalConv1D, {"activation": "relu"}, "`activation` must be None or 'silu"),
    (layers.RecurrentBlock, {"lru_width": 10, "num_blocks": 4}, "`num_blocks` must divide"),
    (
        layers.RecurrentBlock,
        {"lru_width": 7, "recurrence": "cg_lru"},
        "`lru_width` must be even; got 7",
    ),
    (RecurrentBlock, {"recurrence": "lru"}, '`recurrence` must be "rg_lru" or'),
    (
        RecurrentBlock,
        {"num_blocks": 8, "recurrence": "cg_lru"},
        "divide `lru_width`, 8, into blocks of even width; got 8",
    ),
    (layers.HGRN2, {"expand_ratio": 3}, "`expand_ratio` must divide the width .*, 8; got 3.*is 2"),
    (layers.LowerBounds, {"num_layers": 1}, "`num_layers` must be at least 2"),
    (LocalAttention, {"num_key_value_heads": 3}, "must divide `num_query_heads`, 4; got 3"),
    (LocalAttention, {"head_dim": 7}, "`head_dim` times .* must be even; got `head_dim` 7"),
    (LocalAttention, {"partial_rotary_factor": 1.5}, "between 0 and 1"),
    (LocalAttention, {"partial_rotary_factor": "half"}, "got 'half'"),
    (LocalAttention, {"rope_max_wavelength": 0}, "finite number above 0; got 0"),
    (LocalAttention, {"logit_scaling": 1.5}, "`logit_scaling` must be .*at least 2, .*got 1.5"),
    (layers.RMSNorm, {"epsilon": -1.0}, "`epsilon` must be a finite .*at least 0; got -1"),
    (layers.SimpleRMSNorm, {"epsilon": -1}, "`epsilon` must be a finite .*at least 0"),
    (LightningAttention, {"gate_activation": "sigma"}, "sigma"),
    (LightningAttention, {"decay_schedule": "slopes"}, "`decay_schedule` must be .*'slopes"),
    (LightningAttention, {"num_key_value_heads": 3}, "must divide `num_heads`, 4; got 3"),
    (
        LightningAttention,
        {"head_dim": 3, "rope_max_wavelength": 10},
        "even `head_dim`.* got 3 and False",
    ),
    (
        LightningAttention,
        {"use_lrpe": True, "rope_max_wavelength": 10},
        "needs .*`use_lrpe=False`.* and True",
    ),
    (LightningAttention, {"layer_index": 3, "num_layers": 3}, "to .*, 2; got 3"),
    (LightningAttention, {"layer_index": 0.5}, "integer from 0.*got 0.5"),
    (layers.Mamba2, {"num_heads": 4, "num_groups": 3}, "must divide `num_heads`, 4; got 3"),
    (layers.Mamba2, {"num_heads": 4, "norm_position": "last"}, "`norm_position` must .*'last'"),
    (layers.Mamba2, {"num_heads": 4, "projection_scales": 2.0}, "five numbers.*got 2.0"),
    (layers.RMSNorm, {"num_groups": 3}, "`num_groups` must divide the width of the inputs, 8"),
]


@pytest.mark.parametrize(("make", "arguments", "match"), INVALID_ARGUMENTS)
def test_constructor_or_build_rejects_invalid_arguments(make, arguments, match):
    assert_rejects(match, lambda: make(**arguments).build((None, None, 8)))


@pytest.mark.parametrize(
    ("layer", "width", "match"),
    [
        (layers.LRPE(), 8, r"needs inputs of shape \[batch, time, heads, head size\]"),
        (layers.CGLRU(num_blocks=1), 7, "must be even; got 7"),
        *(
            (layer, None, "width, is known")
            for layer in (layers.LowerBounds(2), layers.GatedMLP(8), layers.RMSNorm())
        ),
    ],
)
def test_build_rejects_unknown_or_odd_widths(layer, width, match):
    assert_rejects(match, layer.build, (None, None, width))


LAYERS = [
    name
    for name, value in vars(layers).items()
    if name in layers.__all__ and issubclass(value, keras.layers.Layer)
]


@pytest.mark.parametrize("name", LAYERS)
def test_units_of_a_gru_are_rejected(name):
    """`RGLRU(16)` sets `num_blocks`, or `units=16` raises Python's error without a remedy."""
    layer = getattr(layers, name)
    _, *parameters = inspect.signature(layer.__init__).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert len(positional) <= 1
    arguments = [8] * len(positional)
    given = "8, 16" if positional else "16"
    message = f"`{name}` got {given} by position: too many.* no argument `units`. The output"
    with pytest.raises(TypeError, match=message):
        layer(*arguments, 16)
    for required in ({}, dict.fromkeys(positional, 8)):
        match = f"`{name}` does not support.*`units=16`: The output"
        assert_rejects(match, layer, units=16, **required)


@pytest.mark.parametrize(
    ("layer", "arguments", "options", "match"),
    [
        (
            layers.RGLRU,
            (16, "zeros"),
            {},
            r"got 16, 'zeros' by position.*`num_blocks`, `a_initializer`.*by keyword",
        ),
        # This layer has no width, hence no advice about `units`.
        (layers.RMSNorm, (0.1,), {}, r"got 0\.1 by position: too many positional arguments\. Its"),
        (
            layers.LocalAttention,
            (),
            {"num_heads": 4, "name": "attention"},
            r"'num_query_heads'\. .* no argument `num_heads`. Did you mean `num_query_heads`",
        ),
        (layers.RecurrentBlock, (), {}, "`RecurrentBlock` got nothing.*missing .*'lru_width'"),
    ],
)
def test_type_errors_name_surplus_and_missing_arguments(layer, arguments, options, match):
    with pytest.raises(TypeError, match=match):
        layer(*arguments, **options)


def test_misspelled_arguments_are_answered_with_similar_ones():
    match = r"`window`\. Did you mean `sliding_window`"
    assert_rejects(match, layers.LocalAttention, 4, window=8)
    match = "Did you mean `return_sequences`"
    assert_rejects(match, layers.RecurrentBlock, 4, return_sequence=True)


def test_subclass_of_a_layer_may_have_arguments_that_the_layer_rejects():
    class WithDropout(layers.RGLRU):
        def __init__(self, units, *sizes, **kwargs):
            self.units, self.sizes, self.rate = units, sizes, kwargs.pop("dropout")
            super().__init__(**kwargs)

    layer = WithDropout(3, 4, dropout=0.1, num_blocks=2)
    assert (layer.units, layer.sizes, layer.rate, layer.num_blocks) == (3, (4,), 0.1, 2)


# One row of each class, and the initializer of decays.
CLASSES = {row.cls: row.make for row in reversed(ALL_ROWS.values())}
CLASSES[layers.DecayLogit] = layers.DecayLogit


def each_argument(kind):
    """Parametrizes a test over all arguments of one kind of all classes."""
    cases = [
        pytest.param(make, name, id=f"{cls.__name__}-{name}")
        for cls, make in CLASSES.items()
        for name in arguments_of(cls, kind)
    ]
    return pytest.mark.parametrize(("make", "name"), cases)


@each_argument("size")
@pytest.mark.parametrize("value", [0, 2.0, "2", True])
def test_sizes_must_be_positive_integers(make, name, value):
    match = f"`{name}` must be an integer, at least 1; got {re.escape(repr(value))}"
    assert_rejects(match, lambda: make(**{name: value}).build((None, None, WIDTH)))


@each_argument("number")
@pytest.mark.parametrize("value", [float("nan"), -float("inf"), True, "1", None])
def test_real_arguments_must_be_finite_numbers(make, name, value):
    assert_rejects(f"`{name}`.* got .*{re.escape(repr(value))}", make, **{name: value})


@each_argument("boolean")
@pytest.mark.parametrize("value", ["yes", 1, None])
def test_boolean_arguments_must_be_booleans(make, name, value):
    assert_rejects(f"`{name}` must be True or False; got {value!r}", make, **{name: value})
    assert make(**{name: np.bool_(True)})


@shared_by_layers
@pytest.mark.parametrize("value", ["yes", 1])
def test_return_state_of_a_call_must_be_a_boolean(name, value):
    layer = built(name)
    for x in (inputs(), keras.Input((None, WIDTH))):
        match = f"`return_state` must be True or False; got {value!r}"
        assert_rejects(match, layer, x, return_state=value)
    assert isinstance(layer(inputs(), return_state=np.bool_(True)), tuple)
    layer = built(name, return_state=True)
    assert not isinstance(layer(inputs(), return_state=False), tuple)


@pytest.mark.parametrize("name", [name for name in STREAMING if name not in ATTENTION])
def test_get_initial_state_before_build_names_the_remedy(name):
    match = r"layer.build\(\(None, None, width\)\)"
    assert_rejects(match, ROWS[name].make().get_initial_state, 2)


@streaming_layer
def test_call_rejects_states_of_other_structures_and_shapes(name):
    layer, x = built(name), inputs()
    state, structure = layer.get_initial_state(3), r"`initial_state` must be a dict of"
    if name == "CausalConv1D of one token":
        wider = {**state, "inputs": x}
    else:
        wider = keras.tree.map_structure(lambda a: keras.ops.concatenate([a, a], axis=-1), state)
    for sequence in (x, keras.Input((None, WIDTH))):
        for bad, match in (
            ({}, structure),
            (keras.tree.flatten(state), f"{structure} .*got list"),
            ({**state, "more": x}, structure),
            (wider, r"`initial_state\[.*must have the shape"),
        ):
            assert_rejects(match, layer, sequence, initial_state=bad)
    match = r"`initial_state\[.*must have the shape \(3"
    assert_rejects(match, layer, x, initial_state=layer.get_initial_state(2))


@shared_by_layers
def test_call_rejects_masks_and_segment_ids_of_other_shapes_and_types(name):
    layer, x = built(name), inputs()
    for bad in (np.ones((3, 7), "int32"), np.ones((3, 8, 1), "int32"), np.ones(3, "int32")):
        match = r"must have the shape \[batch, time\]"
        assert_rejects(f"`mask` {match}", layer, x, mask=bad.astype("bool"))
        assert_rejects(f"`segment_ids` {match}", layer, x, segment_ids=bad)
    # `TimeDistributed` passes on its inner mask, such as of the words of sentences.
    match = r"`mask` must have.*`keras.ops.any\(mask, axis=-1\)`"
    assert_rejects(match, layer, x, mask=np.ones((3, 8, 1), "bool"))
    # A float mask would be one that is added to logits.
    ones = np.ones((3, 8), "float32")
    assert_rejects("`segment_ids` must be integers", layer, x, segment_ids=ones)
    assert_rejects("`mask` must be boolean.*got float32", layer, x, mask=ones)
    match = "`mask` must be a tensor or an array; got a list"
    assert_rejects(match, layer, x, mask=ones.tolist())


def test_lower_bounds_and_positions_must_be_tensors_of_fitting_shape_and_type():
    match = "`lower_bound` must be a tensor or an array; got a floa"
    assert_rejects(match, layers.HGRN2(expand_ratio=4), inputs(), lower_bound=0.5)
    x, positions = np.zeros((2, 5, 1, 4), "float32"), np.zeros((2, 5), "float32")
    for bad, match in (
        (np.zeros((2, 4), "int32"), r"must have the shape .*\(2, 5\); got \(2, 4"),
        (positions, "must be integers; got float32"),
        (keras.Input((5,), batch_size=2), "must be integers; got float32"),
        (positions.tolist(), "must be a tensor or an array; got a list"),
    ):
        assert_rejects(f"`positions` {match}", layers.LRPE(), x, positions=bad)
