"""Options of `generate` and `stream`: stop strings, numbers of tokens, log probabilities."""

import keras
import numpy as np
import pytest

from keras_recurrent.generation.stop_strings import NOT_FOUND, StopFilter, StopStrings
from keras_recurrent.models import HGRN2CausalLMPreprocessor, SamplingParams
from keras_recurrent.tokenizers import ByteTokenizer
from tests.generation.numpy_sampling import log_softmax
from tests.models.tiny import forward, tiny_causal_lm

LETTERS = {3 + byte: 100.0 for byte in b"abcd"}
PROMPTS, NEW = ["ab", "abcde"], 24
SAMPLING = [SamplingParams(seed=seed, logit_bias=LETTERS) for seed in (1, 2)]


@pytest.fixture(scope="module")
def model():
    """A model that writes the letters a to d at random."""
    preprocessor = HGRN2CausalLMPreprocessor(ByteTokenizer(), sequence_length=32)
    model = tiny_causal_lm(
        preprocessor=preprocessor, family="hgrn2", num_layers=1, vocabulary_size=259
    )
    model.compile(sampler="greedy")
    return model


@pytest.fixture(scope="module")
def texts(model):
    """The new texts without stop strings."""
    arguments = {"max_new_tokens": NEW, "sampling": SAMPLING, "strip_prompt": True}
    return model.generate(PROMPTS, **arguments)


def only_in_the_first(texts):
    """Letters of three tokens, after the first few, that the second text does not have."""
    parts = [texts[0][i : i + 3] for i in range(6, NEW - 6)]
    return next(part for part in parts if texts[0].find(part) > 5 and part not in texts[1])


def generate(model, **kwargs):
    logprobs = [SamplingParams(seed=p.seed, logit_bias=LETTERS, logprobs=0) for p in SAMPLING]
    arguments = {"max_new_tokens": NEW, "sampling": logprobs, "strip_prompt": True}
    return model.generate(PROMPTS, **{**arguments, **kwargs})


@pytest.mark.once
def test_stop_filter_stops_where_a_search_of_the_whole_text_does():
    """Text of a stop string is shown, other text is lost, or more strings take more time."""
    rng = np.random.default_rng(0)
    for _ in range(500):
        strings = tuple("".join(rng.choice(list("ab"), rng.integers(1, 6))) for _ in range(3))
        chunks = ["".join(rng.choice(list("abc"), rng.integers(0, 4))) for _ in range(8)]
        found, text = StopFilter(strings), ""
        for number, chunk in enumerate(chunks, 1):
            shown, is_stopped = found.add(chunk, number == len(chunks))
            text += shown
            whole = "".join(chunks[:number])
            starts = [whole.find(s) for s in strings if s in whole]
            assert is_stopped == bool(starts)
            if starts:
                assert text == whole[: min(starts)]
                break
            ends = [
                n for n in range(5) if any(s.startswith(whole[len(whole) - n :]) for s in strings)
            ]
            held = 0 if number == len(chunks) else max(n for n in ends if n <= len(whole))
            assert text == whole[: len(whole) - held]
    filter = StopFilter([f"{'a' * n}{n}" + "b" * (1023 - n) for n in range(1000, 1016)])
    compared, is_beginning = [], filter._is_beginning
    filter._is_beginning = lambda text: compared.append(1) or is_beginning(text)
    for chunk in ["a" * 5, "ab"] * 500:
        filter.add(chunk, False)
    assert len(compared) < 1000 + 7 * 500 + 1


def test_max_new_tokens_of_prompts_of_different_lengths(model, texts):
    """Each sequence gets this number; `max_length` may end the longer one before."""
    assert [len(text) for text in texts] == [NEW, NEW]
    found = generate(model, max_length=20)
    lengths = [20 - 1 - len(prompt) for prompt in PROMPTS]  # the start token counts
    assert found.texts == [text[:n] for text, n in zip(texts, lengths, strict=True)]
    assert found.finish_reason == ["length", "length"]


@pytest.mark.parametrize("return_cache", [False, True])
def test_a_stop_string_ends_its_sequence_only(model, texts, return_cache):
    """Fails if the stop string is in the text, or the cache is ahead of it."""
    stop = [only_in_the_first(texts), "zzz"]
    end = texts[0].find(stop[0])
    found = generate(model, stop=stop, return_cache=return_cache)
    assert found.texts == [texts[0][:end], texts[1]]
    assert found.finish_reason == ["stop", "length"]
    tokens = [3 + ord(letter) for letter in texts[0][: end + 3]]
    assert found.token_ids[0] == tokens
    assert [len(row) for row in found.logprobs] == [len(tokens), NEW]
    if not return_cache:
        return
    # The state is that after the tokens of the cache, none more.
    cache, more = found.cache, {"max_new_tokens": 4, "strip_prompt": True}
    assert cache.token_ids[0].tolist() == [1, *(3 + ord(c) for c in PROMPTS[0]), *tokens]
    fresh = model.prefill(PROMPTS[0] + texts[0][: end + 3])
    for array, expected in zip(
        keras.tree.flatten(cache.select([0]).state), keras.tree.flatten(fresh.state), strict=True
    ):
        np.testing.assert_allclose(*map(keras.ops.convert_to_numpy, (array, expected)), atol=1e-4)
    continued = model.generate("", cache=cache.select([0]), sampling=SAMPLING[:1], **more)
    expected = model.generate("", cache=fresh, sampling=SAMPLING[:1], **more)
    assert continued == expected


def test_a_stream_shows_no_part_of_a_stop_string(model, texts):
    stop = only_in_the_first(texts)
    found = generate(model, stop=stop)
    stream = model.stream(PROMPTS, max_new_tokens=NEW, stop=stop, sampling=SAMPLING)
    shown = ["", ""]
    for chunks in stream:
        shown = [text + chunk for text, chunk in zip(shown, chunks, strict=True)]
        assert all(text.startswith(s) for text, s in zip(found.texts, shown, strict=True))
    assert shown == found.texts
    output = stream.output
    assert (output.texts, output.token_ids) == (found.texts, found.token_ids)
    assert output.finish_reason == ["stop", "length"]
    lengths = [1 + len(p) + len(ids) for p, ids in zip(PROMPTS, found.token_ids, strict=True)]
    assert stream.cache.num_tokens.tolist() == lengths


@pytest.mark.parametrize("count", [11, 16])
def test_a_stream_ends_at_any_token_of_a_block(model, texts, count):
    """A sequence ends only at the end of a block, or not at the end of a group of blocks."""
    stop = texts[0][count - 5 : count]
    assert texts[0].find(stop) == count - 5
    assert stop not in texts[1]
    stream = model.stream(PROMPTS, max_new_tokens=NEW, stop=stop, sampling=SAMPLING)
    for _ in stream:
        pass
    assert stream.output.texts == [texts[0][: count - 5], texts[1]]
    fresh = model.prefill([PROMPTS[0] + texts[0][:count], PROMPTS[1] + texts[1]])
    for array, expected in zip(
        keras.tree.flatten(stream.cache.state), keras.tree.flatten(fresh.state), strict=True
    ):
        np.testing.assert_allclose(*map(keras.ops.convert_to_numpy, (array, expected)), atol=1e-4)


def test_log_probabilities_of_generated_tokens(model, texts):
    """Compared with a plain forward pass, also in a stream, for one of two sequences."""
    first = SamplingParams(seed=1, logit_bias=LETTERS, logprobs=3)
    arguments = {"max_new_tokens": NEW, "sampling": [first, SAMPLING[1]]}
    found = model.generate(PROMPTS, **arguments)
    stream = model.stream(PROMPTS, **arguments)
    list(stream)
    assert found.logprobs[1] == stream.output.logprobs[1] == []
    tokens = np.array([[1, *(3 + ord(c) for c in PROMPTS[0] + texts[0])]], "int32")
    logits = forward(model, tokens, np.ones_like(tokens, bool))[0, len(PROMPTS[0]) : -1]
    rows = zip(found.logprobs[0], stream.output.logprobs[0], logits.astype("float64"), strict=True)
    for new, streamed, row in rows:
        expected = log_softmax(row)
        assert abs(new.logprob - expected[new.token_id]) < 1e-4
        assert abs(new.logprob - streamed.logprob) < 1e-5
        assert list(new.top) == np.argsort(-expected)[:3].tolist() == list(streamed.top)
        np.testing.assert_allclose(list(new.top.values()), expected[list(new.top)], atol=1e-4)


@pytest.mark.once
@pytest.mark.parametrize("errors", ["replace", "strict"])
def test_stop_strings_are_found_wherever_they_are_cut(errors):
    """Compared with a search in the text of every number of tokens."""
    rng = np.random.default_rng(0)
    preprocessor = HGRN2CausalLMPreprocessor(ByteTokenizer(errors=errors))
    strings = ("ab€", "éé", "a" * 5)
    for _ in range(20):
        text = "".join(rng.choice(list("aab€é"), size=40)).encode()
        tokens = np.array([3 + byte for byte in text])
        search = StopStrings(strings, preprocessor, [99])
        first = next(
            (n for n in range(len(text) + 1) for s in strings if s.encode() in text[:n]), NOT_FOUND
        )
        start = 0
        while start < len(tokens):
            size = rng.integers(1, 20)
            search.add(tokens[None, start : start + size])
            start += size
        assert search.counts[0] == first
        if first < NOT_FOUND:
            whole = text[:first].decode()
            expected = min(whole.find(s) for s in strings if s in whole)
            assert search.trim([whole], np.array([first])) == [whole[:expected]]


@pytest.mark.once
def test_stop_strings_after_invalid_bytes_of_an_ended_sequence_end_the_others():
    """Tokens that a strict tokenizer rejects, after a stop token of one sequence, fail the call."""
    search = StopStrings(("ab",), HGRN2CausalLMPreprocessor(ByteTokenizer(errors="strict")), [9, 9])
    rows = [[2, 3 + 0xFF, 3 + 0xFF], [3 + ord(letter) for letter in "cab"]]
    assert search.add(np.array(rows)).tolist() == [False, True]
    assert search.counts.tolist() == [NOT_FOUND, 3]


@pytest.mark.once
def test_the_filter_withholds_as_little_as_possible():
    rng, strings = np.random.default_rng(0), ("abc", "ca", "bb")
    for _ in range(300):
        text = "".join(rng.choice(list("abcd"), size=12))
        # Text before the first string that is complete, in the order of characters.
        ends = [(text.find(s) + len(s), text.find(s)) for s in strings if s in text]
        expected = text[: min(ends)[1]] if ends else text
        shown, found, search = "", False, StopFilter(strings)
        for n, letter in enumerate(text, start=1):
            piece, found = search.add(letter, n == len(text))
            shown += piece
            if found:
                break
            held = len(text[:n]) - len(shown)
            assert not held or any(s.startswith(text[n - held : n]) for s in strings)
        assert (shown, found) == (expected, bool(ends))


@pytest.mark.once
def test_stop_strings_that_cannot_be(model):
    for stop in ("", [], ["a", ""], [1]):
        with pytest.raises(ValueError, match="`stop` must be a string, or a list of strings"):
            model.generate("a", stop=stop)
    tokens_only = type(model)(model.backbone)
    prompt = {"token_ids": np.ones((1, 2), "int32"), "padding_mask": np.ones((1, 2), bool)}
    with pytest.raises(ValueError, match="`stop` needs a preprocessor"):
        tokens_only.generate(prompt, stop_token_ids=None, stop="a")
    for number in (0, 2.5):
        with pytest.raises(ValueError, match="`max_new_tokens` must be an integer, at least 1"):
            model.generate("a", max_new_tokens=number)


@pytest.mark.once
@pytest.mark.parametrize(
    ("stop", "words"),
    [
        (["a"] * 17, "at most 16 strings of at most 1024 characters; got 17"),
        ("a" * 1025, "at most 16 strings .* got 1, the longest of 1025"),
        (["a", "\ud800"], "`stop` must be valid Unicode"),
    ],
)
def test_stop_strings_beyond_their_limits_are_refused(model, stop, words):
    """Stop strings slow down every token of all requests, or an error does not name `stop`."""
    for method in (model.generate, model.stream):
        with pytest.raises(ValueError, match=words):
            method("a", stop=stop)


@pytest.mark.once
def test_unknown_options_name_the_right_ones(model):
    """The error for an option of another package does not name the argument to use instead."""
    for method in (model.generate, model.stream, model.chat):
        for options, words in (
            ({"temperature": 0.5}, r"`sampling=SamplingParams\(temperature=0\.5\)`"),
            ({"min_tokens": 3}, r"`sampling=SamplingParams\(min_new_tokens=3\)`"),
            ({"max_tokens": 3}, "Pass `max_new_tokens`"),
            ({"other": 3}, "has no argument `other`. Its arguments are .*`stop_token_ids`"),
        ):
            with pytest.raises(TypeError, match=words):
                method("a", **options)
    with pytest.raises(TypeError, match=r"`prefill` has no argument `top_k`.*to `generate`"):
        model.prefill("a", top_k=3)


@pytest.mark.once
@pytest.mark.parametrize("method", ["generate", "stream", "prefill"])
def test_prompts_with_surrogates_are_refused(model, method):
    """A lone surrogate raises an error of the tokenizer that does not name the argument."""
    with pytest.raises(ValueError, match=r"`inputs` must be valid Unicode.*position 1"):
        getattr(model, method)(["b", "a\ud800"])
