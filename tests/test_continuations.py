"""Scores and continuations of many contexts, beside those of one text at a time."""

import keras
import numpy as np
import pytest

from keras_recurrent.continuations import Continuations
from keras_recurrent.evaluation import continuations
from keras_recurrent.generation.sequence import Sequence
from keras_recurrent.generation.stop_strings import StreamedText
from keras_recurrent.models import SamplingParams
from keras_recurrent.tokenizers import ByteTokenizer
from tests.models.tiny import FAMILIES, VOCABULARY, any_family, tiny_causal_lm

pytestmark = pytest.mark.once


def byte_model(family="hgrn2"):
    preprocessor = FAMILIES[family].preprocessor(ByteTokenizer(), sequence_length=16)
    return tiny_causal_lm(
        family=family, preprocessor=preprocessor, vocabulary_size=ByteTokenizer().vocabulary_size()
    )


def draw(*lengths, vocabulary=VOCABULARY):
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocabulary, length).tolist() for length in lengths]


def by_hand(model, context, continuation):
    """The same from the logits of the whole text, by NumPy."""
    context, continuation = list(context), list(continuation)
    logits = model.score(np.array([context + continuation]))
    logits = keras.ops.convert_to_numpy(logits)[0, len(context) - 1 : -1].astype("float64")
    logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    log_probability = sum(row[token] for row, token in zip(logs, continuation, strict=True))
    return log_probability, logits.argmax(axis=-1).tolist() == continuation


def requests(model):
    """Several continuations of some contexts; one is the most probable."""
    a, b, c, *new = draw(5, 9, 1, 3, 1, 6, 2, 7)
    best = []
    for _ in range(4):
        logits = keras.ops.convert_to_numpy(model.score(np.array([b + best])))
        best.append(int(logits[0, -1].argmax()))
    return [(a, new[0]), (b, new[1]), (a, new[2]), (c, new[3]), (b, best), (a, new[4]), (a, [])]


def check_scores(model, found, asked):
    for (score, greedy), (context, continuation) in zip(found, asked, strict=True):
        if continuation:
            wanted = by_hand(model, context, continuation)
            np.testing.assert_allclose(score, wanted[0], rtol=1e-5)
            assert greedy is wanted[1]
        else:
            assert (score, greedy) == (0.0, True)


def test_scores_are_those_of_whole_texts():
    model = tiny_causal_lm(family="hgrn2", num_layers=1)
    asked = requests(model)
    found = Continuations(model, batch_size=8).score(asked)
    check_scores(model, found, asked)
    assert [greedy for _, greedy in found] == [False, False, False, False, True, False, True]


@pytest.mark.once
@any_family
@pytest.mark.parametrize("batch_size", [1, 3])
def test_scores_are_the_same_in_any_batches_and_pieces(family, batch_size, monkeypatch):
    monkeypatch.setattr(continuations, "TOKENS_PER_CALL", 4)
    model = tiny_causal_lm(family=family)
    asked = requests(model)
    check_scores(model, Continuations(model, batch_size).score(asked), asked)


@pytest.mark.once
def test_each_context_is_read_once(monkeypatch):
    model = tiny_causal_lm(family="hgrn2")
    seen = Continuations(model, batch_size=4)
    hidden_states, read = type(model.backbone).hidden_states, []

    def counted(self, token_ids, padding_mask=None, **kwargs):
        real = np.ones(token_ids.shape) if padding_mask is None else padding_mask
        read.append(int(np.sum(keras.ops.convert_to_numpy(real))))
        return hidden_states(self, token_ids, padding_mask, **kwargs)

    monkeypatch.setattr(type(model.backbone), "hidden_states", counted)
    context, *new = draw(100, 3, 2, 4, 1)
    seen.score([(context, continuation) for continuation in new])
    assert sum(read) == 99 + (3 + 2 + 4 + 1)  # behind the last token but one of the context


@pytest.mark.once
@any_family
def test_what_is_written_is_what_generate_writes(family):
    model = byte_model(family)
    model.compile(sampler="greedy")
    contexts = ["It was", "Call me Ishmael", "All", "It was"]
    tokens = [[1, *model.preprocessor.tokenizer(text)] for text in contexts]
    wanted = [
        model.generate(text, max_length=len(row) + 23, strip_prompt=True)
        for text, row in zip(contexts, tokens, strict=True)
    ]
    several = Continuations(model, batch_size=2)
    assert several.generate(tokens, ["\x00no\x00"], 23, end_token_id=2) == wanted
    # Random weights may end a text at once.
    for stop in filter(None, (wanted[0][3:6], wanted[1][9:11], wanted[2][:1])):
        found = several.generate(tokens, ["\x00no\x00", stop], 23, end_token_id=2)
        assert found == [text.partition(stop)[0] for text in wanted]
    last = next(letter for letter in reversed(wanted[1]) if letter.isascii())
    (end,) = model.preprocessor.tokenizer(last)
    found = several.generate(tokens[1:2], [], 23, end_token_id=end)
    assert found == [wanted[1].partition(last)[0]]


@pytest.mark.once
@pytest.mark.parametrize(
    ("written", "until", "wanted"),
    [
        ("one. two", ["."], "one"),
        ("one\n\ntwo", ["\n\n", "\n"], "one"),
        ("xab", ["b", "ab"], "x"),
        ("a\nb", ["\n\n"], "a\nb"),
        ("é.é", ["é."], ""),
        ("nothing ends it", [], "nothing ends it"),
    ],
)
def test_an_answer_ends_before_the_first_string(written, until, wanted):
    preprocessor = FAMILIES["hgrn2"].preprocessor(ByteTokenizer())
    tokens = [*preprocessor.tokenizer(written), 2, *preprocessor.tokenizer("behind the end")]
    text = StreamedText(preprocessor, 100, until, [2])
    greedy = SamplingParams(temperature=0)
    sequence = Sequence(np.array([100]), greedy, None, len(tokens), [2], text.read)
    for token in tokens:
        if sequence.finish_reason is None:
            sequence.add(token)
    assert text.shown == wanted


@pytest.mark.once
def test_longer_contexts_lose_their_oldest_tokens():
    model = byte_model()
    several = Continuations(model, batch_size=4, max_length=10)
    context, new = draw(30, 4)
    (found,) = several.score([(context, new)])
    np.testing.assert_allclose(found[0], by_hand(model, context[-7:], new)[0], rtol=1e-5)
    assert several.generate([context], [], 6, 2) == several.generate([context[-4:]], [], 6, 2)
    assert several.generate([context], [], 6, 2) != several.generate([context[-3:]], [], 6, 2)


@pytest.mark.once
def test_what_cannot_be_done_is_an_error():
    model = byte_model()
    several = Continuations(model, max_length=8)
    with pytest.raises(TypeError, match=r"`model` must be a language model .*; got Dense"):
        Continuations(keras.layers.Dense(1))
    with pytest.raises(ValueError, match="`batch_size` must be an integer, at least 1; got 0"):
        Continuations(model, batch_size=0)
    with pytest.raises(ValueError, match="`max_length` must be an integer, at least 1; got 0"):
        Continuations(model, max_length=0)
    with pytest.raises(ValueError, match=r"`context` must be .* at least one; got \[\]"):
        several.score([([], [1])])
    for requests in ([[1, 2, 3]], [4], ["one"]):
        with pytest.raises(ValueError, match="`requests` must be pairs of a context and a"):
            several.score(requests)
    with pytest.raises(ValueError, match=r"`context` must be a list of token ids.* got 'one'"):
        several.score([("one", "two")])
    for new in (2, [1.5], ["7"]):
        with pytest.raises(ValueError, match=r"`continuation` must be a list of token ids.* got"):
            several.score([([1], new)])
    with pytest.raises(ValueError, match=r"`context` must be a list of token ids.* got 'one'"):
        several.generate(["one"], [], 4, 2)
    with pytest.raises(ValueError, match="`continuation` must be ids from 0 to 258"):
        several.score([([1], [259])])
    with pytest.raises(ValueError, match=r"`max_length` is 8 tokens, and a continuation .* 9"):
        several.score([([1], [5] * 9)])
    with pytest.raises(ValueError, match="`max_new_tokens` must be below `max_length`, 8"):
        several.generate([[1]], [], 8, 2)
    with pytest.raises(ValueError, match="`until` must be non-empty strings"):
        several.generate([[1]], [""], 4, 2)
    with pytest.raises(ValueError, match="must have a preprocessor"):
        Continuations(tiny_causal_lm(family="hgrn2")).generate([[1]], [], 4, 2)
