"""Chooses the decoding loop for a sampler, a backend and the options of `compile`."""

from typing import Any

import keras
import numpy as np

from keras_recurrent.generation.prompts import check_rows, check_stop_tokens, tokens_and_lengths
from keras_recurrent.generation.samplers import has_base_loop
from keras_recurrent.generation.ways import record_mode

Loops: Any
if keras.config.backend() == "torch":
    from keras_recurrent.generation.torch.loop import Loop as Loops
else:
    from keras_recurrent.generation.xla_programs import Programs as Loops


class GenerateFunction:
    """Generates for one batch of tokens: `model.generate_function`, which KerasHub calls.

    Args:
        model: the language model.
        has_custom_step: boolean, whether its class overrides `generate_step`.
        compiled: `jit_compile` of `model.compile`, None for "auto".
        make_hub_function: a function that returns KerasHub's function for one batch.

    Attributes:
        loops: a `torch.loop.Loop` or the `xla_programs.Programs`, which decode for samplers that
            only choose tokens; None where KerasHub's loop does.
        hub_loop_reason: a pair, the reason for KerasHub's loop and the mend; or None.
    """

    def __init__(self, model, has_custom_step, compiled, make_hub_function):
        self._model, self._has_custom_step = model, has_custom_step
        self.loops, self.hub_loop_reason = None, None
        on_torch = keras.config.backend() == "torch"
        if model.run_eagerly:
            self.hub_loop_reason = "`compile` got `run_eagerly=True`", "Compile without it"
        elif has_custom_step:
            mend = "Continue from `backbone.get_initial_state` with `call_with_cache`"
            self.hub_loop_reason = "the class has a `generate_step` of its own", mend
        elif not has_base_loop(model.sampler):
            self.hub_loop_reason = (
                f"the sampler {type(model.sampler).__name__} has a loop of its own",
                "Compile with 'greedy', 'top_k', 'top_p' or 'random'",
            )
            if on_torch:
                self._generate = _sampler_loop(model, Loops(model, compiled))
                return
        if self.hub_loop_reason is None:
            self.loops = Loops(model, compiled)
        else:
            self._hub_function, self._generate = make_hub_function(), self._generate_with_hub

    def __call__(self, inputs, stop_token_ids=None):
        """Generates.

        Args:
            inputs: `{"token_ids", "padding_mask"}`, each `[B, T]`.
            stop_token_ids: a tuple of integers, or None.

        Returns:
            The same two tensors with the new tokens.
        """
        check_rows(inputs, self._model.backbone.vocabulary_size)
        check_stop_tokens(stop_token_ids, self._model.backbone.vocabulary_size)
        return self._generate(inputs, stop_token_ids)

    def _generate(self, inputs, stop_token_ids):
        stop_token_ids = None if stop_token_ids is None else tuple(stop_token_ids)
        token_ids, lengths, _ = self.loops.write(*tokens_and_lengths(inputs), stop_token_ids)
        real = np.arange(token_ids.shape[1]) < lengths[:, None]
        batch = {"token_ids": token_ids, "padding_mask": real}
        return keras.tree.map_structure(keras.ops.convert_to_tensor, batch)

    def _generate_with_hub(self, inputs, stop_token_ids):
        on_torch, reason = keras.config.backend() == "torch", self.hub_loop_reason[0]
        if self._model.run_eagerly or (self._has_custom_step and on_torch):
            record_mode(self._model, "eager", {"traced" if on_torch else "program": reason})
        else:
            record_mode(self._model, "sampler", {"program": reason})
        return self._hub_function(inputs, stop_token_ids=stop_token_ids)


def _sampler_loop(model, loops):
    """KerasHub's loop of a sampler on torch, over traced steps."""
    import torch

    @torch.no_grad()
    def generate(inputs, stop_token_ids):
        inputs = keras.tree.map_structure(keras.ops.convert_to_tensor, inputs)
        with loops.ways.network() as network:
            return model._generate_by_sampler(inputs, stop_token_ids, network)

    return generate
