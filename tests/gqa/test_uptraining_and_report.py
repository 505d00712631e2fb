"""`uptraining`, the training schedule after conversion, and `gqa_report`, the memory saved."""

import keras
import numpy as np
import pytest

from keras_recurrent.conversion import convert_to_gqa, gqa_report, uptraining

pytestmark = pytest.mark.once

schedules = keras.optimizers.schedules


@pytest.mark.parametrize(
    ("original", "fraction", "steps"), [(10_000, 0.05, 500), (100, 0.07, 7), (30, 0.05, 2)]
)
def test_uptraining_steps_are_a_rounded_fraction(original, fraction, steps):
    plan = uptraining(original, 1e-3, fraction)
    assert (plan.steps, plan.learning_rate) == (steps, 1e-3)


def test_uptraining_rate_is_the_end_or_the_tail_of_the_schedule():
    decay = schedules.PolynomialDecay(1.0, 100, end_learning_rate=0.5)
    assert uptraining(100, decay).learning_rate == pytest.approx(0.5)
    tail = uptraining(100, decay, fraction=0.2, tail=True).learning_rate
    assert [float(tail(i)) for i in (0, 10, 20)] == pytest.approx([0.6, 0.55, 0.5])
    copy = schedules.deserialize(schedules.serialize(tail))
    assert float(copy(10)) == pytest.approx(0.55)


def test_fit_with_callbacks_of_uptraining_ends_after_its_steps():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    plan = uptraining(140, 1e-3)
    model.compile(keras.optimizers.SGD(plan.learning_rate), "mse")
    x = np.zeros((12, 2))
    model.fit(x, x[:, :1], batch_size=4, epochs=50, callbacks=plan.callbacks, verbose=0)
    assert int(model.optimizer.iterations) == plan.steps == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1e-3), "`original_steps`"),
        ((1.5, 1e-3), "`original_steps`"),
        ((10, 1e-3, 0.0), "`fraction`"),
        ((10, 1e-3, 1.5), "`fraction`"),
        ((10, 1e-3, 0.5, True), "`tail`"),
        ((10, schedules.PolynomialDecay(1.0, 10, 0.0)), "ends at a rate of 0"),
    ],
)
def test_uptraining_with_invalid_argument_names_it(arguments, message):
    with pytest.raises(ValueError, match=message):
        uptraining(*arguments)


def test_report_counts_parameters_and_cache_bytes_of_decoder_layers():
    """The report counts an encoder's keys and values, or the wrong bytes per element."""
    x, y = keras.Input((None, 4)), keras.Input((None, 4))

    def attention(dtype):
        return keras.layers.MultiHeadAttention(2, 3, use_bias=False, dtype=dtype)

    encoded = attention("float32")(y, y)
    causal = attention("mixed_bfloat16")(x, x, use_causal_mask=True)
    crossed = attention("float32")(causal, encoded)
    model = keras.Model([x, y], crossed)
    parameters = 3 * 4 * (4 * 2 * 3)  # three layers of query, key, value and output kernels
    saved = 2 * 2 * (4 * 1 * 3)  # a key and a value head of two layers
    before, after = 2 * 6 * 2 + 2 * 6 * 4, 2 * 3 * 2 + 2 * 3 * 4
    lines = gqa_report(model, convert_to_gqa(model, 1), context_length=1000).splitlines()
    share = (parameters - saved) / parameters
    assert lines[2:] == [
        f"| parameters | {parameters} | {parameters - saved} | {share:.3f} |",
        f"| key-value bytes a token | {before} | {after} | 0.500 |",
        f"| key-value bytes at 1,000 tokens | {before},000 | {after},000 | 0.500 |",
    ]
