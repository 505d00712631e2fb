"""Chooses the decoding loop for a sampler and backend."""

from typing import Any

import keras
import numpy as np

from keras_recurrent.generation.prompts import tokens_and_lengths
from keras_recurrent.generation.samplers import only_chooses

Loops: Any
if keras.config.backend() == "torch":
    from keras_recurrent.generation.torch.loop import Loop as Loops
else:
    from keras_recurrent.generation.xla_programs import Programs as Loops


def make_loops(model, compiled):
    """What reads and writes for a model: a `torch.loop.Loop` or the `xla_programs.Programs`.

    compiled: what `model.compile` got as `jit_compile`, None for "auto".
    """
    return Loops(model, compiled)


def make_writer(model, loops):
    """A function `(inputs, stop_token_ids) -> {"token_ids", "padding_mask"}`.

    None where that is KerasHub's: on JAX and TensorFlow, for a sampler with a loop of its own, such
    as beam and contrastive search, in which all rows are at one place.
    """
    if not only_chooses(model.sampler):
        return _by_sampler(model, loops) if keras.config.backend() == "torch" else None

    def write(inputs, stop_token_ids=None):
        stop_token_ids = None if stop_token_ids is None else tuple(stop_token_ids)
        token_ids, lengths, _ = loops.write(*tokens_and_lengths(inputs), stop_token_ids)
        real = np.arange(token_ids.shape[1]) < lengths[:, None]
        rows = {"token_ids": token_ids, "padding_mask": real}
        return keras.tree.map_structure(keras.ops.convert_to_tensor, rows)

    return write


def _by_sampler(model, loops):
    """KerasHub's loop of a sampler on torch, over steps that are traced."""
    import torch

    @torch.no_grad()
    def write(inputs, stop_token_ids=None):
        inputs = keras.tree.map_structure(keras.ops.convert_to_tensor, inputs)
        with loops.ways.network() as network:
            return model._generate_by_sampler(inputs, stop_token_ids, network)

    return write
