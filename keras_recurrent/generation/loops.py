"""Chooses the decoding loop for a sampler, a backend and the options of `compile`."""

from typing import Any

import keras
import numpy as np

from keras_recurrent.devices.jax_layouts import allow_uneven_batches
from keras_recurrent.generation.beam_sampler import BeamSampler
from keras_recurrent.generation.beam_search import Hypotheses, search_request
from keras_recurrent.generation.hub_loop import generate_by_sampler
from keras_recurrent.generation.lengths import cache_max_length, initial_cache
from keras_recurrent.generation.modes import record_mode
from keras_recurrent.generation.output import slice_rows
from keras_recurrent.generation.prompts import (
    as_batch,
    check_prompt_tokens,
    check_stop_tokens,
    tokens_and_lengths,
)
from keras_recurrent.generation.request import Request, Result
from keras_recurrent.generation.samplers import as_sampling_params, has_base_loop
from keras_recurrent.generation.sampling import make_sampling
from keras_recurrent.generation.snapshot import Snapshot

ON_TORCH = keras.config.backend() == "torch"
_FASTER = "traced" if ON_TORCH else "program"  # mode that is refused for an eager one
Loops: Any
no_gradients: Any
if ON_TORCH:
    from torch import no_grad as no_gradients

    from keras_recurrent.generation.torch.loop import Loop as Loops
else:
    from contextlib import nullcontext as no_gradients

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
            for beam search and samplers without a custom loop. None: KerasHub's loop is used, or
            for beam search with `run_eagerly=True` an eager one.
        hub_loop_reason: a pair, the reason for `loops` of None and the remedy, or None.
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
        elif not has_base_loop(model.sampler) and not isinstance(model.sampler, BeamSampler):
            self.hub_loop_reason = (
                f"the sampler {type(model.sampler).__name__} has a custom loop",
                "Compile with 'greedy', 'top_k', 'top_p' or 'random'",
            )
        self.loops = None if self.hub_loop_reason else _loops(model, compiled)
        if self.hub_loop_reason:
            runs_layers = model.run_eagerly or has_custom_step
            if ON_TORCH and not runs_layers:
                self._hub_function = _sampler_loop(model, _loops(model, compiled))
            else:
                self._hub_function = make_hub_function()

    def __call__(self, inputs, stop_token_ids=None):
        """Generates tokens after prompts, as KerasHub calls it.

        Args:
            inputs: a dictionary of `token_ids` and `padding_mask` `[B, T]`.
            stop_token_ids: a tuple of integers, or None.

        Returns:
            A dictionary of `token_ids` and `padding_mask` `[B, T]`, with the new tokens.
        """
        check_prompt_tokens(inputs, self._model.backbone.vocabulary_size)
        check_stop_tokens(stop_token_ids, self._model.backbone.vocabulary_size)
        token_ids, lengths = tokens_and_lengths(inputs)
        prompts = [row[:length] for row, length in zip(token_ids, lengths, strict=True)]
        limits = np.full_like(lengths, token_ids.shape[1])
        sampling = make_sampling(self._model, None, prompts)
        request = Request(token_ids, lengths, limits, tuple(stop_token_ids or ()), sampling)
        batch = as_batch(*self.generate(request)[:2])
        return keras.tree.map_structure(keras.ops.convert_to_tensor, batch)

    def generate(self, request, cache=None, keep=False):
        """Returns the `Result` of a `Request`.

        cache, keep: as in `torch.loop.Loop.generate`; only with the loops of this package.
        """
        if isinstance(self._model.sampler, BeamSampler) and not self._has_custom_step:
            return self._search(request, cache, keep)
        if self.loops is not None:
            return self.loops.generate(request, cache, keep)
        if not self._has_custom_step and not request.free_length.any():
            return Result(request.token_ids, request.lengths, None, None)
        if self._model.run_eagerly or (self._has_custom_step and ON_TORCH):
            record_mode(self._model, "eager", {_FASTER: self.hub_loop_reason[0]})
        elif not ON_TORCH:
            record_mode(self._model, "sampler", {"program": self.hub_loop_reason[0]})
        inputs = as_batch(request.token_ids, request.lengths)
        inputs = keras.tree.map_structure(keras.ops.convert_to_tensor, inputs)
        with allow_uneven_batches():
            outputs = self._hub_function(inputs, stop_token_ids=request.stop_token_ids or None)
        token_ids, lengths = tokens_and_lengths(outputs)
        counts = np.minimum(lengths - request.lengths, request.free_length)
        new = slice_rows(token_ids, request.lengths, counts, max(counts.max(), 0))
        if request.stop_strings is not None:
            request.stop_strings.add(new)
            counts = np.minimum(counts, request.stop_strings.counts)
        return request.result(new, counts)

    def _search(self, request, cache, keep):
        """Returns the `Result` of beam search; arguments as in `generate`."""
        request = request._replace(stop_token_ids=tuple(dict.fromkeys(request.stop_token_ids)))
        batch_size, length = request.token_ids.shape
        if not request.free_length.any():
            size = batch_size, 1
            found = Hypotheses(np.zeros((*size, 0), "int32"), np.zeros(size, int), np.zeros(size))
        elif self.loops is not None:
            found = self.loops.search(request, cache)
        else:
            record_mode(self._model, "eager", {_FASTER: self.hub_loop_reason[0]})
            with no_gradients():
                found = _search_eagerly(self._model, request)
        result = request.result(found.tokens[:, 0], found.counts[:, 0])
        if keep:
            max_length = cache_max_length(self._model, length, keep) if cache is None else None
            arguments = result.token_ids, result.lengths - 1, cache, max_length
            cache = self.loops.prefill(*arguments)
            result = result._replace(cache=cache)
        return result._replace(hypotheses=found if self._model.sampler.return_all_beams else None)


def _loops(model, compiled):
    """Returns the loops of an earlier `compile` if their programs are still valid, or new ones."""
    snapshot, loops = Snapshot(model), getattr(model, "_decoding_loops", None)
    is_known = ON_TORCH or isinstance(model.sampler, BeamSampler)
    is_known = is_known or as_sampling_params(model.sampler) is not None
    if loops and is_known and loops.compiled == compiled and loops.snapshot.matches(snapshot):
        return loops
    model._decoding_loops = Loops(model, compiled, snapshot)
    return model._decoding_loops


def _search_eagerly(model, request):
    """Returns the `Hypotheses` of beam search, each step of which runs through Keras's layers."""
    batch_size, length = request.token_ids.shape
    tokens = keras.ops.convert_to_tensor(request.token_ids)
    mask = np.arange(length) < request.lengths[:, None] - 1
    cache = initial_cache(model, batch_size, length, keep=False)
    _, cache = model.backbone.hidden_states(tokens, keras.ops.convert_to_tensor(mask), cache=cache)

    def step(token, mask, cache):
        logits, _, cache = model.call_with_cache(token, cache)
        return logits[:, 0], cache

    return search_request(step, cache, request)


def _sampler_loop(model, loops):
    """Returns a function that runs the custom loop of a KerasHub sampler over traced steps."""
    import torch

    @torch.no_grad()
    def generate(inputs, stop_token_ids):
        with loops.runner.step_function() as step:
            return generate_by_sampler(model, inputs, stop_token_ids, step)

    return generate
