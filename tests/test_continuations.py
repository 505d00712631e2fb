"""`Continuations` of many contexts, compared with one text at a time."""

import keras
import numpy as np
import pytest

from keras_recurrent.continuations import Continuations
from keras_recurrent.evaluation import continuations
from keras_recurrent.tokenizers import ByteTokenizer
from tests.models.tiny import FAMILIES, VOCABULARY, tiny_causal_lm

pytestmark = pytest.mark.once


def byte_model(family="hgrn2", **sizes):
    preprocessor = FAMILIES[family].preprocessor(ByteTokenizer(), sequence_length=16)
    sizes["vocabulary_size"] = ByteTokenizer().vocabulary_size()
    return tiny_causal_lm(family=family, preprocessor=preprocessor, **sizes)


def draw(*lengths, vocabulary=VOCABULARY):
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocabulary, length).tolist() for length in lengths]


def expected_score(model, context, continuation):
    """Returns the log probability from the logits of the whole text, and whether it is greedy."""
    context, continuation = list(context), list(continuation)
    logits = model.score(np.array([context + continuation]))
    logits = keras.ops.convert_to_numpy(logits)[0, len(context) - 1 : -1].astype("float64")
    logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    log_probability = sum(row[token] for row, token in zip(logs, continuation, strict=True))
    return log_probability, logits.argmax(axis=-1).tolist() == continuation


def make_requests(model):
    """Returns continuations of several contexts; the fifth one is the most probable."""
    a, b, c, *new = draw(5, 9, 1, 3, 1, 6, 2, 7)
    best = []
    for _ in range(4):
        logits = keras.ops.convert_to_numpy(model.score(np.array([b + best])))
        best.append(int(logits[0, -1].argmax()))
    return [(a, new[0]), (b, new[1]), (a, new[2]), (c, new[3]), (b, best), (a, new[4]), (a, [])]


def check_scores(model, found, requests):
    for (score, greedy), (context, continuation) in zip(found, requests, strict=True):
        if continuation:
            expected = expected_score(model, context, continuation)
            np.testing.assert_allclose(score, expected[0], rtol=1e-5)
            assert greedy is expected[1]
        else:
            assert (score, greedy) == (0.0, True)


# With and without attention.
@pytest.mark.parametrize(("family", "batch_size"), [("griffin", 3), ("hgrn2", 1)])
def test_score_does_not_depend_on_batches_and_chunks(family, batch_size, monkeypatch):
    monkeypatch.setattr(continuations, "TOKENS_PER_CALL", 4)
    model = tiny_causal_lm(family=family)
    requests = make_requests(model)
    check_scores(model, Continuations(model, batch_size).score(requests), requests)


def test_score_processes_each_context_once(monkeypatch):
    model = tiny_causal_lm(family="hgrn2")
    seen = Continuations(model, batch_size=4)
    hidden_states, counts = type(model.backbone).hidden_states, []

    def count_tokens(self, token_ids, padding_mask=None, **kwargs):
        real = np.ones(token_ids.shape) if padding_mask is None else padding_mask
        counts.append(int(np.sum(keras.ops.convert_to_numpy(real))))
        return hidden_states(self, token_ids, padding_mask, **kwargs)

    monkeypatch.setattr(type(model.backbone), "hidden_states", count_tokens)
    context, *new = draw(100, 3, 2, 4, 1)
    seen.score([(context, continuation) for continuation in new])
    assert sum(counts) == 99 + (3 + 2 + 4 + 1)  # after all but the last token of the context


def test_generate_of_continuations_equals_generate_of_the_model():
    model = byte_model("griffin")
    model.compile(sampler="greedy")
    contexts = ["It was", "Call me Ishmael", "All", "It was"]
    tokens = [[1, *model.preprocessor.tokenizer(text)] for text in contexts]
    expected = [
        model.generate(text, max_length=len(row) + 23, strip_prompt=True)
        for text, row in zip(contexts, tokens, strict=True)
    ]
    several = Continuations(model, batch_size=2)
    assert several.generate(tokens, ["\x00no\x00"], 23, end_token_id=2) == expected
    # Random weights may end a text at once.
    for stop in filter(None, (expected[0][3:6], expected[1][9:11], expected[2][:1])):
        found = several.generate(tokens, ["\x00no\x00", stop], 23, end_token_id=2)
        assert found == [text.partition(stop)[0] for text in expected]
    last = next(letter for letter in reversed(expected[1]) if letter.isascii())
    (end,) = model.preprocessor.tokenizer(last)
    found = several.generate(tokens[1:2], [], 23, end_token_id=end)
    assert found == [expected[1].partition(last)[0]]


def test_score_of_a_long_context_drops_its_oldest_tokens():
    model = byte_model()
    several = Continuations(model, batch_size=4, max_length=10)
    context, new = draw(30, 4)
    (found,) = several.score([(context, new)])
    np.testing.assert_allclose(found[0], expected_score(model, context[-7:], new)[0], rtol=1e-5)
    assert several.generate([context], [], 6, 2) == several.generate([context[-4:]], [], 6, 2)
    assert several.generate([context], [], 6, 2) != several.generate([context[-3:]], [], 6, 2)


def test_continuations_wrong_arguments_raise():
    model = byte_model()
    short = Continuations(model, max_length=8)
    without_preprocessor = Continuations(tiny_causal_lm(family="hgrn2"))
    with pytest.raises(TypeError, match=r"`model` must be a language model .*; got Dense"):
        Continuations(keras.layers.Dense(1))
    score = [([[1, 2, 3]], "`requests` must be pairs of a context and a")]
    score += [([4], "`requests` must be pairs"), (["one"], "`requests` must be pairs")]
    score += [([([], [1])], r"`context` must be .* at least one; got \[\]")]
    score += [([("one", "two")], "`context` must be a list of token ids.* got 'one'")]
    score += [
        ([([1], new)], "`continuation` must be a list of token ids.* got")
        for new in (2, [1.5], ["7"])
    ]
    score += [([([1], [259])], "`continuation` must be ids from 0 to 258")]
    score += [([([1], [5] * 9)], "`max_length` is 8 tokens, and a continuation .* 9")]
    for call, arguments, message in [
        (Continuations, (model, 0), "`batch_size` must be an integer, at least 1; got 0"),
        (Continuations, (model, 1, 0), "`max_length` must be an integer, at least 1; got 0"),
        *((short.score, (requests,), message) for requests, message in score),
        (short.generate, (["one"], [], 4, 2), "`context` must be a list of token ids.* got 'one'"),
        (short.generate, ([[1]], [], 8, 2), "`max_new_tokens` must be below `max_length`, 8"),
        (short.generate, ([[1]], [""], 4, 2), "`until` must be non-empty strings"),
        (without_preprocessor.generate, ([[1]], [], 4, 2), "must have a preprocessor"),
    ]:
        with pytest.raises(ValueError, match=message):
            call(*arguments)
