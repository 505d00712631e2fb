"""`generate`, `prefill` and `stream` of the language models."""

import keras_hub
import numpy as np
from keras import ops

from keras_recurrent.checks.arguments import check_boolean
from keras_recurrent.devices.jax_layouts import allow_uneven_batches
from keras_recurrent.generation.cache import GenerationCache, next_cache_key
from keras_recurrent.generation.lengths import bucket
from keras_recurrent.generation.loops import GenerateFunction
from keras_recurrent.generation.prompts import (
    as_batch,
    check_sampler,
    check_stop_tokens,
    parse_prompts,
)
from keras_recurrent.generation.stream import Stream
from keras_recurrent.training.samples import check_no_text


class GeneratingCausalLM(keras_hub.models.CausalLM):
    """Base class of `RecurrentCausalLM` with its text generation."""

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

    def generate(
        self,
        inputs=None,
        max_length=None,
        stop_token_ids="auto",
        strip_prompt=False,
        cache=None,
        return_cache=False,
    ):
        """Generates text after prompts, or tokens if the model has no preprocessor.

        Args:
            inputs: a string or several strings. Without a preprocessor, a dictionary of `token_ids`
                and `padding_mask` `[B, T]`: prompts, followed by padding. A `tf.data.Dataset` of
                such batches is also accepted without `cache` and `return_cache`. With a `cache`,
                one text per sequence of the cache, which is appended without a start token and may
                be empty. None: continues the cache as it is.
            max_length: integer, maximum number of tokens of a sequence in this call, including the
                prompt but not the tokens in the cache. None: the preprocessor's `sequence_length`,
                or T without a preprocessor. Padding is added or removed to give `max_length`
                columns.
            stop_token_ids: a tuple of token ids, each of which ends a sequence. None: sequences end
                at `max_length`. `"auto"`: `stop_token_ids` of the preprocessor, its end tokens.
            strip_prompt: boolean, True returns only new tokens, without the prompt.
            cache: a `GenerationCache` to continue from, such as `prefill` returns. None: new
                sequences.
            return_cache: boolean, True also returns the cache after the last token.

        Returns:
            Text or tokens, in the form of `inputs`, without the tokens in `cache`. With
            `return_cache`, a pair of these and the new `GenerationCache`.

        Raises:
            ValueError: `inputs` is text and the model has no preprocessor; there is no prompt, or
                one is empty (the preprocessor's start token counts) or longer than `max_length`;
                a token id or stop token is outside the vocabulary; `k`, `p`, `temperature` or
                `num_beams` of the sampler are out of range; `cache` belongs to another model, has
                another number of sequences, or would exceed its `max_length`; prompts of beam
                search differ in length; or `cache` or `return_cache` is used and the model does not
                use the decoding loop of this package (beam and contrastive search,
                `run_eagerly=True`, a custom `generate_step`).

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
        if self.preprocessor is None and inputs is not None:
            check_no_text(inputs, self.preprocessor_cls)
        check_boolean("strip_prompt", strip_prompt)
        check_boolean("return_cache", return_cache)
        stops = self._stop_token_ids(stop_token_ids)
        if cache is None and not return_cache:
            if hasattr(inputs, "as_numpy_iterator"):  # a `tf.data.Dataset`
                batches = inputs.as_numpy_iterator()
                return _concatenate(
                    [self.generate(b, max_length, stop_token_ids, strip_prompt) for b in batches]
                )
            if self.make_generate_function().loops is None:
                if self.preprocessor is None:  # KerasHub ignores `max_length` for tokens
                    prompts = parse_prompts(self, inputs, max_length)
                    inputs = as_batch(prompts.token_ids, prompts.lengths)
                with allow_uneven_batches():
                    return super().generate(inputs, max_length, stops, strip_prompt)
        loops = self._require_loops("return_cache" if cache is None else "cache")
        prompts = parse_prompts(self, inputs, max_length, cache)
        token_ids, lengths, state = loops.generate(
            prompts.token_ids, prompts.lengths, stops, cache and cache.state, return_cache
        )
        generated = self._format_output(prompts, token_ids, lengths, strip_prompt)
        if not return_cache:
            return generated
        last = token_ids[np.arange(len(lengths)), lengths - 1]
        limit = self._cache_max_length(cache, token_ids.shape[1])
        key = next_cache_key(self, cache)
        return generated, GenerationCache(state, last, prompts.num_cached + lengths, limit, key)

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
        loops = self._require_loops("prefill")
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
        num_tokens = prompts.num_tokens
        if limit is not None and (num_tokens > limit).any():
            longest = int(np.argmax(num_tokens))
            raise ValueError(
                f"`max_length` is {limit} tokens, and sequence {longest} has "
                f"{int(num_tokens[longest])} already. Pass a larger `max_length`."
            )
        if cache is None:
            state = self.backbone.get_initial_state(len(prompts.lengths), max_length=max_length)
        else:
            state = cache.state
        state = loops.prefill(prompts.token_ids, prompts.lengths - 1, state)
        key = next_cache_key(self, cache)
        return GenerationCache(state, prompts.last_token, num_tokens, limit, key)

    def stream(self, inputs=None, max_length=None, stop_token_ids="auto", cache=None):
        """Streams generated text, or tokens if the model has no preprocessor.

        Args:
            inputs, max_length, stop_token_ids, cache: as in `generate`.

        Returns:
            An iterator. For one string it yields chunks of new text; the prompt and all chunks,
            joined, are the result of `generate`. For a list of strings it yields lists with one
            chunk for each sequence, which may be empty. Without a preprocessor it yields lists with
            one token id for each sequence, None for a sequence that has ended.

            A character of several tokens is yielded when it is complete; an incomplete one at the
            end is U+FFFD.

            Its attribute `cache` is the `GenerationCache` after all tokens so far, including those
            of an incomplete character. It may be read inside the loop, after leaving it early, and
            at the end. `close()` releases the resources at once, including the cache. The weights
            of the model must not change before the end.

        Raises:
            ValueError: as in `generate`.

        Example:

        >>> import keras_recurrent
        >>> model = keras_recurrent.models.GriffinCausalLM.from_preset("hawk_tiny", num_layers=1)
        >>> stream = model.stream("All happy", max_length=30)
        >>> for chunk in stream:
        ...     print(chunk, end="")  # doctest: +SKIP
        >>> more = model.generate(" But", max_length=10, cache=stream.cache)
        """
        if self.preprocessor is None and inputs is not None:
            check_no_text(inputs, self.preprocessor_cls)
        loops = self._require_loops("stream")
        stops = self._stop_token_ids(stop_token_ids)
        prompts = parse_prompts(self, inputs, max_length, cache)
        steps = loops.steps(prompts.token_ids, prompts.lengths, stops, cache and cache.state)
        limit = self._cache_max_length(cache, prompts.token_ids.shape[1])
        key = next_cache_key(self, cache)
        return Stream(steps, prompts, stops, self.preprocessor, limit, key)

    def make_generate_function(self):
        """Returns the `loops.GenerateFunction`, which generates for one batch of tokens."""
        if getattr(self, "generate_function", None) is None:
            if not hasattr(self, "sampler"):
                raise ValueError(
                    "The model was created or loaded with `compile=False`, and has no sampler. "
                    'Call `model.compile(sampler="greedy")`, or with another sampler, first.'
                )
            check_sampler(self.sampler, self.backbone.vocabulary_size)
            self.generate_function = GenerateFunction(
                self,
                has_custom_step=type(self).generate_step is not GeneratingCausalLM.generate_step,
                compiled=self._compiles_generation,
                make_hub_function=super().make_generate_function,
            )
        return self.generate_function

    def _require_loops(self, feature):
        """Returns the decoding loops of this package.

        Raises:
            ValueError: the model uses another loop; the message names the feature and the reason.
        """
        function = self.make_generate_function()
        if function.loops is None:
            reason, mend = function.hub_loop_reason
            raise ValueError(
                f"`{feature}` requires the decoding loop of keras_recurrent, and {reason}. {mend}."
            )
        return function.loops

    def _stop_token_ids(self, ids):
        if isinstance(ids, str) and ids == "auto":
            if self.preprocessor is None:
                raise ValueError(
                    "`stop_token_ids` must be a tuple of token ids, or None to generate up to the "
                    'maximum length; got "auto", the end token of a preprocessor, and the model '
                    "has no preprocessor."
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
        return None if self.backbone.keeps_state else bucket(length)

    def _format_output(self, prompts, token_ids, lengths, strip_prompt):
        """Returns sequences as text or tokens, in the form of the prompts."""
        first = prompts.lengths if strip_prompt else prompts.num_context
        counts, width = lengths - first, token_ids.shape[1] - int(prompts.num_context[0])
        output = np.zeros((len(counts), width), "int32")
        for row, start, count, tokens in zip(output, first, counts, token_ids, strict=True):
            row[:count] = tokens[start : start + count]
        batch = {"token_ids": output, "padding_mask": np.arange(width) < counts[:, None]}
        if self.preprocessor is None:
            return batch
        texts = self.preprocessor.generate_postprocess(batch)
        return texts[0] if prompts.is_single else texts

    def generate_step(self, inputs, stop_token_ids=None):
        """Generates for one batch of tokens. Users call `generate`, which compiles it.

        Args:
            inputs: a dictionary of `token_ids` and `padding_mask` `[B, T]`: prompts of at least one
                token, followed by padding for new tokens.
            stop_token_ids: a tuple of token ids. Generation ends when each sequence has a new stop
                token. None: sequences end at T tokens.

        Returns:
            A dictionary of `token_ids` and `padding_mask`, which is True up to and including the
            first new stop token.
        """

        def step(token_ids, cache):
            logits, hidden_states, cache = self.call_with_cache(token_ids, cache)
            return logits[:, 0], hidden_states[:, 0], cache

        return self._generate_by_sampler(inputs, stop_token_ids, step)

    def _generate_by_sampler(self, inputs, stop_token_ids, step):
        """Generates as `generate_step`, in the loop of the sampler.

        Args:
            inputs, stop_token_ids: as in `generate_step`.
            step: a function `(token_ids [B, 1], cache) -> (logits [B, vocabulary_size],
                hidden_states [B, hidden_dim], cache)`.
        """
        token_ids = inputs["token_ids"]
        padding_mask = ops.cast(inputs["padding_mask"], "bool")
        index = ops.min(ops.sum(ops.cast(padding_mask, "int32"), axis=-1))

        def next_token(prompt, cache, index):
            return step(ops.slice(prompt, [0, index - 1], [ops.shape(prompt)[0], 1]), cache)

        # A sampler first passes the token at `index - 1`, then the rest of longer prompts token by
        # token. A recurrent state must not process a token twice, so the prefilled cache ends
        # before the token at `index - 1`.
        batch_size, length = ops.shape(token_ids)
        mask = ops.broadcast_to(ops.arange(length, dtype="int32") < index - 1, ops.shape(token_ids))
        cache = self.backbone.get_initial_state(batch_size, max_length=length)
        hidden_states, cache = self.backbone.hidden_states(token_ids, mask, cache=cache)
        if isinstance(self.sampler, keras_hub.samplers.ContrastiveSampler):
            # It uses all hidden states before `index`, of which the last is not computed yet.
            _, last, _ = next_token(token_ids, cache, index)
            hidden_states = ops.slice_update(hidden_states, [0, index - 1, 0], last[:, None])

        token_ids = self.sampler(
            next=next_token,
            prompt=token_ids,
            cache=cache,
            index=index,
            mask=padding_mask,
            stop_token_ids=stop_token_ids,
            hidden_states=hidden_states,
            model=self,
        )
        return {
            "token_ids": token_ids,
            "padding_mask": _output_mask(token_ids, padding_mask, stop_token_ids),
        }


def _concatenate(batches):
    """Concatenates the results of several batches: lists of texts, or dictionaries of arrays."""
    if isinstance(batches[0], dict):
        return {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}
    return [text for batch in batches for text in batch]


def _output_mask(token_ids, padding_mask, stop_token_ids):
    """Returns a mask: True up to and including the first new stop token, or everywhere if none."""
    if stop_token_ids is None:
        return ops.ones_like(token_ids, dtype="bool")
    stops = ops.any(ops.stack([ops.equal(token_ids, i) for i in stop_token_ids]), axis=0)
    stops = ops.cast(ops.logical_and(stops, ops.logical_not(padding_mask)), "int32")
    return ops.equal(ops.cumsum(stops, axis=-1) - stops, 0)
