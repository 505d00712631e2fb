"""The function that `CausalLM.generate` calls for each batch of prompts."""

import keras
import keras_hub
import numpy as np

from keras_recurrent.generation.lengths import bucket
from keras_recurrent.generation.ways import tell

Sampler = keras_hub.samplers.Sampler


def make_writer(model, compiled):
    """A function `(inputs, stop_token_ids) -> {"token_ids", "padding_mask"}`.

    None where that is KerasHub's: on JAX and TensorFlow, for a sampler with a loop of its own, such
    as beam and contrastive search, in which all rows are at one place.

    compiled: what `model.compile` got as `jit_compile`, None for "auto".
    """
    if keras.config.backend() == "torch":
        return _on_torch(model, compiled)
    return _in_programs(model, compiled) if _only_chooses(model.sampler) else None


def _only_chooses(sampler):
    """Whether it has no loop of its own, but chooses tokens from probabilities."""
    names = "__call__", "run_loop"
    return all(getattr(type(sampler), name) is getattr(Sampler, name) for name in names)


def _on_torch(model, compiled):
    import torch

    from keras_recurrent.generation import torch_loop, torch_ways

    ways = torch_ways.Ways(model, compiled)

    @torch.no_grad()
    def write(inputs, stop_token_ids=None):
        if not _only_chooses(model.sampler):
            inputs = keras.tree.map_structure(keras.ops.convert_to_tensor, inputs)
            with ways.network() as network:
                return model._generate_by_sampler(inputs, stop_token_ids, network)
        token_ids, lengths = _prompts(inputs)
        rows = torch_loop.write(model, ways, token_ids, lengths, stop_token_ids)
        return _outputs(inputs, *rows)

    return write


def _in_programs(model, compiled):
    from keras_recurrent.generation.programs import make_program

    program = make_program(model, compiled)

    def write(inputs, stop_token_ids=None):
        token_ids, lengths = _prompts(inputs)
        batch, limit = token_ids.shape
        room = np.zeros((batch, bucket(limit) - limit), "int32")
        token_ids = _distributed(np.concatenate((token_ids, room), axis=1))
        stop_token_ids = None if stop_token_ids is None else tuple(stop_token_ids)
        tell(model, "program")
        rows = program(token_ids, _distributed(lengths), np.int32(limit), stop_token_ids)
        return _outputs(inputs, *rows)

    return write


def _prompts(inputs):
    """The tokens [B, T] of prompts, and their lengths [B]: NumPy arrays."""
    token_ids, mask = (
        keras.ops.convert_to_numpy(inputs[name]) for name in ("token_ids", "padding_mask")
    )
    return token_ids.astype("int32"), mask.astype("bool").sum(axis=1).astype("int32")


def _outputs(inputs, token_ids, lengths):
    length = inputs["token_ids"].shape[1]
    token_ids, lengths = map(keras.ops.convert_to_numpy, (token_ids, lengths))
    rows = {
        "token_ids": token_ids[:, :length],
        "padding_mask": np.arange(length) < lengths[:, None],
    }
    return keras.tree.map_structure(keras.ops.convert_to_tensor, rows)


def _distributed(array):
    """On the devices of `keras.distribution`, if there is one."""
    distribution = keras.distribution.distribution()
    layout = distribution and distribution.get_data_layout(array.shape)
    return keras.distribution.distribute_tensor(array, layout) if layout else array
