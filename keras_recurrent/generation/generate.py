"""What writes for a language model: its own loops, or KerasHub's."""

import keras
import keras_hub
import numpy as np

from keras_recurrent.devices.jax_processes import whole

Sampler = keras_hub.samplers.Sampler


def only_chooses(sampler):
    """Whether it has no loop of its own, but chooses tokens from probabilities."""
    names = "__call__", "run_loop"
    return all(getattr(type(sampler), name) is getattr(Sampler, name) for name in names)


def takes_the_largest(sampler):
    """Whether it is KerasHub's greedy one: the largest logit has the largest probability."""
    return type(sampler) is keras_hub.samplers.GreedySampler and sampler.temperature > 0


def make_loops(model, compiled):
    """What reads and writes for a model: a `torch.loop.Loop` or the `xla_programs.Programs`.

    compiled: what `model.compile` got as `jit_compile`, None for "auto".
    """
    if keras.config.backend() == "torch":
        from keras_recurrent.generation.torch.loop import Loop

        return Loop(model, compiled)
    from keras_recurrent.generation.xla_programs import Programs

    return Programs(model, compiled)


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


def tokens_and_lengths(inputs):
    """The tokens [B, T] of prompts, and their lengths [B]: NumPy arrays."""
    token_ids, mask = (whole(inputs[name]) for name in ("token_ids", "padding_mask"))
    return token_ids.astype("int32"), mask.astype("bool").sum(axis=1).astype("int32")
