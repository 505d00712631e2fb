"""Chooses the decoding loop for a sampler, a backend and the options of `compile`."""

from typing import Any

import keras
import keras_hub

from keras_recurrent.generation.modes import record_mode
from keras_recurrent.generation.prompts import (
    as_batch,
    check_equal_lengths,
    check_prompt_tokens,
    check_stop_tokens,
    tokens_and_lengths,
)
from keras_recurrent.generation.samplers import has_base_loop, sampler_settings
from keras_recurrent.generation.snapshot import Snapshot

ON_TORCH = keras.config.backend() == "torch"
Loops: Any
if ON_TORCH:
    from keras_recurrent.generation.torch.loop import Loop as Loops
else:
    from keras_recurrent.generation.xla_programs import Programs as Loops


class GenerateFunction:
    """Generates for one batch of tokens: `model.generate_function`, which KerasHub calls.

    Args:
        model: the language model.
        has_custom_step: boolean, True if its class overrides `generate_step`.
        compiled: `jit_compile` of `model.compile`, None for "auto".
        make_hub_function: a function that returns KerasHub's function for one batch.

    Attributes:
        loops: the decoding loop of this package, a `torch.loop.Loop` or `xla_programs.Programs`,
            for samplers without a custom loop. None: KerasHub's loop is used.
        hub_loop_reason: a pair, the reason for using KerasHub's loop and the remedy, or None.
    """

    loops: Any
    hub_loop_reason: Any

    def __init__(self, model, has_custom_step, compiled, make_hub_function):
        self._model, self._has_custom_step = model, has_custom_step
        self.hub_loop_reason = None
        if model.run_eagerly:
            self.hub_loop_reason = "`compile` got `run_eagerly=True`", "Compile without it"
        elif has_custom_step:
            mend = "Continue from `backbone.get_initial_state` with `call_with_cache`"
            self.hub_loop_reason = "the class overrides `generate_step`", mend
        elif not has_base_loop(model.sampler):
            self.hub_loop_reason = (
                f"the sampler {type(model.sampler).__name__} has a custom loop",
                "Compile with 'greedy', 'top_k', 'top_p' or 'random'",
            )
        self.loops = None if self.hub_loop_reason else _loops(model, compiled)
        self._run = self._run_package_loop
        if self.hub_loop_reason:
            self._run = self._run_hub_loop
            runs_layers = model.run_eagerly or has_custom_step
            if ON_TORCH and not runs_layers:
                self._hub_function = _sampler_loop(model, _loops(model, compiled))
            else:
                self._hub_function = make_hub_function()

    def __call__(self, inputs, stop_token_ids=None):
        """Generates tokens after prompts.

        Args:
            inputs: a dictionary of `token_ids` and `padding_mask` `[B, T]`.
            stop_token_ids: a tuple of integers, or None.

        Returns:
            A dictionary of `token_ids` and `padding_mask` `[B, T]`, with the new tokens.
        """
        check_prompt_tokens(inputs, self._model.backbone.vocabulary_size)
        check_stop_tokens(stop_token_ids, self._model.backbone.vocabulary_size)
        if isinstance(self._model.sampler, keras_hub.samplers.BeamSampler):
            check_equal_lengths(inputs)
        return self._run(inputs, None if stop_token_ids is None else tuple(stop_token_ids))

    def _run_package_loop(self, inputs, stop_token_ids):
        token_ids, lengths, _ = self.loops.generate(*tokens_and_lengths(inputs), stop_token_ids)
        return _as_tensors(token_ids, lengths)

    def _run_hub_loop(self, inputs, stop_token_ids):
        token_ids, lengths = tokens_and_lengths(inputs)
        if not self._has_custom_step and (lengths == token_ids.shape[1]).all():
            return _as_tensors(token_ids, lengths)
        if self._model.run_eagerly or (self._has_custom_step and ON_TORCH):
            faster = "traced" if ON_TORCH else "program"
            record_mode(self._model, "eager", {faster: self.hub_loop_reason[0]})
        elif not ON_TORCH:
            record_mode(self._model, "sampler", {"program": self.hub_loop_reason[0]})
        return self._hub_function(inputs, stop_token_ids=stop_token_ids)


def _loops(model, compiled):
    """Returns the loops of an earlier `compile` if their programs are still valid, or new ones."""
    snapshot, loops = Snapshot(model), getattr(model, "_decoding_loops", None)
    is_known = ON_TORCH or sampler_settings(model.sampler) is not None
    if loops and is_known and loops.compiled == compiled and loops.snapshot.matches(snapshot):
        return loops
    model._decoding_loops = Loops(model, compiled, snapshot)
    return model._decoding_loops


def _as_tensors(token_ids, lengths):
    return keras.tree.map_structure(keras.ops.convert_to_tensor, as_batch(token_ids, lengths))


def _sampler_loop(model, loops):
    """Returns a function that runs the custom loop of a KerasHub sampler over traced steps."""
    import torch

    @torch.no_grad()
    def generate(inputs, stop_token_ids):
        inputs = keras.tree.map_structure(keras.ops.convert_to_tensor, inputs)
        with loops.runner.step_function() as step:
            return model._generate_by_sampler(inputs, stop_token_ids, step)

    return generate
