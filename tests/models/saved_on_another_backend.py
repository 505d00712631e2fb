"""Program that trains and saves a model, or loads it, on the backend of its process.

`python -m tests.models.saved_on_another_backend save|load PATH FAMILY DTYPE` prints, as JSON, the
variables of the optimizer and the loss of the next batch; `load` also the imported frameworks.
"""

import json
import sys

import keras

import keras_recurrent
from tests.models.tiny import tiny_causal_lm, training_batch

OPTIMIZERS = {
    "float32": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "mixed_float16": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)),
}


def make(family, dtype):
    model = tiny_causal_lm(family=family, num_layers=1, dtype=dtype)
    if family == "hgrn2":
        model = keras_recurrent.models.HGRN2TextClassifier(model.backbone, num_classes=3)
    model.compile(OPTIMIZERS[dtype](), model.loss)
    return model


def main(action, path, family, dtype):
    if action == "save":
        model = make(family, dtype)
    else:
        model = keras.saving.load_model(path)
    found = {"optimizer": type(model.optimizer).__name__, "jit_compile": model.jit_compile}
    if action == "save":
        train(model, 0)
        model.save(path)
    found["variables"] = {
        f"{i} {v.path.rpartition('/')[2]}": keras.ops.convert_to_numpy(v).astype(float).tolist()
        for i, v in enumerate(model.optimizer.variables)
    }
    found["frameworks"] = [name for name in ("torch", "tensorflow") if name in sys.modules]
    found["losses"] = [train(model, seed) for seed in (1, 2)]
    print(json.dumps(found))


def train(model, seed):
    x, y = training_batch(seed=seed)
    if isinstance(model, keras_recurrent.models.HGRN2TextClassifier):
        y = y[:, 0] % 3
    return float(model.train_on_batch(x, y)[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
