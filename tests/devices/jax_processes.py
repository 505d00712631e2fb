"""One of two processes that train, save and write with one model. Prints JSON.

Its arguments: its number, the port of the first one, and a folder for files.
"""

import importlib.util
import json
import pathlib
import sys

import jax
import numpy as np

number, port, folder = int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
import keras  # noqa: E402

keras.utils.set_random_seed(0)
keras.distribution.initialize(f"localhost:{port}", num_processes=2, process_id=number)

from keras_recurrent.devices.jax_processes import gather_to_numpy  # noqa: E402
from tests.devices.jax_layouts import batch, make  # noqa: E402
from tests.models.tiny import FAMILIES  # noqa: E402

FAMILY = "hgrn2"


def trained(model, callbacks=()):
    """With each process's rows of the same batch."""
    x, y, weight = batch()
    share = slice(number * len(y) // 2, (number + 1) * len(y) // 2)
    x = {name: array[share] for name, array in x.items()}
    options = {"batch_size": 8, "callbacks": callbacks, "verbose": 0}
    history = model.fit(x, y[share], sample_weight=weight[share], **options)
    return history.history["loss"][0]


def written(model):
    x, _, mask = batch()
    mask = np.arange(mask.shape[1]) < mask.sum(axis=1, keepdims=True) - 4
    rows = model.generate({"token_ids": x["token_ids"], "padding_mask": mask}, stop_token_ids=None)
    return np.asarray(rows["token_ids"]).tolist()


def equal(a, b):
    arrays = [[gather_to_numpy(weight) for weight in model.weights] for model in (a, b)]
    return all(map(np.array_equal, *arrays))


def read_from_shards(model):
    """Whether Orbax reads what it wrote, each process its shards; None where it is missing."""
    if importlib.util.find_spec("orbax") is None:
        return None
    shards = str(folder / "shards")
    trained(model, [keras.callbacks.OrbaxCheckpoint(shards, monitor="loss")])
    again = make(FAMILY)
    again.load_weights(shards)
    kernels = [m.backbone.transformer_layers[0].mlp.gate_proj.kernel for m in (model, again)]
    return equal(model, again) and kernels[0].value.sharding == kernels[1].value.sharding


def on_parts_of_rows(devices):
    """The loss of training with whole rows, whose tokens are split over both processes."""
    mesh = keras.distribution.DeviceMesh((1, 4, 1), ("batch", "sequence", "model"), devices)
    layout_map = FAMILIES[FAMILY].backbone.get_layout_map(mesh)
    distribution = keras.distribution.ModelParallel(layout_map=layout_map, auto_shard_dataset=False)
    with distribution.scope():
        model = make(FAMILY)
        x, y, weight = batch()
        history = model.fit(x, y, sample_weight=weight, batch_size=16, verbose=0)
        return history.history["loss"][0], written(model)


def main():
    devices = keras.distribution.list_devices()
    mesh = keras.distribution.DeviceMesh((2, 2), ("batch", "model"), devices)
    layout_map = FAMILIES[FAMILY].backbone.get_layout_map(mesh)
    distribution = keras.distribution.ModelParallel(layout_map=layout_map, auto_shard_dataset=False)
    with distribution.scope():
        model = make(FAMILY)
        loss = trained(model)
        kernel = model.backbone.transformer_layers[0].mlp.gate_proj.kernel.value
        model.save_weights(folder / "all.weights.h5")
        model.save_to_preset(str(folder / "preset"))
        model.export_to_transformers(str(folder / "exported"))
        tokens = written(model)
        x, _, mask = batch()
        prompt = {"token_ids": x["token_ids"], "padding_mask": np.sort(mask)[:, ::-1]}
        cache = model.prefill(prompt)
        stream = model.stream(cache=cache, max_length=2, stop_token_ids=None)
        ahead = [np.asarray(piece).tolist() for piece in stream]
        again = make(FAMILY)
        again.load_weights(folder / "all.weights.h5")
        preset = type(model).from_preset(str(folder / "preset"))
        read = [equal(again, model), equal(preset, model)]
        from_shards = read_from_shards(again)
    report = {
        "loss": loss,
        "of parts": on_parts_of_rows(devices),
        "spread": not kernel.is_fully_addressable,
        "tokens": tokens,
        "ahead": ahead,
        "read": read,
        "read from shards": from_shards,
    }
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
