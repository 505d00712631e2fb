"""What language models do to write: at once, as a stream, and from what they have read before."""

import keras_hub
import numpy as np
from keras import ops

from keras_recurrent.checks.arguments import check_boolean
from keras_recurrent.devices.jax_layouts import allow_uneven_batches
from keras_recurrent.generation.cache import GenerationCache, key_of
from keras_recurrent.generation.lengths import bucket
from keras_recurrent.generation.loops import GenerateFunction
from keras_recurrent.generation.prompts import check_sampler, check_stop_tokens, find_prompts
from keras_recurrent.generation.stream import Stream
from keras_recurrent.training.samples import check_no_text


class GeneratingCausalLM(keras_hub.models.CausalLM):
    """The part of `RecurrentCausalLM` that writes."""

    def call_with_cache(self, token_ids, cache, cache_update_index=None, padding_mask=None):
        """The logits of a few more tokens, and the cache after them.

        Args:
            token_ids: integers `[B, T]`, the tokens that follow on what the cache has seen.
            cache: a cache, from a call before or from `backbone.get_initial_state(batch_size)`.
            cache_update_index: taken for KerasHub's signature; a state needs no place.
            padding_mask: boolean `[B, T]`, or integers, False or 0 at tokens to leave out; None:
                all count.

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
        """Text, or tokens where the model has no preprocessor, gone on with.

        Args:
            inputs: a string or several of them. Without a preprocessor, a dictionary of `token_ids`
                and `padding_mask` `[B, T]`: prompts at the left of their rows, and room to write.
                Or, where no cache is given or returned, a `tf.data.Dataset` of batches of these.
                Behind a `cache`, what follows on what
                it has seen: one text for each of its rows, which may be empty, without another
                start token; None: nothing.
            max_length: integer, the tokens of a row in this call, prompt included; what a cache has
                seen before is not counted. None: the preprocessor's `sequence_length`. Without a
                preprocessor the rows say it.
            stop_token_ids: a tuple of token ids, each of which ends a row; None: rows are filled.
                `"auto"`: the tokenizer's end token, for which a preprocessor is needed.
            strip_prompt: boolean, whether to return only what is new.
            cache: a `GenerationCache` to go on from, as `prefill` makes it; None: rows begin.
            return_cache: boolean, whether to return what the rows are now, too.

        Returns:
            Text or tokens, as `inputs` are, without what the cache had seen; with `return_cache`,
            a pair of these and the new `GenerationCache`.

        Raises:
            ValueError: text without a preprocessor, no prompts, one of no token (a preprocessor's
                start token is one) or of more than `max_length`, ids or stop tokens that the
                vocabulary lacks; a sampler whose `k`, `p`, `temperature` or `num_beams` choose no
                token; a cache of another model, with another number of rows or without room; a
                cache where the model writes by another loop than its own (beam and contrastive
                search, `run_eagerly=True`, a `generate_step` of a subclass).

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
        if cache is None and not return_cache:
            if self.make_generate_function().loops is None:
                with allow_uneven_batches():
                    return super().generate(inputs, max_length, stop_token_ids, strip_prompt)
            if hasattr(inputs, "as_numpy_iterator"):  # a `tf.data.Dataset`
                batches = inputs.as_numpy_iterator()
                found = [
                    self.generate(b, max_length, stop_token_ids, strip_prompt) for b in batches
                ]
                return _concatenate(found)
        loops = self._own_loops("return_cache" if cache is None else "cache")
        stops = self._stop_token_ids(stop_token_ids)
        rows = find_prompts(self, inputs, max_length, cache)
        token_ids, lengths, state = loops.write(
            rows.token_ids, rows.lengths, stops, cache and cache.state, return_cache
        )
        generated = self._as_given(rows, token_ids, lengths, strip_prompt)
        if not return_cache:
            return generated
        last = token_ids[np.arange(len(lengths)), lengths - 1]
        limit = self._limit(cache, token_ids.shape[1])
        key = key_of(self, cache)
        return generated, GenerationCache(state, last, rows.seen + lengths, limit, key)

    def prefill(self, inputs, max_length=None, cache=None):
        """Reads prompts without writing, to write from them as often as one likes.

        They are read in pieces of at most 16,384 tokens of all rows together, or 256 of each, so
        that activations take no more memory than these need, at the speed of a forward pass in
        training. Prompts may be longer than the preprocessor's `sequence_length`.

        Args:
            inputs: a string or several of them. Without a preprocessor, a dictionary of `token_ids`
                and `padding_mask` `[B, T]`: prompts at the left of their rows.
            max_length: integer, the most tokens that a row will ever have, prompt and all that is
                written later together. Models with attention to all tokens need it, as they make
                room for as many. None: there is no limit.
            cache: a `GenerationCache` to go on from, whose `max_length` holds on; None: rows begin.

        Returns:
            A `keras_recurrent.models.GenerationCache`.

        Raises:
            ValueError: as in `generate`; no `max_length` where the model needs it, or one beside a
                `cache`.

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
        loops = self._own_loops("prefill")
        if inputs is None:
            raise ValueError("`inputs` must be what `prefill` reads, text or tokens; got None.")
        if cache is not None and max_length is not None:
            raise ValueError(
                "`max_length` belongs to the first `prefill` of a row. Leave it out beside `cache`."
            )
        needed = not self.backbone.keeps_state
        if cache is None and max_length is None and needed:
            raise ValueError(
                "`max_length` must say how many tokens a row will have at most, prompt and all "
                "that is written later together: the model attends to all tokens, and makes room "
                "for as many."
            )
        rows = find_prompts(self, inputs, None, cache, writes=False)
        limit = self._limit(cache, max_length, exact=True)
        if limit is not None and (rows.num_tokens > limit).any():
            row = int(np.argmax(rows.num_tokens))
            raise ValueError(
                f"`max_length` is {limit} tokens, and row {row} has {int(rows.num_tokens[row])} "
                "already. Ask for a larger one."
            )
        if cache is None:
            state = self.backbone.get_initial_state(len(rows.lengths), max_length=max_length)
        else:
            state = cache.state
        state = loops.read(rows.token_ids, rows.lengths - 1, state)
        key = key_of(self, cache)
        return GenerationCache(state, rows.last_token, rows.num_tokens, limit, key)

    def stream(self, inputs=None, max_length=None, stop_token_ids="auto", cache=None):
        """Text, or tokens where the model has no preprocessor, as it is written.

        Args:
            inputs, max_length, stop_token_ids, cache: as in `generate`.

        Returns:
            An iterator. For one string it gives pieces of new text: the prompt and all of them
            together are what `generate` returns. For a list it gives lists with a piece for each
            row, empty where there is nothing new. Without a preprocessor it gives a list with a
            token id for each row, None for a row that has ended.

            A character that takes several tokens comes when it is whole; one that a stream ends
            in comes as U+FFFD. Its attribute `cache` is the `GenerationCache` after all tokens so
            far, those of a character that is not whole included: in the loop, after leaving it
            early, and at the end. `close()` gives up what it holds at once, and its cache. The
            weights of the model must stay as they are until then.

        Raises:
            ValueError: as in `generate`.

        Example:

        >>> import keras_recurrent
        >>> model = keras_recurrent.models.GriffinCausalLM.from_preset("hawk_tiny", num_layers=1)
        >>> stream = model.stream("All happy", max_length=30)
        >>> for piece in stream:
        ...     print(piece, end="")  # doctest: +SKIP
        >>> more = model.generate(" But", max_length=10, cache=stream.cache)
        """
        if self.preprocessor is None and inputs is not None:
            check_no_text(inputs, self.preprocessor_cls)
        loops = self._own_loops("stream")
        stops = self._stop_token_ids(stop_token_ids)
        rows = find_prompts(self, inputs, max_length, cache)
        steps = loops.steps(rows.token_ids, rows.lengths, stops, cache and cache.state)
        limit = self._limit(cache, rows.token_ids.shape[1])
        return Stream(steps, rows, stops, self.preprocessor, limit, key_of(self, cache))

    def make_generate_function(self):
        """The compiled generation of one batch of tokens: a `loops.GenerateFunction`."""
        if getattr(self, "generate_function", None) is None:
            if not hasattr(self, "sampler"):
                raise ValueError(
                    "The model was made or loaded with `compile=False`, and has no sampler. Call "
                    '`model.compile(sampler="greedy")`, or with another one, first.'
                )
            check_sampler(self.sampler, self.backbone.vocabulary_size)
            self.generate_function = GenerateFunction(
                self,
                has_custom_step=type(self).generate_step is not GeneratingCausalLM.generate_step,
                compiled=self._compiles_generation,
                make_hub_function=super().make_generate_function,
            )
        return self.generate_function

    def _own_loops(self, argument):
        """The package's own loops, which `argument` needs."""
        function = self.make_generate_function()
        if function.loops is None:
            reason, mend = function.hub_loop_reason
            raise ValueError(f"`{argument}` needs the package's own loop, and {reason}. {mend}.")
        return function.loops

    def _stop_token_ids(self, ids):
        if isinstance(ids, str) and ids == "auto":
            if self.preprocessor is None:
                raise ValueError(
                    "`stop_token_ids` must be a tuple of token ids, or None to fill all rows, "
                    "where the model has no preprocessor, whose end token it would be."
                )
            tokenizer = self.preprocessor.tokenizer
            ids = [tokenizer.end_token_id]
            if hasattr(tokenizer, "end_token2_id"):  # as KerasHub's `generate`
                ids.append(tokenizer.end_token2_id)
        check_stop_tokens(ids, self.backbone.vocabulary_size)
        return None if ids is None else tuple(int(i) for i in ids)

    def _limit(self, cache, length, exact=False):
        """The `max_length` of a cache after this call."""
        if cache is not None:
            return cache.max_length
        if exact or length is None:
            return length
        return None if self.backbone.keeps_state else bucket(length)

    def _as_given(self, rows, token_ids, lengths, strip_prompt):
        """Rows of tokens as text or tokens, like the prompts."""
        first = rows.lengths if strip_prompt else rows.given
        counts, width = lengths - first, token_ids.shape[1] - int(rows.given[0])
        found = np.zeros((len(counts), width), "int32")
        for row, start, count, tokens in zip(found, first, counts, token_ids, strict=True):
            row[:count] = tokens[start : start + count]
        written = {"token_ids": found, "padding_mask": np.arange(width) < counts[:, None]}
        if self.preprocessor is None:
            return written
        texts = self.preprocessor.generate_postprocess(written)
        return texts[0] if rows.single else texts

    def generate_step(self, inputs, stop_token_ids=None):
        """Writes into one batch of tokens; compiled by `generate`, which users call.

        Args:
            inputs: a dictionary of `token_ids` and `padding_mask` `[B, T]`, every row with a
                prompt of at least one token at its left and room for new tokens after it.
            stop_token_ids: a tuple of token ids; once every row has a new one of them, generation
                ends. None: it fills all rows.

        Returns:
            A dictionary of `token_ids` and `padding_mask`, the latter True up to and with the
            first new stop token.
        """

        def step(token_ids, cache):
            logits, hidden_states, cache = self.call_with_cache(token_ids, cache)
            return logits[:, 0], hidden_states[:, 0], cache

        return self._generate_by_sampler(inputs, stop_token_ids, step)

    def _generate_by_sampler(self, inputs, stop_token_ids, step):
        """`generate_step`, in the sampler's own loop, with a function for one token of each row."""
        token_ids = inputs["token_ids"]
        padding_mask = ops.cast(inputs["padding_mask"], "bool")
        index = ops.min(ops.sum(ops.cast(padding_mask, "int32"), axis=-1))

        def next_token(prompt, cache, index):
            return step(ops.slice(prompt, [0, index - 1], [ops.shape(prompt)[0], 1]), cache)

        # A sampler begins by feeding the token at `index - 1`, and feeds the rest of longer prompts
        # token by token. A state must not take a token twice, so the cache ends before that one.
        batch_size, length = ops.shape(token_ids)
        seen = ops.broadcast_to(ops.arange(length, dtype="int32") < index - 1, ops.shape(token_ids))
        cache = self.backbone.get_initial_state(batch_size, max_length=length)
        hidden_states, cache = self.backbone.hidden_states(token_ids, seen, cache=cache)
        if isinstance(self.sampler, keras_hub.samplers.ContrastiveSampler):
            # It compares with all hidden states before `index`; the last is not computed yet.
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
            "padding_mask": _written(token_ids, padding_mask, stop_token_ids),
        }


def _concatenate(batches):
    """Joins the results of several batches: lists of texts, or dictionaries of arrays."""
    if isinstance(batches[0], dict):
        return {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}
    return [text for batch in batches for text in batch]


def _written(token_ids, padding_mask, stop_token_ids):
    """True up to and with the first new stop token, everywhere if there is none."""
    if stop_token_ids is None:
        return ops.ones_like(token_ids, dtype="bool")
    stops = ops.any(ops.stack([ops.equal(token_ids, i) for i in stop_token_ids]), axis=0)
    stops = ops.cast(ops.logical_and(stops, ops.logical_not(padding_mask)), "int32")
    return ops.equal(ops.cumsum(stops, axis=-1) - stops, 0)
