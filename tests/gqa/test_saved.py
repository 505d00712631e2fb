"""Saved converted models load after `import keras_recurrent`, also files of version 0.1.0."""

import json
import pathlib

import keras_hub
import numpy as np
import pytest

from keras_recurrent.conversion import convert_to_gqa
from tests.gqa.loaded import INPUTS, report
from tests.gqa.oracle import numpy, set_weights
from tests.processes import fresh_process

pytestmark = pytest.mark.once
# Saved on JAX by version 0.1.0, when `keras_recurrent.gqa`, the module of their classes, was
# `keras_recurrent.conversion.gqa`.
FILES = pathlib.Path(__file__).parents[1] / "data" / "converted_models"
TAIL = ["keras_recurrent>ScheduleTail", 1]  # the schedule and the iterations of an optimizer


def assert_loaded(loaded, case):
    """`case` is (path, "keras" or a class of KerasHub, inputs, class, outputs, schedule)."""
    (*_, cls, outputs, schedule), (name, actual, loaded_schedule, is_registered) = case, loaded
    assert (name, loaded_schedule) == (cls, schedule)
    assert is_registered  # the class itself replaces its placeholder in Keras's registry
    np.testing.assert_allclose(np.array(actual), outputs, rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
def test_converted_models_load_after_importing_only_the_package(tmp_path):
    """A file of a task, a preset or version 0.1.0 needs an import of `gqa` to load."""
    backbone = keras_hub.models.GPT2Backbone(5, 1, 2, 4, 2, max_sequence_length=3)
    task = keras_hub.models.GPT2CausalLM(backbone)
    set_weights(task)
    grouped = convert_to_gqa(task, 1)
    file, preset = str(tmp_path / "task.keras"), str(tmp_path / "preset")
    grouped.save(file)
    grouped.save_to_preset(preset)
    expected = "GroupedGPT2CausalLM", numpy(grouped(INPUTS["tokens"])), None
    hidden_states = numpy(grouped.backbone(INPUTS["tokens"]))
    cases = [
        (preset, "CausalLM", "tokens", *expected),
        (preset, "GPT2CausalLM", "tokens", *expected),
        (file, "keras", "tokens", *expected),
        (preset, "Backbone", "tokens", "GroupedGPT2Backbone", hidden_states, None),
    ]
    cases += published_cases()
    arguments = json.dumps([case[:3] for case in cases])
    reports = fresh_process("-m", "tests.gqa.loaded", arguments)
    for loaded, case in zip(reports, cases, strict=True):
        assert_loaded(loaded, case)


def published_cases():
    """The files of version 0.1.0, with their classes, outputs and schedules."""
    with np.load(FILES / "outputs.npz") as outputs:
        return [
            (
                *(str(FILES / "grouped_model.keras"), "keras", "sequence"),
                *("GroupedModel", outputs["grouped_model"], TAIL),
            ),
            (
                *(str(FILES / "gpt2_backbone.keras"), "keras", "tokens"),
                *("GroupedGPT2Backbone", outputs["gpt2_backbone"], None),
            ),
        ]


@pytest.mark.parametrize("case", published_cases(), ids=["grouped_model", "gpt2_backbone"])
def test_files_of_version_0_1_load(case):
    assert_loaded(report(*case[:3]), case)
