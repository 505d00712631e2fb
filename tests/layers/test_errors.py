"""What cannot work is refused with the argument's name and the mend, before any work."""

import functools
import inspect
import re

import keras
import numpy as np
import pytest

from keras_recurrent import layers
from tests.layers.table import ATTENTION, ROWS, STREAMING, WIDTH, built, inputs, streaming_layer


@pytest.mark.once
@streaming_layer
@pytest.mark.parametrize("shape", [(8,), (2, 8), (2, 3, 4, 8), (2, 3, None)])
def test_wrong_rank(name, shape):
    layer = ROWS[name].make()
    with pytest.raises(ValueError, match=r"needs inputs of shape \[batch, time, width\]"):
        layer.build(shape)


@pytest.mark.once
@pytest.mark.parametrize("make", [layers.GatedMLP, layers.SGLU, layers.SwiGLU])
def test_a_vector_without_a_batch(make):
    for x in (np.ones(8, "float32"), keras.Input(batch_shape=(8,))):
        with pytest.raises(ValueError, match=r"\[batch, ..., width\].* got the shape \(8,\)"):
            make(4)(x)
    assert make(4)(np.ones((1, 8), "float32")).shape == (1, 8)


@pytest.mark.skipif(keras.config.backend() != "tensorflow", reason="TensorFlow alone has them")
@pytest.mark.parametrize("name", ROWS)
def test_unknown_ranks(name):
    import tensorflow as tf

    def trace(call):
        spec = tf.TensorSpec(None, "float32")
        with pytest.raises(ValueError, match=r"must have a known number of dim.*`set_shape`"):
            tf.function(call, autograph=False).get_concrete_function(spec)

    trace(ROWS[name].make())
    if name in STREAMING:
        layer = built(name)
        trace(lambda mask: layer(inputs(), mask=mask))


@pytest.mark.once
@streaming_layer
def test_no_tokens(name):
    layer = built(name)
    for x in (inputs()[:, :0], keras.Input((0, WIDTH))):
        with pytest.raises(
            ValueError, match=r"`inputs` must have at least one token; got .*, 0, 8"
        ):
            layer(x)


@pytest.mark.once
@streaming_layer
def test_wrong_width(name):
    with pytest.raises(ValueError, match="expected axis -1 of input shape to have value 8"):
        built(name)(np.zeros((2, 3, 6), "float32"))


@pytest.mark.once
@pytest.mark.parametrize(
    ("make", "width", "message"),
    [
        (lambda: layers.RGLRU(num_blocks=5), 8, r"`num_blocks` must divide .*, 8; got 5.*is 4"),
        (
            lambda: layers.RGLRU(num_blocks=16),
            8,
            r"`num_blocks` must divide .*, 8; got 16.*not set the width",
        ),
        (lambda: layers.CGLRU(num_blocks=3), 8, r"`num_blocks` must divide"),
        (lambda: layers.CGLRU(num_blocks=8), 8, r"into blocks of even width; got 8"),
        (lambda: layers.CGLRU(num_blocks=1), 7, r"must be even; got 7"),
        (lambda: layers.RecurrentBlock(10, num_blocks=4), 8, r"`num_blocks` must divide"),
        (lambda: layers.RGLRU(num_blocks=0), 8, r"`num_blocks` must be .*at least 1; got 0"),
        (lambda: layers.RGLRU(num_blocks=2.0), 8, r"`num_blocks` must be an integer"),
        (lambda: layers.CausalConv1D(0), 8, r"`kernel_size` must be .*at least 1; got 0"),
        (lambda: layers.CausalConv1D((4,)), 8, r"`kernel_size` must be an integer"),
        (lambda: layers.CausalConv1D(activation="relu"), 8, r"`activation` must be None or 'silu"),
        (
            lambda: layers.RecurrentBlock(8, kernel_size=-1, num_blocks=2),
            8,
            r"`kernel_size` must be",
        ),
        (
            lambda: layers.RecurrentBlock(8, recurrence="lru"),
            8,
            r"`recurrence` must be \"rg_lru\" or",
        ),
        (
            lambda: layers.RecurrentBlock(7, recurrence="cg_lru"),
            8,
            r"`lru_width` must be even; got 7",
        ),
        (
            lambda: layers.RecurrentBlock(8, num_blocks=8, recurrence="cg_lru"),
            8,
            r"divide `lru_width`, 8, into blocks of even width; got 8",
        ),
        (lambda: layers.LightningAttention(2, gate_activation="sigma"), 8, r"sigma"),
        (lambda: layers.RecurrentBlock(0), 8, r"`lru_width` must be .*at least 1; got 0"),
        (
            lambda: layers.HGRN2(expand_ratio=3),
            8,
            r"`expand_ratio` must divide the width .*, 8; got 3.*is 2",
        ),
        (lambda: layers.HGRN2(expand_ratio=0), 8, r"`expand_ratio` must be .*at least 1; got 0"),
        (
            lambda: layers.HGRN2(expand_ratio=4, conv_size=0),
            8,
            r"`conv_size` must be .*at least 1; got 0",
        ),
        (lambda: layers.LowerBounds(0), 8, r"`num_layers` must be .*at least 1; got 0"),
        (lambda: layers.LowerBounds(1), 8, r"`num_layers` must be at least 2"),
        (lambda: layers.LowerBounds(2), None, r"width, is known"),
        (lambda: layers.SwiGLU(0), 8, r"`intermediate_dim` must be .*at least 1; got 0"),
        (lambda: layers.LocalAttention(0), 8, r"`num_query_heads` must be .*at least 1; got 0"),
        (
            lambda: layers.LocalAttention(4, num_key_value_heads=3),
            8,
            r"`num_key_value_heads` must divide `num_query_heads`, 4; got 3",
        ),
        (lambda: layers.LocalAttention(4, sliding_window=0), 8, r"`sliding_window` must be"),
        (lambda: layers.LocalAttention(4, max_length=2.5), 8, r"`max_length` must be an integer"),
        (
            lambda: layers.LocalAttention(4, head_dim=6, partial_rotary_factor=0.5),
            8,
            r"even number",
        ),
        (lambda: layers.LocalAttention(4, partial_rotary_factor=1.5), 8, r"between 0 and 1"),
        (lambda: layers.LocalAttention(4, partial_rotary_factor="half"), 8, r"got 'half'"),
        (
            lambda: layers.LocalAttention(4, rope_max_wavelength=0),
            8,
            r"finite number above 0; got 0",
        ),
        (
            lambda: layers.LocalAttention(4, logit_scaling=1.5),
            8,
            r"`logit_scaling` must be .*at least 2, .*got 1.5",
        ),
        (lambda: layers.GatedMLP(0), 8, r"`intermediate_dim` must be .*at least 1; got 0"),
        (lambda: layers.GatedMLP(8), None, r"width, is known"),
        (lambda: layers.RMSNorm(), None, r"width, is known"),
        (
            lambda: layers.RMSNorm(epsilon=-1.0),
            8,
            r"`epsilon` must be a finite .*at least 0; got -1",
        ),
        (lambda: layers.SimpleRMSNorm(epsilon=-1), 8, r"`epsilon` must be a finite .*at least 0"),
        (lambda: layers.SGLU(0), 8, r"`intermediate_dim` must be .*at least 1; got 0"),
        (lambda: layers.LightningAttention(0), 8, r"`num_heads` must be .*at least 1; got 0"),
        (lambda: layers.LightningAttention(2, head_dim=0), 8, r"`head_dim` must be"),
        (
            lambda: layers.LightningAttention(2, decay_schedule="slopes"),
            8,
            r"`decay_schedule` must be .*'slopes",
        ),
        (
            lambda: layers.LightningAttention(4, num_key_value_heads=3),
            8,
            r"`num_key_value_heads` must divide `num_heads`, 4; got 3",
        ),
        (
            lambda: layers.LightningAttention(2, head_dim=3, rope_max_wavelength=10),
            8,
            r"even `head_dim`.* got 3 and False",
        ),
        (
            lambda: layers.LightningAttention(2, use_lrpe=True, rope_max_wavelength=10),
            8,
            r"needs .*`use_lrpe=False`.* and True",
        ),
        (
            lambda: layers.LightningAttention(2, layer_index=3, num_layers=3),
            8,
            r"to .*, 2; got 3",
        ),
        (lambda: layers.LightningAttention(2, layer_index=0.5), 8, r"integer from 0.*got 0.5"),
        (lambda: layers.LRPE(), 8, r"needs inputs of shape \[batch, time, heads, head size\]"),
        (lambda: layers.RGLRU(a_initializer="hawk"), 8, r"`a_initializer` must be \"griffin\""),
        (lambda: layers.CGLRU(a_initializer="hawk"), 8, r"`a_initializer` must be \"griffin\""),
    ],
)
def test_bad_arguments(make, width, message):
    with pytest.raises(ValueError, match=message):
        make().build((None, None, width))


LAYERS = [
    name
    for name, value in vars(layers).items()
    if name in layers.__all__ and issubclass(value, keras.layers.Layer)
]


@pytest.mark.once
@pytest.mark.parametrize("name", LAYERS)
def test_the_size_of_a_gru(name):
    """`RGLRU(16)` set `num_blocks`, and `RecurrentBlock(units=16)` had Python's error alone."""
    layer = getattr(layers, name)
    parameters = inspect.signature(layer).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert len(positional) <= 1
    arguments, message = (), r"takes no positional.*got 16\. .* no argument `units`. The output"
    if positional:
        arguments, message = (8,), f"takes only `{positional[0]}` by position; got also 16"
    with pytest.raises(TypeError, match=f"`{name}` {message}"):
        layer(*arguments, 16)
    for required in ({}, dict.fromkeys(positional, 8)):
        with pytest.raises(ValueError, match=f"`{name}` does not support.*`units=16`: The output"):
            layer(units=16, **required)


@pytest.mark.once
def test_surplus_positional_arguments_are_named():
    message = r"got 16, 'zeros'.* as wide as .*by keyword: `num_blocks`, `a_initializer`, "
    with pytest.raises(TypeError, match=message):
        layers.RGLRU(16, "zeros")
    with pytest.raises(TypeError, match=r"positional arguments; got 0\.1\. Pass"):
        layers.RMSNorm(0.1)  # no width, hence no advice about `units`


@pytest.mark.once
def test_names_of_other_libraries_are_answered_with_similar_ones():
    """`LocalAttention(num_heads=4)` got Python's error, which did not show the mistake."""
    message = (
        r"needs `num_query_heads`\. .* no argument `num_heads`. Did you mean `num_query_heads`"
    )
    with pytest.raises(TypeError, match=message):
        layers.LocalAttention(num_heads=4, name="attention")
    with pytest.raises(TypeError, match=r"`RecurrentBlock` needs `lru_width`\.$"):
        layers.RecurrentBlock()
    with pytest.raises(ValueError, match=r"`window`\. Did you mean `sliding_window`"):
        layers.LocalAttention(4, window=8)
    with pytest.raises(ValueError, match="Did you mean `return_sequences`"):
        layers.RecurrentBlock(4, return_sequence=True)


@pytest.mark.once
def test_arguments_of_custom_layers():
    """The check of arguments by their names refused names that a custom layer takes itself."""

    class WithDropout(layers.RGLRU):
        def __init__(self, units, *sizes, **kwargs):
            self.units, self.sizes, self.rate = units, sizes, kwargs.pop("dropout")
            super().__init__(**kwargs)

    layer = WithDropout(3, 4, dropout=0.1, num_blocks=2)
    assert (layer.units, layer.sizes, layer.rate, layer.num_blocks) == (3, (4,), 0.1, 2)


NUMBERS = [
    *((layers.RMSNorm, "epsilon"), (layers.SimpleRMSNorm, "epsilon")),
    (functools.partial(layers.LocalAttention, 4), "rope_max_wavelength"),
    (functools.partial(layers.LocalAttention, 4), "partial_rotary_factor"),
    (functools.partial(layers.LocalAttention, 4), "layer_norm_epsilon"),
    *((layers.DecayLogit, name) for name in ("minval", "maxval", "power")),
]
BOOLEANS = [
    (layers.RMSNorm, "zero_centered"),
    *((layer, "scale_first_input") for layer in (layers.RGLRU, layers.CGLRU)),
    (functools.partial(layers.RecurrentBlock, 16), "scale_first_input"),
    (layers.CausalConv1D, "use_bias"),
    *(
        (functools.partial(layers.LightningAttention, 4), name)
        for name in ("use_lrpe", "use_qk_norm", "use_norm_weight")
    ),
    *(
        (functools.partial(layers.LocalAttention, 4), f"use_{name}")
        for name in ("qkv_bias", "output_bias", "qk_norm", "output_gate")
    ),
    *((ROWS[name].make, "return_state") for name in STREAMING),
]


@pytest.mark.once
@pytest.mark.parametrize(("make", "name"), NUMBERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), True, "1", None, 1j])
def test_what_is_no_number(make, name, value):
    with pytest.raises(ValueError, match=f"`{name}`.* got .*{re.escape(repr(value))}"):
        make(**{name: value})


@pytest.mark.once
@pytest.mark.parametrize(("make", "name"), BOOLEANS)
@pytest.mark.parametrize("value", ["yes", 1, 0.0, None])
def test_what_is_no_boolean(make, name, value):
    with pytest.raises(ValueError, match=f"`{name}` must be True or False; got {value!r}"):
        make(**{name: value})
    assert make(**{name: np.bool_(True)})


@pytest.mark.once
@streaming_layer
@pytest.mark.parametrize("value", ["yes", 1, 0.0])
def test_a_call_returns_a_state_or_not(name, value):
    layer = built(name)
    for x in (inputs(), keras.Input((None, WIDTH))):
        with pytest.raises(
            ValueError, match=f"`return_state` must be True or False; got {value!r}"
        ):
            layer(x, return_state=value)
    assert isinstance(layer(inputs(), return_state=np.bool_(True)), tuple)


@pytest.mark.once
@pytest.mark.parametrize("name", [name for name in STREAMING if name not in ATTENTION])
def test_a_state_before_the_width_is_known(name):
    layer = ROWS[name].make()
    with pytest.raises(ValueError, match=r"layer.build\(\(None, None, width\)\)"):
        layer.get_initial_state(2)


@pytest.mark.once
@streaming_layer
def test_wrong_states(name):
    layer, x = built(name), inputs()
    state = layer.get_initial_state(3)
    symbolic = keras.Input((None, WIDTH))

    def refuses(state, message):
        for sequence in (x, symbolic):
            with pytest.raises(ValueError, match=message):
                layer(sequence, initial_state=state)

    refuses({}, r"`initial_state` must be a dict of")
    refuses(keras.tree.flatten(state), r"`initial_state` must be a dict of .*got list")
    refuses({**state, "more": x}, r"`initial_state` must be a dict of")
    with pytest.raises(ValueError, match=r"`initial_state\[.*must have the shape \(3"):
        layer(x, initial_state=layer.get_initial_state(2))
    refuses(
        keras.tree.map_structure(lambda a: keras.ops.concatenate([a, a], axis=-1), state)
        if name != "CausalConv1D of one token"
        else {**state, "inputs": x},
        r"`initial_state\[.*must have the shape",
    )


@pytest.mark.once
@streaming_layer
def test_masks_and_segments_of_another_shape(name):
    layer, x = built(name), inputs()
    for bad in (np.ones((3, 7), "int32"), np.ones((3, 8, 1), "int32"), np.ones(3, "int32")):
        with pytest.raises(ValueError, match=r"`mask` must have the shape \[batch, time\]"):
            layer(x, mask=bad.astype("bool"))
        with pytest.raises(ValueError, match=r"`segment_ids` must have the shape \[batch, time\]"):
            layer(x, segment_ids=bad)
    with pytest.raises(ValueError, match=r"`segment_ids` must be integers"):
        layer(x, segment_ids=np.ones((3, 8), "float32"))
    with pytest.raises(ValueError, match=r"`mask` must be boolean.*got float32"):
        layer(x, mask=np.zeros((3, 8), "float32"))  # to be added to logits, as elsewhere
    with pytest.raises(ValueError, match=r"`mask` must be a tensor or an array; got a list"):
        layer(x, mask=[[True] * 8] * 3)


@pytest.mark.once
def test_bounds_and_positions_of_another_shape():
    with pytest.raises(ValueError, match=r"`lower_bound` must be a tensor or an array; got a floa"):
        layers.HGRN2(expand_ratio=4)(inputs(), lower_bound=0.5)
    with pytest.raises(ValueError, match=r"`positions` must have the shape .*\(2, 5\); got \(2, 4"):
        layers.LRPE()(np.zeros((2, 5, 1, 4), "float32"), positions=np.zeros((2, 4), "int32"))


@pytest.mark.once
def test_positions_that_are_no_integers():
    x, positions = np.zeros((2, 5, 1, 4), "float32"), np.zeros((2, 5), "float32")
    symbolic = keras.Input((5,), batch_size=2)
    for bad in (positions, symbolic):
        with pytest.raises(ValueError, match=r"`positions` must be integers; got float32"):
            layers.LRPE()(x, positions=bad)
    with pytest.raises(ValueError, match=r"`positions` must be a tensor or an array; got a list"):
        layers.LRPE()(x, positions=positions.tolist())
