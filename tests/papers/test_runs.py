"""Modules that the guides of papers share."""

import functools

import keras
import numpy as np
import pytest

from keras_recurrent import exclude_from_weight_decay
from keras_recurrent.models import GriffinBackbone, GriffinCausalLM


@pytest.mark.once
def test_runs_reads_windows_of_text_and_formats_tables(guide, tmp_path):
    runs = guide("runs")
    file = tmp_path / "text"
    file.write_bytes(bytes(range(100)))
    training, held_out = runs.read_text(file, held_out=0.2)
    np.testing.assert_array_equal(held_out, np.arange(80, 100))
    assert len(training) == 80
    windows = runs.spread(held_out, 3, 6, 12)
    np.testing.assert_array_equal(windows[:, [0, 11]], [[80, 91], [86, 97], [92, 85]])
    for first in (0, 3, 6):  # all of 80 to 97, at any six places
        np.testing.assert_array_equal(np.sort(windows[:, first : first + 6], None), range(80, 98))
    for sizes in ((4, 6, 12), (2, 6, 13), (1, 1, 21)):
        with pytest.raises(SystemExit, match="take a longer --text"):
            runs.spread(held_out, *sizes)
    training, held_out = runs.read_text()
    assert len(held_out) / (len(training) + len(held_out)) == pytest.approx(0.15, abs=1e-4)
    assert runs.mean_with_error([1.0, 2.0, 3.0], 2) == "2.00 ± 1.00"
    assert runs.mean_with_error([1.0], 1) == "1.0"
    assert np.isnan(runs.deviations([1.0]))  # one seed is beyond no other
    assert runs.table(("a", "b"), [(1, 2)]) == "| a | b |\n| --- | ---: |\n| 1 | 2 |"
    results = runs.Results(tmp_path / "folder" / "results.jsonl")
    results.append(seed=3, model="a")
    results = runs.Results(results.path)
    assert results.missing([2, 3], model="a") == [2]
    assert results.missing([3], model="b") == [3]


def tiny(seed):
    keras.utils.set_random_seed(seed)
    sizes = {"hidden_dim": 8, "intermediate_dim": 8, "lru_width": 8, "num_blocks": 2}
    return GriffinCausalLM(GriffinBackbone(vocabulary_size=7, num_layers=1, **sizes))


@pytest.mark.nightly
@pytest.mark.skipif(keras.backend.backend() != "jax", reason="a program of JAX")
def test_runs_trains_several_models_as_keras_trains_one(guide):
    """Models that train in one program get other weights than with Keras's training step."""
    counts = np.random.default_rng(1).integers(0, 3, (2, 2, 5)).astype("float32")
    training = guide("training")
    rows = np.random.default_rng(0).integers(0, 7, (2, 2, 2, 6))  # steps, models, rows, tokens
    trainings = {
        "by Keras": training._keras_steps,
        "in turns": functools.partial(training._compile_steps, side_by_side=False),
        "side by side": functools.partial(training._compile_steps, side_by_side=True),
    }
    found = {}
    for name, start in trainings.items():
        models = [tiny(0), tiny(1)]
        optimizers = [training.adamw(0.01, 1, 2) for _ in models]
        for model, optimizer in zip(models, optimizers, strict=True):
            exclude_from_weight_decay(optimizer, model)
            optimizer.build(model.trainable_variables)
        step, finish = start(models, optimizers)
        first, _ = (np.array(step(part[..., :-1], part[..., 1:], counts)) for part in rows)
        finish()
        found[name] = [first, *(w for model in models for w in model.get_weights())]
        # Each model's weights are found by the program of the first one's shape.
        predict = training.predictor(models[0], batch_size=1)
        for model in models:
            logits = training.logits_of(model, rows[0, 0])
            likeliest = np.argmax(keras.ops.convert_to_numpy(logits), axis=-1)
            np.testing.assert_array_equal(predict(model, rows[0, 0]), likeliest)
    for name in ("in turns", "side by side"):
        for one, other in zip(found["by Keras"], found[name], strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5, err_msg=name)
