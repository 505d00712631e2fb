"""`generate`, `prefill` and `stream` of the language models."""

import functools
from typing import Any

import keras
import keras_hub
import numpy as np
from keras import ops

from keras_recurrent.chat.templates import is_messages
from keras_recurrent.checks.arguments import check_boolean
from keras_recurrent.generation.batch import process_new_tokens, start_decoding
from keras_recurrent.generation.beam_search import BeamSampler, search_beams
from keras_recurrent.generation.cache import GenerationCache, select_rows
from keras_recurrent.generation.cache_file import cache_key
from keras_recurrent.generation.chat import ChatGeneration, answer, start_turn
from keras_recurrent.generation.grammar import make_matchers
from keras_recurrent.generation.prompts import cache_max_length, check_token_count, parse_prompts
from keras_recurrent.generation.sampling import (
    CUSTOM_LOOP,
    check_sampler,
    log_probabilities,
    resolve_sampling,
)
from keras_recurrent.generation.sampling_params import answer_seeds, explains_options
from keras_recurrent.generation.sequence import (
    Sequence,
    concatenate_results,
    format_beams,
    format_result,
)
from keras_recurrent.generation.stream import Stream
from keras_recurrent.generation.text import (
    StreamedText,
    check_stop_strings,
    hidden_stop_tokens,
    parse_stop_token_ids,
)
from keras_recurrent.ops.token_crossentropy import token_crossentropy

Programs: Any
if keras.config.backend() == "torch":
    from keras_recurrent.generation.torch_programs import Programs
else:
    from keras_recurrent.generation.xla_programs import Programs


class GeneratingCausalLM(ChatGeneration, keras_hub.models.CausalLM):
    """Base class of `RecurrentCausalLM` with its text generation."""

    _decoding_programs: Any = None

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

    def _score_tokens(self, token_ids, targets, mask, cache, num_top=None):
        """Computes the losses of `targets`, the token after each of `token_ids`, all `[B, T]`.

        num_top: integer, number of most probable tokens whose log probabilities are returned, or
            None.

        Returns:
            The losses, in nats, booleans that are True where a target is the most probable token,
            both `[B, T]`, and the cache after the real tokens. With `num_top`, the first two are
            replaced by the elements of the `Logprobs` of B * T tokens.
        """
        logits, _, cache = self.call_with_cache(token_ids, cache, padding_mask=mask)
        if num_top is not None:
            logits = ops.reshape(logits, (-1, logits.shape[-1]))
            return *log_probabilities(logits, ops.reshape(targets, (-1,)), num_top), cache
        is_best = ops.equal(ops.cast(ops.argmax(logits, axis=-1), targets.dtype), targets)
        return token_crossentropy(logits, targets), is_best, cache

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
            stop_token_ids: a tuple of token ids, each of which ends a sequence. Texts do not show
                those that are in `stop_token_ids` of the preprocessor, its end tokens; the text of
                other ones remains. None: sequences end at `max_length`. `"auto"`: the end tokens.
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
            `SamplingParams(n=...)`, a list of all answers; answers to the same prompt are adjacent.
            With `return_cache`, a pair of these and the new `GenerationCache`. With
            `SamplingParams(logprobs=...)` or `BeamSampler(return_all_beams=True)`, a
            `GenerationOutput`.

        Raises:
            ValueError: `inputs` is text and the model has no preprocessor; there is no prompt, or
                one is empty (the preprocessor's start token counts) or longer than `max_length`;
                `max_length` or `max_new_tokens` is above 2**31 - 1; a token id or stop token is
                outside the vocabulary; `k`, `p` or `temperature` of the sampler are out of range;
                `stop` is empty or the sampler is beam search, which only ends at tokens; `sampling`
                is not one `SamplingParams` for each prompt, or the sampler is beam search; `cache`
                belongs to another model, has another number of sequences, or would exceed its
                `max_length`; the sampler is not one of those in `compile`; or the class of the
                model overrides `generate_step`.

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
        programs = self._programs()
        call = inputs, max_length, stop_token_ids, cache, options
        prompts, sequences, texts = self._parse(*call)
        has_work, beams = any(s.max_new_tokens for s in sequences), None
        process = functools.partial(self._process_prompts, programs, prompts, cache, return_cache)
        is_beam_search = isinstance(self.sampler, BeamSampler)
        if is_beam_search or not has_work:
            state = process() if has_work or return_cache else None
        if is_beam_search:
            beams = search_beams(programs, state, sequences, self.sampler)
            sequences = [row[0] for row in beams]
            if return_cache:
                state = process_new_tokens(programs, state, sequences)
        elif has_work:
            keep, reads_tokens = return_cache, texts is not None
            loop = start_decoding(programs, sequences, process, keep, reads_tokens)
            while loop.advance():
                pass
            state = loop.batch.state(sequences) if return_cache else None
            loop.batch.close()
        new_cache = self._make_cache(prompts, cache, state, sequences) if return_cache else None
        form = self.preprocessor, prompts, strip_prompt, new_cache
        if beams is not None and self.sampler.return_all_beams:
            return format_beams(*form, beams)
        return format_result(*form, sequences, texts)

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
        programs = self._programs()
        if inputs is None:
            raise ValueError("`inputs` must be prompts, text or tokens; got None.")
        if cache is not None and max_length is not None:
            raise ValueError(
                "`max_length` must be passed only to the first `prefill` of a sequence. Leave it "
                "out together with `cache`."
            )
        if cache is None and max_length is None and not self.backbone.keeps_state:
            raise ValueError(
                "`max_length` must be the maximum number of tokens of a sequence, including the "
                "prompt and all later calls: the model attends to all tokens, and its KV cache has "
                "this capacity. Got None."
            )
        if max_length is not None:
            check_token_count("max_length", max_length)
        prompts = parse_prompts(self, inputs, None, cache, generates=False)
        limit = max_length if cache is None else cache.max_length
        tokens = prompts.all_tokens
        num_tokens = np.array(list(map(len, tokens)))
        if limit is not None and (num_tokens > limit).any():
            longest = int(np.argmax(num_tokens))
            raise ValueError(
                f"`max_length` is {limit} tokens, and sequence {longest} has "
                f"{int(num_tokens[longest])} already. Pass a larger `max_length`."
            )
        state = cache and cache.state
        state = programs.prefill(prompts.token_ids, prompts.lengths - 1, state, max_length)
        if cache is not None:
            return cache._replace(state, tokens)
        return GenerationCache(state, tokens, max_length, cache_key(self))

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
            joined, are the result of `generate`. For several strings or answers it yields lists
            with one chunk for each sequence, which may be empty. Without a preprocessor it yields
            lists with one token id for each sequence, None for a sequence that has ended.

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
        programs = self._programs()
        if isinstance(self.sampler, BeamSampler):
            raise ValueError(
                "`stream` cannot be combined with beam search, which chooses among whole sequences "
                "at the end. Use `generate`, or compile with another sampler."
            )
        options = {"max_new_tokens": max_new_tokens, "stop": stop, "sampling": sampling}
        turn = None
        if is_messages(inputs):
            turn = start_turn(self, inputs, cache, sampling)
            inputs, cache = turn.inputs, turn.cache
        call = inputs, max_length, stop_token_ids, cache, options
        prompts, sequences, texts = self._parse(*call, reads_text=True)
        process = functools.partial(self._process_prompts, programs, prompts, cache, True)
        loop = start_decoding(programs, sequences, process, keep=True, reads_tokens=True)
        make_cache = functools.partial(self._make_cache, prompts, cache, turn=turn)
        return Stream(loop, sequences, texts, prompts.is_single, make_cache)

    def _parse(self, inputs, max_length, stop_token_ids, cache, options, reads_text=False):
        """Returns the `Prompts` of a call, and lists of the `Sequence`s and their `StreamedText`.

        `options` has `max_new_tokens`, `stop` and `sampling`. With `reads_text`, the text is read
        even without stop strings. If it is not read, or without a preprocessor, the last result is
        None.
        """
        max_new_tokens = options["max_new_tokens"]
        prompts = parse_prompts(self, inputs, max_length, cache, max_new_tokens=max_new_tokens)
        size, tokens, texts = self.backbone.vocabulary_size, prompts.all_tokens, None
        stops = parse_stop_token_ids(self.preprocessor, size, stop_token_ids)
        strings = check_stop_strings(options["stop"], self.preprocessor)
        if strings and isinstance(self.sampler, BeamSampler):
            raise ValueError(
                "`stop` cannot be combined with beam search, whose sequences only end at tokens. "
                "Pass `stop_token_ids`."
            )
        params, seeds = resolve_sampling(self, options["sampling"], len(tokens))
        counts = prompts.remaining_tokens.tolist()
        prompts = prompts.repeat([p.n for p in params])
        rows = [
            (ids, p, answer_seed, count, stops)
            for ids, p, seed, count in zip(tokens, params, seeds, counts, strict=True)
            for answer_seed in answer_seeds(p, seed)
        ]
        listeners: list[Any] = [None] * len(rows)
        matchers = listeners
        if self.preprocessor is not None and (strings or reads_text):
            hidden = [id for id in hidden_stop_tokens(self.preprocessor) if id in stops]
            texts = [StreamedText(self.preprocessor, ids[-1], strings, hidden) for ids, *_ in rows]
            listeners = [text.listen for text in texts]
        if any(p.grammar is not None for p in params):
            matchers = make_matchers(self.preprocessor, size, [p for _, p, *_ in rows], stops)
        parts = zip(rows, listeners, matchers, strict=True)
        sequences = [Sequence(*row, listener, matcher) for row, listener, matcher in parts]
        return prompts, sequences, texts

    def _process_prompts(self, programs, prompts, cache, keep, batch=None):
        """Returns the state of each answer before its first step, as in `start_decoding`."""
        if cache is None:
            state, max_length = None, cache_max_length(self, prompts.max_length, keep)
        else:
            state, max_length = cache.state, None
        has_copies = len(prompts.answers) > len(prompts.tokens)
        batch = None if has_copies else batch
        arguments = prompts.token_ids, prompts.lengths - 1, state, max_length
        state = programs.prefill(*arguments, batch)
        return select_rows(state, prompts.answers) if has_copies else state

    def _make_cache(self, prompts, cache, state, sequences, texts=None, turn=None):
        """Returns the `GenerationCache` after the tokens of sequences.

        cache: the `GenerationCache` that they continue, or None.
        state: the state before the last token of each sequence.
        texts, turn: the texts of the answers in a conversation, and its `Turn`, or None.
        """
        tokens = [np.append(s.prompt, np.array(s.token_ids, "int32")) for s in sequences]
        conversations = turn and turn.conversations(self.preprocessor, tokens, map(answer, texts))
        if cache is not None:
            return cache._replace(state, tokens, conversations)
        limit = cache_max_length(self, prompts.max_length, keep=True)
        return GenerationCache(state, tokens, limit, cache_key(self), conversations)

    def _programs(self):
        """Returns the `Programs` of the model, which `compile` discards."""
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
        if self._decoding_programs is None:
            self._decoding_programs = Programs(self)
        return self._decoding_programs
