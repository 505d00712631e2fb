"""Saved models load where nothing but `import keras_recurrent` was done, those of before, too."""

import json
import pathlib

import keras
import keras_hub
import numpy as np
import pytest

from keras_recurrent.conversion import convert_to_gqa, uptraining
from tests.gqa.oracle import numpy, set_weights
from tests.processes import fresh_process

# Saved on JAX by version 0.1.0 before `keras_recurrent.conversion.gqa`, which both name as the
# module of their classes, became `keras_recurrent.gqa`.
BEFORE = pathlib.Path(__file__).parents[1] / "data" / "converted_models"
SEQUENCE = np.linspace(-1, 1, 12, dtype="float32").reshape(1, 3, 4)
TOKENS = {"token_ids": np.array([[1, 4, 2]]), "padding_mask": np.ones((1, 3), "int32")}

# Loads each model of `argv`, and prints what it is and what it gives, before anything imports GQA.
LOAD = """
import json, sys
import keras_recurrent
import keras, keras_hub
import numpy as np

loaded = {name for name in sys.modules if name.startswith("keras_recurrent.gqa")}
assert not loaded
arguments = json.loads(sys.argv[1])
loaded = []
for path, kind, inputs in arguments:
    if kind == "keras":
        model = keras.saving.load_model(path)
    else:
        model = getattr(keras_hub.models, kind).from_preset(path)
    if inputs == "sequence":
        inputs = np.linspace(-1, 1, 12, dtype="float32").reshape(1, 3, 4)
    else:
        inputs = {"token_ids": np.array([[1, 4, 2]]), "padding_mask": np.ones((1, 3), "int32")}
    outputs = keras.ops.convert_to_numpy(model(inputs)).tolist()
    schedule = None
    rate = model.optimizer.get_config()["learning_rate"] if model.compiled else None
    if isinstance(rate, dict):
        schedule = [rate["registered_name"], int(model.optimizer.iterations)]
    registered = keras.saving.get_registered_object(keras.saving.get_registered_name(type(model)))
    loaded.append([type(model).__name__, outputs, schedule, registered in (None, type(model))])
print(json.dumps(loaded))
"""


def load_in_new_process(arguments):
    return fresh_process("-c", LOAD, json.dumps(arguments))


def schedule_tail():
    decay = keras.optimizers.schedules.PolynomialDecay(1.0, 10, 0.5)
    return uptraining(10, decay, 0.2, tail=True).learning_rate


def functional():
    """Its attention stands in the graph, one layer of Keras and one of KerasHub."""
    x = keras.Input((3, 4))
    y = keras.layers.MultiHeadAttention(2, 2)(x, x, use_causal_mask=True)
    mask = np.tril(np.ones((1, 3, 3), "bool"))
    y = keras_hub.layers.CachedMultiHeadAttention(2, 2)(y, y, attention_mask=mask)
    return keras.Model(x, y)


def holding():
    """Its attention is held by a layer."""
    x = keras.Input((3, 4))
    return keras.Model(x, keras_hub.layers.TransformerDecoder(2, 2)(x))


def gpt2():
    backbone = keras_hub.models.GPT2Backbone(5, 1, 2, 4, 2, max_sequence_length=3)
    return keras_hub.models.GPT2CausalLM(backbone)


@pytest.mark.nightly
@pytest.mark.once
def test_every_kind_of_converted_model_loads_after_importing_the_package(tmp_path):
    arguments, wanted = [], []
    for build in (functional, holding):
        model = build()
        set_weights(model)
        grouped = convert_to_gqa(model, 1)
        grouped.compile(keras.optimizers.SGD(schedule_tail()), "mse")
        grouped.train_on_batch(SEQUENCE, SEQUENCE)
        grouped.save(tmp_path / f"{build.__name__}.keras")
        arguments.append([str(tmp_path / f"{build.__name__}.keras"), "keras", "sequence"])
        tail = ["keras_recurrent>ScheduleTail", 1]
        wanted.append([type(grouped).__name__, numpy(grouped(SEQUENCE)), tail])

    task = gpt2()
    set_weights(task)
    grouped = convert_to_gqa(task, 1)
    grouped.save(tmp_path / "task.keras")
    grouped.save_to_preset(str(tmp_path / "preset"))
    outputs = numpy(grouped(TOKENS))
    arguments += [
        [str(tmp_path / "preset"), "CausalLM", "tokens"],
        [str(tmp_path / "preset"), "GPT2CausalLM", "tokens"],
        [str(tmp_path / "task.keras"), "keras", "tokens"],
        [str(tmp_path / "preset"), "Backbone", "tokens"],
    ]
    wanted += [["GroupedGPT2CausalLM", outputs, None]] * 3
    wanted.append(["GroupedGPT2Backbone", numpy(grouped.backbone(TOKENS)), None])

    found = load_in_new_process(arguments)
    for (name, outputs, schedule, own), (kind, expected, tail) in zip(found, wanted, strict=True):
        assert (name, schedule) == (kind, tail)
        assert own  # Keras knows the class itself by now, and not its placeholder
        np.testing.assert_allclose(np.array(outputs), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.once
def test_files_of_before():
    """Next to `test_files_of_before_load`, without the time to start a process."""
    grouped, backbone = (
        keras.saving.load_model(BEFORE / f"{name}.keras")
        for name in ("grouped_model", "gpt2_backbone")
    )
    assert type(grouped).__name__ == "GroupedModel"
    assert type(backbone).__name__ == "GroupedGPT2Backbone"
    assert int(grouped.optimizer.iterations) == 1
    rate = grouped.optimizer.get_config()["learning_rate"]
    assert rate["registered_name"] == "keras_recurrent>ScheduleTail"
    with np.load(BEFORE / "outputs.npz") as wanted:
        for model, given, name in (
            (grouped, SEQUENCE, "grouped_model"),
            (backbone, TOKENS, "gpt2_backbone"),
        ):
            np.testing.assert_allclose(numpy(model(given)), wanted[name], rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
@pytest.mark.once
def test_files_of_before_load():
    """In a process that has not imported the modules of their classes."""
    with np.load(BEFORE / "outputs.npz") as file:
        wanted = dict(file)
    found = load_in_new_process(
        [
            [str(BEFORE / "grouped_model.keras"), "keras", "sequence"],
            [str(BEFORE / "gpt2_backbone.keras"), "keras", "tokens"],
        ]
    )
    grouped, backbone = found
    assert grouped[0] == "GroupedModel"
    assert grouped[2] == ["keras_recurrent>ScheduleTail", 1]
    assert backbone[0] == "GroupedGPT2Backbone"
    for (_, outputs, _, _), name in zip(found, ("grouped_model", "gpt2_backbone"), strict=True):
        np.testing.assert_allclose(np.array(outputs), wanted[name], rtol=1e-5, atol=1e-6)
