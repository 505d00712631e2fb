"""What a language model says of continuations of a context, which is read once for all of them."""

import functools
from collections.abc import Callable

import keras
import numpy as np
from keras import ops

from keras_recurrent.checks.arguments import check_positive_integer
from keras_recurrent.checks.token_ids import check_token_ids
from keras_recurrent.devices.jax_processes import gather_to_numpy
from keras_recurrent.dispatch import chosen_name
from keras_recurrent.evaluation import no_gradients
from keras_recurrent.generation.lengths import bucket
from keras_recurrent.generation.text import TextPieces
from keras_recurrent.models.recurrent_causal_lm import RecurrentCausalLM
from keras_recurrent.ops.token_crossentropy import token_crossentropy

TOKENS_AT_ONCE = 2048  # of all rows together, whose logits are in memory at a time
WRITTEN_AT_ONCE = 32  # tokens of a row, before its text is searched for what ends it


class Continuations:
    """Scores and writes continuations of contexts, many at a time.

    A context that several requests have in common is read once, and each continuation goes on from
    the state behind it. Shapes are rounded up to powers of two, so that few programs are compiled.

    Args:
        model: a language model of this package, whose weights are used as they are at each call.
        batch_size: integer, the most rows that are read at a time, contexts or continuations. As
            many states of contexts and of continuations are in memory.
        max_length: integer, the most tokens that the model reads for one answer; the oldest tokens
            of a longer context are left out. None: there is no limit.

    Raises:
        TypeError: `model` is no language model of this package.
        ValueError: a number that is no integer from 1 on.

    Example:

    >>> from keras_recurrent.continuations import Continuations
    >>> from keras_recurrent.models import GriffinCausalLM
    >>> model = GriffinCausalLM.from_preset("hawk_tiny", num_layers=1)
    >>> several = Continuations(model, batch_size=4)
    >>> found = several.score([([1, 100], [101, 102]), ([1, 100], [103])])
    >>> [score < 0 for score, is_greedy in found]
    [True, True]
    >>> (text,) = several.write([[1, 100]], until=["."], max_new_tokens=3, end_token_id=2)
    >>> "." not in text and len(text) <= 3
    True
    """

    def __init__(self, model, batch_size=8, max_length=None):
        if not isinstance(model, RecurrentCausalLM):
            raise TypeError(
                "`model` must be a language model of keras_recurrent, such as "
                f"`keras_recurrent.models.GriffinCausalLM`; got {type(model).__name__}."
            )
        check_positive_integer("batch_size", batch_size)
        if max_length is not None:
            check_positive_integer("max_length", max_length)
        self.batch_size, self.max_length = batch_size, max_length
        self._preprocessor = model.preprocessor
        # The same weights behind tokens instead of text, with a sampler of its own.
        self._model = type(model)(model.backbone, preprocessor=None, compile=False)
        self._model.compile(sampler="greedy")
        self._judge = _judge_of(self._model)

    def score(self, requests):
        """The probabilities of continuations.

        Args:
            requests: a list of pairs `(context, continuation)`, both lists of token ids, the
                context of at least one.

        Returns:
            A list of pairs: log p(continuation | context), a float in nats, and whether each token
            of the continuation is the most probable one at its place. They are 0.0 and True of a
            continuation without tokens.

        Raises:
            ValueError: a request that is no pair, text instead of tokens, a context without any, an
                id that the vocabulary lacks, or a continuation longer than `max_length`.
        """
        requests = [self._cut(*_pair(request)) for request in requests]
        of_context: dict = {}
        for number, (context, _) in enumerate(requests):
            of_context.setdefault(tuple(context), []).append(number)
        found: list = [(0.0, True)] * len(requests)
        for contexts in self._batches(of_context):
            pairs = [(row, n) for row, c in enumerate(contexts) for n in of_context[c]]
            pairs.sort(key=lambda pair: -len(requests[pair[1]][1]))
            longest = len(requests[pairs[0][1]][1])
            cache = self._read(contexts, longest)
            for first in range(0, len(pairs), self.batch_size):
                rows, numbers = zip(*pairs[first : first + self.batch_size], strict=True)
                scores = self._scores(
                    cache.select(self._filled(rows)), [requests[n][1] for n in numbers]
                )
                for number, score in zip(numbers, scores, strict=True):
                    found[number] = score
        return found

    def write(self, contexts, until, max_new_tokens, end_token_id):
        """The most probable continuations, token by token, as text.

        Args:
            contexts: a list of lists of token ids, at least one id each.
            until: a list of strings; a continuation ends before the first of them that it has.
            max_new_tokens: integer, the most tokens of a continuation.
            end_token_id: integer, the token that ends a continuation, too.

        Returns:
            A list of strings.

        Raises:
            ValueError: the model has no preprocessor, which makes text of tokens; text instead of
                tokens, a context without any, an id that the vocabulary lacks; a `max_new_tokens`
                that is no integer from 1 on or not below `max_length`; an empty string in `until`.
        """
        if self._preprocessor is None:
            raise ValueError("The model has no preprocessor, which would make text of tokens.")
        check_positive_integer("max_new_tokens", max_new_tokens)
        if self.max_length is not None and max_new_tokens >= self.max_length:
            raise ValueError(
                f"`max_new_tokens` must be below `max_length`, {self.max_length}, to leave room "
                f"for a context; got {max_new_tokens}."
            )
        if "" in until:
            raise ValueError(f"`until` must be strings that are not empty; got {until!r}.")
        cut = [self._cut(context, room=max_new_tokens)[0] for context in contexts]
        texts: dict = dict.fromkeys(map(tuple, cut))
        for some in self._batches(texts):
            cache = self._read(some, max_new_tokens)
            texts.update(
                zip(some, self._texts(cache, until, max_new_tokens, end_token_id), strict=False)
            )
        return [texts[tuple(context)] for context in cut]

    def _cut(self, context, continuation=(), room=None):
        """A request of which no more than `max_length` tokens are read."""
        context = _token_list("context", context)
        continuation = _token_list("continuation", continuation)
        if not context:
            raise ValueError("Every context needs at least one token, such as a start token.")
        vocabulary_size = self._model.backbone.vocabulary_size
        check_token_ids("context", np.array(context), vocabulary_size)
        check_token_ids("continuation", np.array(continuation, "int64"), vocabulary_size)
        if self.max_length is not None:
            # The last token of a continuation is not read.
            room = max(len(continuation) - 1, 0) if room is None else room
            if room >= self.max_length:
                raise ValueError(
                    f"`max_length` is {self.max_length} tokens, and a continuation alone has "
                    f"{len(continuation)}. Ask for a larger `max_length`."
                )
            context = context[-(self.max_length - room) :]
        return context, continuation

    def _batches(self, contexts):
        """Lists of contexts, the longest first: what is too large for the memory shows early."""
        order = sorted(contexts, key=len, reverse=True)
        for first in range(0, len(order), self.batch_size):
            yield order[first : first + self.batch_size]

    def _filled(self, rows):
        """A list of rows, of which the last repeats up to a power of two, or to `batch_size`."""
        rows = list(rows)
        size = min(_power_of_two(len(rows)), self.batch_size)
        return rows + rows[-1:] * (size - len(rows))

    def _read(self, contexts, room):
        """The cache behind contexts, with room for as many tokens more; some rows repeat others."""
        longest = len(contexts[0])
        token_ids = np.zeros((len(contexts), longest), "int32")
        for row, context in zip(token_ids, contexts, strict=True):
            row[: len(context)] = context
        lengths = np.array([len(context) for context in contexts])
        rows = self._filled(range(len(contexts)))
        prompts = {
            "token_ids": token_ids[rows],
            "padding_mask": (np.arange(longest) < lengths[:, None])[rows],
        }
        keeps_state = self._model.backbone.keeps_state
        return self._model.prefill(prompts, None if keeps_state else bucket(longest + room))

    def _scores(self, cache, continuations):
        rows, width = cache.batch_size, _power_of_two(len(continuations[0]))
        lengths = np.zeros((rows, 1), int)
        inputs, targets = (np.zeros((rows, width), "int32") for _ in range(2))
        inputs[:, 0] = cache.last_token
        for row, new in enumerate(continuations):
            lengths[row], targets[row, : len(new)] = len(new), new
            inputs[row, 1 : len(new)] = new[:-1]
        real = np.arange(width) < lengths
        state, total, greedy = cache.state, np.zeros(rows), np.ones(rows, bool)
        size = max(1, TOKENS_AT_ONCE // rows)
        for first in range(0, width, size):
            part = slice(first, first + size)
            if not real[:, part].any():
                break
            loss, best, state = self._judge(inputs[:, part], targets[:, part], real[:, part], state)
            total -= np.where(real[:, part], loss, 0.0).sum(axis=1)
            greedy &= (best | ~real[:, part]).all(axis=1)
        found = zip(total.tolist(), greedy.tolist(), strict=True)
        return [score for score, _ in zip(found, continuations, strict=False)]

    def _texts(self, cache, until, max_new_tokens, end_token_id):
        answers = [Answer(self._preprocessor, token, until) for token in cache.last_token]
        left = max_new_tokens
        while left and not all(answer.ended for answer in answers):
            count = min(left, WRITTEN_AT_ONCE)
            left -= count
            # Rows that have ended are written on: batches of one size share a program.
            written, cache = self._model.generate(
                None, count, (end_token_id,), cache=cache, return_cache=True
            )
            rows = zip(answers, written["token_ids"], written["padding_mask"], strict=True)
            for answer, tokens, real in rows:
                answer.add(tokens[real], end_token_id)
        return [answer.end() for answer in answers]


def _pair(request):
    if isinstance(request, (list, tuple)) and len(request) == 2:
        return request
    raise ValueError(
        f"`requests` must be pairs of a context and a continuation; got {request!r} among them."
    )


def _token_list(name, tokens):
    ids = np.asarray(tokens)
    if ids.ndim == 1 and (ids.dtype.kind in "iu" or not ids.size):
        return ids.astype("int64").tolist()
    raise ValueError(
        f"`{name}` must be a list of token ids, integers, which a tokenizer makes of text; got "
        f"{tokens!r}."
    )


class Answer:
    """The text of one row, which ends before the first of some strings.

    Args:
        preprocessor: the model's, which makes text of tokens.
        last_token: integer, the token before the first.
        until: a list of strings.
    """

    def __init__(self, preprocessor, last_token, until):
        self._pieces, self._until = TextPieces(preprocessor, last_token), until
        self._text, self.ended = "", False

    def add(self, tokens, end_token_id):
        """Takes more tokens, up to an end token."""
        for token in tokens:
            if self.ended:
                return
            if token == end_token_id:
                self._finish()
            else:
                self._append(self._pieces.add(token))

    def end(self):
        """The text."""
        if not self.ended:
            self._finish()
        return self._text

    def _finish(self):
        self._append(self._pieces.end())
        self.ended = True

    def _append(self, piece):
        before, self._text = len(self._text), self._text + piece
        starts = (max(0, before - len(stop) + 1) for stop in self._until)
        places = [self._text.find(*pair) for pair in zip(self._until, starts, strict=True)]
        places = [place for place in places if place >= 0]
        if places:
            self._text, self.ended = self._text[: min(places)], True


def _power_of_two(number):
    return 1 << max(number - 1, 0).bit_length()


def _judge_of(model):
    """A function `(token_ids, targets, real, state)`, all but the last `[B, T]`.

    It returns the losses of the targets, whether each is the most probable, both NumPy `[B, T]`,
    and the state behind the tokens that are real.
    """

    def judge(token_ids, targets, real, state):
        hidden_states, state = model.backbone.hidden_states(token_ids, real, cache=state)
        logits = model.backbone.token_embedding(hidden_states, reverse=True)
        best = ops.equal(ops.cast(ops.argmax(logits, axis=-1), targets.dtype), targets)
        return token_crossentropy(logits, targets), best, state

    on_jax = keras.config.backend() == "jax"
    run: Callable = _compiled_by_jax(model, judge) if on_jax else judge

    def on_the_host(token_ids, targets, real, state):
        with no_gradients():
            loss, best, state = run(*map(ops.convert_to_tensor, (token_ids, targets, real)), state)
        return gather_to_numpy(loss).astype("float64"), gather_to_numpy(best), state

    return on_the_host


def _compiled_by_jax(model, function):
    import jax

    # What `implementation` has chosen is a part of the program.
    @functools.partial(jax.jit, static_argnames="implementation")
    def program(weights, arguments, implementation):
        with keras.StatelessScope(list(zip(model.variables, weights, strict=True))):
            return function(*arguments)

    def run(*arguments):
        return program([v.value for v in model.variables], arguments, implementation=chosen_name())

    return run
