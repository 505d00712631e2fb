"""One of two processes that train, save and generate with one model. Prints losses and tokens.

Arguments: the number of this process, a folder for files, and the port of the first process.
"""

import importlib.util
import json
import pathlib
import sys

import jax
import numpy as np

number, folder, port = int(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
import keras  # noqa: E402

keras.utils.set_random_seed(0)
keras.distribution.initialize(f"localhost:{port}", num_processes=2, process_id=number)

from keras_recurrent.devices.jax_processes import gather_to_numpy  # noqa: E402
from tests.devices.jax_layouts import generate, make_model, training_batch  # noqa: E402
from tests.devices.meshes import device_mesh, model_parallel  # noqa: E402
from tests.models.tiny import FAMILIES  # noqa: E402

FAMILY = "hgrn2"


def split_over(*sizes):
    """The scope of models on a mesh; each process passes its part of the data."""
    mesh = device_mesh(*sizes, devices=keras.distribution.list_devices())
    layout_map = FAMILIES[FAMILY].backbone.get_layout_map(mesh)
    return model_parallel(layout_map, auto_shard_dataset=False)


def train(model, callbacks=()):
    """Returns the loss of a batch of which each process passes its half."""
    x, y, weight = training_batch()
    half = slice(number * len(y) // 2, (number + 1) * len(y) // 2)
    x = {name: array[half] for name, array in x.items()}
    options = {"batch_size": 8, "callbacks": callbacks, "verbose": 0}
    return model.fit(x, y[half], sample_weight=weight[half], **options).history["loss"][0]


def generate_tokens(model):
    lengths = training_batch()[2].sum(axis=1, keepdims=True) - 4
    return generate(model, None, lengths).tolist()


def assert_equal_weights(actual, expected):
    for a, b in zip(actual.weights, expected.weights, strict=True):
        np.testing.assert_array_equal(gather_to_numpy(a), gather_to_numpy(b))


def gate_kernel(model):
    return model.backbone.transformer_layers[0].mlp.gate_proj.kernel.value


def assert_orbax_loads_shards(model):
    """Each process saves and loads its shards."""
    shards = str(folder / "shards")
    train(model, [keras.callbacks.OrbaxCheckpoint(shards, monitor="loss")])
    loaded = make_model(FAMILY)
    loaded.load_weights(shards)
    assert_equal_weights(loaded, model)
    assert gate_kernel(loaded).sharding == gate_kernel(model).sharding


def train_on_shards_of_time():
    """Loss and tokens of a model whose sequences are split over both processes."""
    with split_over(1, 4, 1):
        model = make_model(FAMILY)
        x, y, weight = training_batch()
        history = model.fit(x, y, sample_weight=weight, batch_size=16, verbose=0)
        return history.history["loss"][0], generate_tokens(model)


def main():
    with split_over(2, 2):
        model = make_model(FAMILY)
        loss = train(model)
        assert not gate_kernel(model).is_fully_addressable
        model.save_weights(folder / "all.weights.h5")
        model.save_to_preset(str(folder / "preset"))
        model.export_to_transformers(str(folder / "exported"))
        tokens = generate_tokens(model)
        x, _, mask = training_batch()
        prompt = {"token_ids": x["token_ids"], "padding_mask": np.sort(mask)[:, ::-1]}
        stream = model.stream(cache=model.prefill(prompt), max_length=2, stop_token_ids=None)
        streamed = [np.asarray(step).tolist() for step in stream]
        loaded = make_model(FAMILY)
        loaded.load_weights(folder / "all.weights.h5")
        assert_equal_weights(loaded, model)
        assert_equal_weights(type(model).from_preset(str(folder / "preset")), model)
        if importlib.util.find_spec("orbax"):
            assert_orbax_loads_shards(loaded)
    loss_of_shards, tokens_of_shards = train_on_shards_of_time()
    assert tokens == tokens_of_shards
    print(json.dumps([loss, loss_of_shards, tokens, streamed]), flush=True)


if __name__ == "__main__":
    main()
