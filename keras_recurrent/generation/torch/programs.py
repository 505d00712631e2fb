"""Prompt processing and decoding steps of a language model on torch.

Steps run as CUDA graphs if possible, else compiled, else as traced. With `run_eagerly=True`, or if
a module has a hook, steps run eagerly through the layers, which call the hook.
"""

import collections
import threading

import keras
import torch

from keras_recurrent.backends.constants import MIN_DELAYED_ROWS
from keras_recurrent.dispatch import chosen_name, compile_ahead
from keras_recurrent.generation import beam_search
from keras_recurrent.generation.modes import RUN_EAGERLY, record_mode
from keras_recurrent.generation.prompts import max_chunk_length
from keras_recurrent.generation.torch.chunks import Chunks
from keras_recurrent.generation.torch.decoder import CapturedDecoder, Decoder, DecoderPool
from keras_recurrent.generation.torch.step import Chunk, Step
from keras_recurrent.layers.decoding import unfused_blocks
from keras_recurrent.layers.torch_calls import hook_reason

# Traced steps of a model, one for each batch size and capacity of its cache, and chunks.
MAX_STEPS = 16


class Programs:
    """Traced steps and CUDA graphs of a model, by the shapes of its cache and weights.

    Args:
        model: the language model.
    """

    def __init__(self, model):
        self._model, self._compiled = model, model._compiles_generation
        self._eager_reason = RUN_EAGERLY if model.run_eagerly else None
        self._steps: collections.OrderedDict = collections.OrderedDict()
        self._pool, self._lock = DecoderPool(), threading.Lock()
        self._has_kernels = False  # True after the kernels of a prompt were compiled

    @torch.no_grad()
    def prefill(self, token_ids, lengths, cache=None, max_length=None, prepare=None):
        """Returns the cache after the first `lengths` tokens of each sequence, in new tensors.

        Args:
            token_ids: integers `[B, T]`, a NumPy array.
            lengths: integers `[B]`, a NumPy array.
            cache: the cache before these tokens. None: the first chunk starts without a state, as a
                forward pass; attention computes it faster than a chunk after an empty cache.
            max_length: integer or None, the `max_length` of a new cache.
            prepare: `Batch.prepare_first_step` for the batch that continues from the cache, or
                None. Its kernels are compiled together with those of the first prompt.
        """
        given = cache

        def process(tokens, mask):
            options = {"return_cache": True, "max_length": max_length}
            return self._model.backbone.hidden_states(tokens, mask, cache=cache, **options)[1]

        for chunk in self._chunks(token_ids, lengths):
            if not self._has_kernels:
                with compile_ahead() as compiles_only:
                    if compiles_only:
                        after = process(*chunk)
                        if prepare is not None:
                            prepare(after)
                self._has_kernels = True
            cache = process(*chunk)
        if cache is None:
            return self._model.backbone.get_initial_state(len(lengths), max_length=max_length)
        if given is None:
            return cache
        addresses = {t.data_ptr() for t in keras.tree.flatten(given)}
        return keras.tree.map_structure(
            lambda t: t.clone() if t.data_ptr() in addresses else t, cache
        )

    def _chunks(self, token_ids, lengths):
        """Yields the tokens and mask of each chunk of the first `lengths` tokens."""
        token_ids = keras.ops.convert_to_tensor(token_ids)
        ends = torch.as_tensor(lengths, device=token_ids.device)[:, None]
        size = max_chunk_length(len(lengths))
        for start in range(0, int(lengths.max()), size):
            stop = min(start + size, int(lengths.max()))
            mask = None
            if stop > lengths.min():
                mask = torch.arange(start, stop, device=token_ids.device) < ends
            yield token_ids[:, start:stop], mask

    @torch.no_grad()
    def score(self, token_ids, targets, mask, cache, num_top=None):
        """Returns the results of the model's `_score_tokens`, with NumPy arrays of scores."""
        arrays = map(keras.ops.convert_to_tensor, (token_ids, targets, mask))
        *scores, cache = self._model._score_tokens(*arrays, cache, num_top)
        return *(array.cpu().numpy() for array in scores), cache

    @torch.no_grad()
    def search(self, cache, sequences, sampler):
        """Returns the `Hypotheses` of beam search, NumPy arrays.

        Args:
            cache: the cache before the last token of each prompt.
            sequences, sampler: as in `beam_search.search_inputs`.
        """
        inputs = [*map(keras.ops.convert_to_tensor, beam_search.search_inputs(sequences, sampler))]
        inputs += [sampler.num_beams, max(s.max_new_tokens for s in sequences)]
        decoder = None

        def step(token, mask, cache):
            nonlocal decoder
            if decoder is None:
                decoder = self.decoder(cache, {"token": token}, None)
            logits, cache = decoder.logits_of(token, decoder.step.flatten_cache(cache))
            return logits, decoder.step.cache(cache)

        found = beam_search.search(step, cache, *inputs)
        self.release(decoder)
        return keras.tree.map_structure(keras.ops.convert_to_numpy, found)

    def chunks(self, cache, num_prompts):
        """Returns `Chunks` of `num_prompts` prompts, from an initial cache; None without graphs."""
        if self._graph_reason(cache["segment"].device) is not None:
            return None
        return Chunks(self._model, self._step, num_prompts, cache)

    def decoder(self, cache, tensors, features, tokens_per_step=1, masked=False):
        """Returns a decoder, which one call uses until `release`.

        Args:
            cache: a cache, which the decoder may overwrite.
            tensors, tokens_per_step: as in `Decoder`.
            features: the `Features` of the first steps. None: the decoder only computes logits.
            masked: boolean, True if the cache of a sequence is unchanged after its end.
        """
        device = tensors["token"].device
        reason = self._graph_reason(device)
        step = self.decoding_step(cache, masked, is_sampled=features is not None)
        prepared, flat = step.prepared(), step.flatten_cache(cache)
        reason, weights = reason or step.not_captured_reason, step.weights()
        if reason is None:
            key = step, *[t.data_ptr() for t in weights], tokens_per_step, features is None
            decoder = self._pool.acquire(key)
            try:
                if decoder is None:
                    inputs = weights, prepared, flat, tensors, tokens_per_step, key
                    decoder = CapturedDecoder(step, *inputs)
                    decoder.capture(features)
            except torch.OutOfMemoryError as error:  # memory may suffice in a later call
                reason = f"another CUDA graph did not fit into memory: {error}"
            except RuntimeError as error:
                reason = step.not_captured_reason = f"torch could not capture the step: {error}"
            else:
                record_mode(self._model, "cuda_graph", {}, step.unfused)
                decoder.begin(prepared, flat, tensors, features)
                return decoder
        mask = (tensors["active"],) if masked else ()
        run = step.fastest_function(*prepared, tensors["token"], *mask, *flat)
        self._record_mode(step, device, reason)
        return Decoder(step, run, prepared, flat, tensors, tokens_per_step)

    def release(self, decoder):
        """Makes a decoder available to other calls, at the end of a call without an error."""
        if isinstance(decoder, CapturedDecoder):
            self._pool.release(decoder)

    def decoding_step(self, cache, masked, is_sampled=True):
        """Returns the `Step` of a decoder; is_sampled: False if `decoder` gets no `features`."""
        segment = cache["segment"]
        delays_writes = is_sampled and self._graph_reason(segment.device) is None
        delays_writes = delays_writes and len(segment) >= MIN_DELAYED_ROWS
        return self._step(cache, masked, delays_writes=delays_writes)

    def _step(self, cache, masked=False, chunk=None, delays_writes=False):
        """Returns the `Step` for a cache, or the `Chunk` if `chunk` is its number of tokens."""
        tensors = [*keras.tree.flatten(cache), *[v.value for v in self._model.variables]]
        eager_reason = self._eager_reason or hook_reason(_modules(self._model))
        delays_writes = delays_writes and not eager_reason
        unfused = unfused_blocks(self._model)
        signature = [(t.shape, t.dtype, t.device) for t in tensors]
        key = eager_reason, tuple(unfused), chosen_name(), masked, chunk, delays_writes, *signature
        with self._lock:
            if key not in self._steps:
                options = masked, eager_reason, delays_writes
                self._steps[key] = (
                    Chunk(self._model, cache, chunk, eager_reason)
                    if chunk
                    else Step(self._model, cache, self._compiled, *options)
                )
            self._steps.move_to_end(key)
            while len(self._steps) > MAX_STEPS:
                _, step = self._steps.popitem(last=False)
                self._pool.drop(step)
            self._steps[key].unfused = unfused
            return self._steps[key]

    def _record_mode(self, step, device, graph_reason):
        compiler_reason = step.not_compiled_reason(device)
        reasons = {
            "cuda_graph": graph_reason,
            "compiled": compiler_reason,
            "traced": step.not_traced_reason,
        }
        if step.not_traced_reason:
            mode = "eager"
        else:
            mode = "traced" if compiler_reason else "compiled"
        refused = {name: reason for name, reason in reasons.items() if reason}
        record_mode(self._model, mode, refused, step.unfused)

    def _graph_reason(self, device):
        """Reason no CUDA graph can be captured, or None."""
        if device.type != "cuda":
            return f"the model must be on an NVIDIA GPU; it is on {device.type!r}"
        if self._compiled is False:
            return "`compile` got `jit_compile=False`"
        if torch.cuda.is_current_stream_capturing():
            return "another capture is in progress"
        return None


def _modules(model):
    """Returns the torch modules of a model once each: its layers and their submodules."""
    found: dict = {}
    pending = list(model._flatten_layers())
    while pending:
        module = pending.pop()
        if module is not None and module not in found:
            found[module] = None
            pending.extend(module._modules.values())
    return found
