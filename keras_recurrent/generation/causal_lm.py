"""`generate`, `prefill` and `stream` of the language models."""

from typing import Any

import keras_hub
import numpy as np

from keras_recurrent.checks.arguments import check_boolean
from keras_recurrent.generation.beam_sampler import BeamSampler
from keras_recurrent.generation.cache import GenerationCache, next_cache_key
from keras_recurrent.generation.chat import ChatGeneration, is_messages, start_turn
from keras_recurrent.generation.lengths import cache_max_length
from keras_recurrent.generation.loops import Loops, generate
from keras_recurrent.generation.output import concatenate_results, format_result
from keras_recurrent.generation.prompts import check_no_text, check_stop_tokens, parse_prompts
from keras_recurrent.generation.request import Request
from keras_recurrent.generation.samplers import CUSTOM_LOOP, check_sampler
from keras_recurrent.generation.sampling_call import make_sampling
from keras_recurrent.generation.sampling_params import explains_options
from keras_recurrent.generation.stop_strings import StopStrings, check_stop_strings
from keras_recurrent.generation.stream import Stream


class GeneratingCausalLM(ChatGeneration, keras_hub.models.CausalLM):
    """Base class of `RecurrentCausalLM` with its text generation."""

    _decoding_loops: Any = None

    def call_with_cache(self, token_ids, cache, cache_update_index=None, padding_mask=None):
        """Computes next-token logits for `token_ids`, and the cache after `token_ids`.

        Args:
            token_ids: integers `[B, T]`, the tokens after those in the cache.
            cache: a cache, from an earlier call or from `backbone.get_initial_state(batch_size)`.
            cache_update_index: ignored; KerasHub passes it. A recurrent state needs no position.
            padding_mask: boolean or integer `[B, T]`, False or 0 at padding. None: no padding.

        Returns:
            `(logits [B, T, vocabulary_size], hidden_states [B, T, hidden_dim], cache)`.

        Example:

        >>> import numpy as np
        >>> import keras_recurrent
        >>> model = keras_recurrent.models.GriffinCausalLM.from_preset("hawk_tiny", num_layers=1)
        >>> cache = model.backbone.get_initial_state(batch_size=1)
        >>> logits, _, cache = model.call_with_cache(np.array([[1, 100]]), cache)
        >>> logits, _, cache = model.call_with_cache(np.array([[101]]), cache)
        >>> tuple(logits.shape)
        (1, 1, 259)
        """
        hidden_states, cache = self.backbone.hidden_states(token_ids, padding_mask, cache=cache)
        logits = self.backbone.token_embedding(hidden_states, reverse=True)
        return logits, hidden_states, cache

    @explains_options
    def generate(
        self,
        inputs=None,
        max_length=None,
        stop_token_ids="auto",
        strip_prompt=False,
        cache=None,
        return_cache=False,
        *,
        max_new_tokens=None,
        stop=None,
        sampling=None,
    ):
        """Generates text after prompts, or tokens if the model has no preprocessor.

        Args:
            inputs: a string or several strings. Without a preprocessor, a dictionary of `token_ids`
                and `padding_mask` `[B, T]`: prompts, followed by padding. A `tf.data.Dataset` of
                such batches is also accepted without `cache` and `return_cache`. With a `cache`,
                one text per sequence of the cache, which is appended without a start token and may
                be empty. None: continues the cache as it is.
            max_length: integer, maximum number of tokens of a sequence in this call, including the
                prompt but not the tokens in the cache. None: no maximum if `max_new_tokens` is
                given; otherwise the preprocessor's `sequence_length`, or T without a preprocessor.
                Padding is added or removed to give `max_length` columns.
            stop_token_ids: a tuple of token ids, each of which ends a sequence. None: sequences end
                at `max_length`. `"auto"`: `stop_token_ids` of the preprocessor, its end tokens.
            strip_prompt: boolean, True returns only new tokens, without the prompt.
            cache: a `GenerationCache` to continue from, such as `prefill` returns. None: new
                sequences.
            return_cache: boolean, True also returns the cache after the last token.
            max_new_tokens: integer, maximum number of new tokens of each sequence. With
                `max_length`, the smaller limit holds.
            stop: a string or a list of strings, each of which ends a sequence. The text ends before
                it; the cache contains all tokens of the stop string.
            sampling: a `SamplingParams`, or a list of one for each prompt. None: the sampler of
                `compile`.

        Returns:
            Text or tokens, in the form of `inputs`, without the tokens in `cache`. With
            `return_cache`, a pair of these and the new `GenerationCache`. With
            `SamplingParams(logprobs=...)` or `BeamSampler(return_all_beams=True)`, a
            `GenerationOutput`.

        Raises:
            ValueError: `inputs` is text and the model has no preprocessor; there is no prompt, or
                one is empty (the preprocessor's start token counts) or longer than `max_length`;
                a token id or stop token is outside the vocabulary; `k`, `p` or `temperature` of
                the sampler are out of range; `stop` is empty or the sampler is beam search, which
                only ends at tokens; `sampling` is not one `SamplingParams` for each prompt, or the
                sampler is beam search; `cache` belongs to another model, has another number of
                sequences, or would exceed its `max_length`; the sampler is not one of those in
                `compile`; or the class of the model overrides `generate_step`.

        Example: two turns of a conversation.

        >>> import keras_recurrent
        >>> model = keras_recurrent.models.GriffinCausalLM.from_preset("hawk_tiny", num_layers=1)
        >>> text, cache = model.generate("How are you?", max_length=20, return_cache=True)
        >>> text, cache = model.generate(
        ...     "And now?", max_length=20, cache=cache, return_cache=True
        ... )
        >>> text[:8]
        'And now?'
        """
        check_boolean("strip_prompt", strip_prompt)
        check_boolean("return_cache", return_cache)
        options = {"max_new_tokens": max_new_tokens, "stop": stop, "sampling": sampling}
        if hasattr(inputs, "as_numpy_iterator") and cache is None and not return_cache:
            batches = inputs.as_numpy_iterator()  # of a `tf.data.Dataset`
            arguments = max_length, stop_token_ids, strip_prompt
            return concatenate_results([self.generate(b, *arguments, **options) for b in batches])
        loops = self._loops()
        prompts, request = self._request(inputs, max_length, stop_token_ids, cache, **options)
        result = generate(self, loops, request, cache and cache.state, return_cache)
        new_cache = None
        if return_cache:
            tokens = prompts.join_cached(result.token_ids, result.lengths)
            limit = self._cache_max_length(cache, result.token_ids.shape[1])
            key = next_cache_key(self, cache)
            new_cache = GenerationCache(result.cache, tokens, limit, key)
        inputs = prompts, request, result, strip_prompt, new_cache
        return format_result(self.preprocessor, *inputs)

    @explains_options
    def prefill(self, inputs, max_length=None, cache=None):
        """Processes prompts without generating, and returns the cache after them.

        Prompts are processed in chunks of at most 16,384 tokens of the batch, or 256 of each
        sequence if that is more, which limits the memory for activations. The speed is that of a
        forward pass in training. Prompts may be longer than the preprocessor's `sequence_length`.

        Args:
            inputs: a string or several strings. Without a preprocessor, a dictionary of `token_ids`
                and `padding_mask` `[B, T]`: prompts, followed by padding.
            max_length: integer, maximum number of tokens that a sequence will ever have, including
                the prompt and all later calls. Required by models that attend to all tokens, as the
                capacity of their KV cache. None: no limit.
            cache: a `GenerationCache` to continue from, with its `max_length`. None: new sequences.

        Returns:
            A `keras_recurrent.models.GenerationCache`.

        Raises:
            ValueError: as in `generate`; `max_length` is missing in a model that requires it, or is
                passed together with `cache`.

        Example:

        >>> import keras_recurrent
        >>> model = keras_recurrent.models.GriffinCausalLM.from_preset("hawk_tiny", num_layers=1)
        >>> cache = model.prefill("You are a helpful parrot. ")
        >>> answers = [model.generate(q, max_length=16, cache=cache) for q in ("Hello!", "Who?")]
        >>> [answer[:4] for answer in answers]
        ['Hell', 'Who?']
        """
        if self.preprocessor is None:
            check_no_text(inputs, self.preprocessor_cls)
        loops = self._loops()
        if inputs is None:
            raise ValueError("`inputs` must be prompts, text or tokens; got None.")
        if cache is not None and max_length is not None:
            raise ValueError(
                "`max_length` must be passed only to the first `prefill` of a sequence. Leave it "
                "out together with `cache`."
            )
        needed = not self.backbone.keeps_state
        if cache is None and max_length is None and needed:
            raise ValueError(
                "`max_length` must be the maximum number of tokens of a sequence, including the "
                "prompt and all later calls: the model attends to all tokens, and its KV cache has "
                "this capacity. Got None."
            )
        prompts = parse_prompts(self, inputs, None, cache, generates=False)
        limit = self._cache_max_length(cache, max_length, exact=True)
        tokens = prompts.all_tokens
        num_tokens = np.array(list(map(len, tokens)))
        if limit is not None and (num_tokens > limit).any():
            longest = int(np.argmax(num_tokens))
            raise ValueError(
                f"`max_length` is {limit} tokens, and sequence {longest} has "
                f"{int(num_tokens[longest])} already. Pass a larger `max_length`."
            )
        state = cache and cache.state
        state = loops.prefill(prompts.token_ids, prompts.lengths - 1, state, max_length)
        key = next_cache_key(self, cache)
        return GenerationCache(state, tokens, limit, key)

    @explains_options
    def stream(
        self,
        inputs=None,
        max_length=None,
        stop_token_ids="auto",
        cache=None,
        *,
        max_new_tokens=None,
        stop=None,
        sampling=None,
    ):
        """Streams generated text, or tokens if the model has no preprocessor.

        Args:
            inputs: as in `generate`, or messages, as in `chat`, whose answer is streamed.
            max_length, stop_token_ids, cache, max_new_tokens, stop, sampling: as in `generate`.

        Returns:
            An iterator. For one string it yields chunks of new text; the prompt and all chunks,
            joined, are the result of `generate`. For a list of strings it yields lists with one
            chunk for each sequence, which may be empty. Without a preprocessor it yields lists with
            one token id for each sequence, None for a sequence that has ended.

            A character of several tokens is yielded when it is complete; an incomplete one at the
            end is U+FFFD. Text that may be part of a stop string is withheld until it is known.

            Its attribute `output` is the `GenerationOutput` of all tokens so far, with new text
            only. Its attribute `cache` is the `GenerationCache` after them, including those of an
            incomplete character; the next turn of a conversation continues from it. Both may be
            read inside the loop, after leaving it early, and at the end. `close()` releases the
            resources at once, including the cache. The weights of the model must not change before
            the end.

        Raises:
            ValueError: as in `generate` and `chat`, or the sampler is beam search.

        Example:

        >>> import keras_recurrent
        >>> model = keras_recurrent.models.GriffinCausalLM.from_preset("hawk_tiny", num_layers=1)
        >>> stream = model.stream("All happy", max_length=30)
        >>> for chunk in stream:
        ...     print(chunk, end="")  # doctest: +SKIP
        >>> more = model.generate(" But", max_length=10, cache=stream.cache)
        """
        loops = self._loops()
        if isinstance(self.sampler, BeamSampler):
            raise ValueError(
                "`stream` cannot be combined with beam search, which chooses among whole sequences "
                "at the end. Use `generate`, or compile with another sampler."
            )
        options = {"max_new_tokens": max_new_tokens, "stop": stop, "sampling": sampling}
        turn = None
        if is_messages(inputs):
            turn = start_turn(self, inputs, cache)
            inputs, cache = turn.inputs, turn.cache
        prompts, request = self._request(inputs, max_length, stop_token_ids, cache, **options)
        steps = loops.steps(request, cache and cache.state)
        limit = self._cache_max_length(cache, request.token_ids.shape[1])
        key = next_cache_key(self, cache)
        return Stream(steps, prompts, request, self.preprocessor, limit, key, turn)

    def _request(
        self, inputs, max_length, stop_token_ids, cache, *, max_new_tokens, stop, sampling
    ):
        """Returns the `Prompts` and the `Request` of a call of `generate` or `stream`."""
        if self.preprocessor is None and inputs is not None:
            check_no_text(inputs, self.preprocessor_cls)
        stops = self._stop_token_ids(stop_token_ids)
        strings = check_stop_strings(stop, self.preprocessor)
        if strings and isinstance(self.sampler, BeamSampler):
            raise ValueError(
                "`stop` cannot be combined with beam search, whose sequences only end at tokens. "
                "Pass `stop_token_ids`."
            )
        prompts = parse_prompts(self, inputs, max_length, cache, max_new_tokens=max_new_tokens)
        if strings:
            strings = StopStrings(strings, self.preprocessor, prompts.last_token)
        return prompts, Request(
            *(prompts.token_ids, prompts.lengths, prompts.limits, stops or ()),
            make_sampling(self, sampling, prompts.all_tokens),
            strings or None,
        )

    def _loops(self):
        """Returns the decoding loops of the backend, with the programs traced since `compile`."""
        if not hasattr(self, "sampler"):
            raise ValueError(
                "The model was created or loaded with `compile=False`, and has no sampler. "
                'Call `model.compile(sampler="greedy")`, or with another sampler, first.'
            )
        if type(self).generate_step is not keras_hub.models.CausalLM.generate_step:
            raise ValueError(
                f"`{type(self).__name__}` overrides `generate_step`, which `generate` does not "
                f"call. {CUSTOM_LOOP}"
            )
        check_sampler(self.sampler, self.backbone.vocabulary_size)
        if self._decoding_loops is None:
            self._decoding_loops = Loops(self)
        return self._decoding_loops

    def _stop_token_ids(self, ids):
        if isinstance(ids, str) and ids == "auto":
            if self.preprocessor is None:
                raise ValueError(
                    "`stop_token_ids` must be a tuple of token ids, or None to generate up to the "
                    'maximum length; got "auto", which requires a preprocessor. (A checkpoint has '
                    "none if it has no tokenizer file.)"
                )
            tokenizer = self.preprocessor.tokenizer
            ids = [tokenizer.end_token_id]
            if hasattr(tokenizer, "end_token2_id"):  # as in KerasHub's `generate`
                ids.append(tokenizer.end_token2_id)
            ids = list(dict.fromkeys([*ids, *getattr(self.preprocessor, "stop_token_ids", ())]))
        check_stop_tokens(ids, self.backbone.vocabulary_size)
        return None if ids is None else tuple(int(i) for i in ids)

    def _cache_max_length(self, cache, length, exact=False):
        """Returns the `max_length` of the cache after a call with sequences of `length` tokens.

        exact: boolean, True uses `length` itself, False a bucket of lengths or None (no limit).
        """
        if cache is not None:
            return cache.max_length
        if exact or length is None:
            return length
        return cache_max_length(self, length, keep=True)
