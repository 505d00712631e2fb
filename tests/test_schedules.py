"""`InverseSquareRoot`, compared with its equation, in files and in training."""

import keras
import numpy as np
import pytest

from keras_recurrent.schedules import InverseSquareRoot

pytestmark = pytest.mark.once


def expected_rate(step, peak, warmup):
    step = np.float64(step)
    return peak * (step / warmup if step < warmup else np.sqrt(warmup / step))


@pytest.mark.parametrize("warmup", [1, 7, 4000])
def test_inverse_square_root_equals_its_equation(warmup):
    schedule = InverseSquareRoot(5e-4, warmup)
    steps = [0, 1, 2, 6, 7, 8, 3999, 4000, 4001, 50_000, 10_000_000]
    for step in steps:
        found = keras.ops.convert_to_numpy(schedule(keras.ops.convert_to_tensor(step, "int32")))
        np.testing.assert_allclose(found, expected_rate(step, 5e-4, warmup), rtol=1e-6)
        assert found.dtype == "float32"
    found = keras.ops.convert_to_numpy(schedule(np.array(steps)))
    np.testing.assert_allclose(found, [expected_rate(s, 5e-4, warmup) for s in steps], rtol=1e-6)


def test_inverse_square_root_is_restored_from_configs_and_files(tmp_path):
    schedule = InverseSquareRoot(3e-3, np.int64(5), name="rise_and_fall")
    schedules = keras.optimizers.schedules
    again = schedules.deserialize(schedules.serialize(schedule))
    assert isinstance(again, InverseSquareRoot)
    assert again.get_config() == schedule.get_config()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(schedule), "mse")
    model.fit(np.ones((4, 2)), np.ones((4, 1)), batch_size=1, verbose=0)
    model.save(tmp_path / "model.keras")
    optimizer = keras.models.load_model(tmp_path / "model.keras").optimizer
    np.testing.assert_allclose(
        keras.ops.convert_to_numpy(optimizer.learning_rate), expected_rate(4, 3e-3, 5), rtol=1e-6
    )


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((0.0, 10), "`learning_rate` must be a finite number above 0; got 0.0"),
        ((float("nan"), 10), "`learning_rate` must be a finite number above 0; got nan"),
        ((1e-3, 0), "`warmup_steps` must be an integer, at least 1; got 0"),
        ((1e-3, 2.5), "`warmup_steps` must be an integer, at least 1; got 2.5"),
    ],
)
def test_inverse_square_root_wrong_arguments_raise(arguments, match):
    with pytest.raises(ValueError, match=match):
        InverseSquareRoot(*arguments)
