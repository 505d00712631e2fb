"""Prints reports of saved models, loaded before anything imports GQA.

Usage: python -m tests.gqa.loaded '[[PATH, KIND, INPUTS], ...]'
"""

import json
import sys

import keras_recurrent  # noqa: F401

# isort: split
import keras
import keras_hub  # which may import TensorFlow, after Triton
import numpy as np

INPUTS = {
    "sequence": np.linspace(-1, 1, 12, dtype="float32").reshape(1, 3, 4),
    "tokens": {"token_ids": np.array([[1, 4, 2]]), "padding_mask": np.ones((1, 3), "int32")},
}


def report(path, kind, inputs):
    """Returns the class of a model, its outputs, and its optimizer's schedule and iterations.

    The last element is False if Keras's registry has another class by the model's name. `kind` is
    "keras" for a file, or a class of KerasHub for a preset.
    """
    if kind == "keras":
        model = keras.saving.load_model(path)
    else:
        model = getattr(keras_hub.models, kind).from_preset(path)
    outputs = keras.ops.convert_to_numpy(model(INPUTS[inputs])).tolist()
    rate = model.optimizer.get_config()["learning_rate"] if model.compiled else None
    is_schedule = isinstance(rate, dict)
    schedule = [rate["registered_name"], int(model.optimizer.iterations)] if is_schedule else None
    registered = keras.saving.get_registered_object(keras.saving.get_registered_name(type(model)))
    return [type(model).__name__, outputs, schedule, registered in (None, type(model))]


if __name__ == "__main__":
    assert not [name for name in sys.modules if name.startswith("keras_recurrent.gqa")]
    print(json.dumps([report(*case) for case in json.loads(sys.argv[1])]))
