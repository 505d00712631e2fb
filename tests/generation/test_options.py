"""Options of `generate` and `stream`: stop strings, numbers of tokens, log probabilities."""

import contextlib
import dataclasses
import functools
import random

import keras
import numpy as np
import pytest

from keras_recurrent.generation.sequence import Sequence
from keras_recurrent.generation.text import StopFilter, StreamedText
from keras_recurrent.models import HGRN2CausalLMPreprocessor, SamplingParams
from keras_recurrent.serving import Engine
from keras_recurrent.tokenizers import ByteTokenizer
from tests.generation.numpy_sampling import log_softmax
from tests.generation.tokens import assert_caches_close, pad
from tests.models.tiny import (
    NIGHTLY_IF_COMPILED,
    forward,
    nightly_on_tensorflow,
    tiny_causal_lm,
)

BACKEND = keras.config.backend()
LETTERS = {3 + byte: 100.0 for byte in b"abcd"}
PROMPTS, NEW = ["ab", "abcde"], 24
SAMPLING = [SamplingParams(seed=seed, logit_bias=LETTERS) for seed in (1, 2)]


@pytest.fixture(scope="module")
def model():
    """Model of bytes, which generates random letters from a to d with `LETTERS`."""
    preprocessor = HGRN2CausalLMPreprocessor(ByteTokenizer(), sequence_length=32)
    model = tiny_causal_lm(
        preprocessor=preprocessor, family="hgrn2", num_layers=1, vocabulary_size=259
    )
    model.compile(sampler="greedy")
    return model


@pytest.fixture(scope="module")
def texts(model):
    """New texts without stop strings."""
    arguments = {"max_new_tokens": NEW, "sampling": SAMPLING, "strip_prompt": True}
    return model.generate(PROMPTS, **arguments)


def generate(model, **options):
    logprobs = [dataclasses.replace(params, logprobs=0) for params in SAMPLING]
    arguments = {"max_new_tokens": NEW, "sampling": logprobs, "strip_prompt": True}
    return model.generate(PROMPTS, **{**arguments, **options})


@pytest.mark.once
def test_stop_filter_matches_a_search_of_the_whole_text():
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


def test_max_new_tokens_and_max_length_apply_to_each_prompt(model, texts):
    """The limit of a prompt depends on the length of another one."""
    assert [len(text) for text in texts] == [NEW, NEW]
    found = generate(model, max_length=20)
    lengths = [20 - 1 - len(prompt) for prompt in PROMPTS]  # the start token counts
    assert found.texts == [text[:n] for text, n in zip(texts, lengths, strict=True)]
    assert found.finish_reason == ["length", "length"]


def assert_cache_after(model, cache, prompts, texts):
    """Asserts that a cache has the tokens and state after the prompts and new texts."""
    whole = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
    assert_caches_close(cache, model.prefill(whole))


def run_ahead(monkeypatch):
    """Makes the host decode as for an accelerator."""
    names = ["torch_batch"] if BACKEND == "torch" else ["xla_batch", "xla_programs"]
    for name in names:
        monkeypatch.setattr(f"keras_recurrent.generation.{name}.runs_ahead", lambda model: True)


@pytest.mark.parametrize("as_on_gpu", [False, True] if BACKEND == "torch" else [False])
def test_cache_while_device_is_ahead_has_state_of_its_tokens(model, texts, as_on_gpu, monkeypatch):
    """A cache contains tokens that the device has computed ahead, or a later step changes it."""
    if as_on_gpu:
        run_ahead(monkeypatch)
    stream = model.stream(PROMPTS, max_new_tokens=NEW, sampling=SAMPLING)
    caches = []
    for _ in range(5):
        next(stream)
        caches.append(stream.cache)
    shown = ["".join(column) for column in zip(*stream, strict=True)]
    assert shown == [text[5:] for text in texts]
    for count, cache in enumerate(caches, 1):
        assert_cache_after(model, cache, PROMPTS, [text[:count] for text in texts])
    assert_cache_after(model, stream.cache, PROMPTS, texts)
    for count in (11, 12, NEW):  # the first and the last token of a step, and of all steps
        stop = texts[0][count - 5 : count]
        assert texts[0].find(stop) == count - 5
        assert stop not in texts[1]
        found = generate(model, stop=stop, return_cache=True)
        assert found.texts == [texts[0][: count - 5], texts[1]]
        assert_cache_after(model, found.cache, PROMPTS, [texts[0][:count], texts[1]])


NUM_MIXED = 11  # of new tokens: the last step of an accelerator has one less than others
MIXED = {
    "ab": SamplingParams(temperature=0, logit_bias=LETTERS, logprobs=0),
    "abcde": SamplingParams(seed=1, logit_bias=LETTERS, logprobs=2),
    "c": SamplingParams(seed=2, logit_bias=LETTERS, frequency_penalty=0.9, logprobs=0),
}


@pytest.fixture(scope="module")
def alone(model):
    """Output for each of three prompts alone, with the settings of CPUs."""
    options = {"max_new_tokens": NUM_MIXED, "stop_token_ids": None, "strip_prompt": True}
    return [model.generate(p, sampling=params, **options) for p, params in MIXED.items()]


@nightly_on_tensorflow
@pytest.mark.parametrize("return_cache", [False, True])
@pytest.mark.parametrize("end", ["length", "stop token", "stop string"])
def test_accelerator_settings_generate_tokens_of_prompts_alone(
    model, alone, end, return_cache, monkeypatch
):
    """A step that runs ahead drops or exchanges tokens, or changes the state of an ended one."""
    run_ahead(monkeypatch)
    texts = [output.texts for output in alone]
    stop = {"length": "none", "stop token": max(texts[1], key=texts[1].find)}.get(
        end, texts[1][4:7]
    )
    counts = [t.find(stop) + len(stop) if stop in t else NUM_MIXED for t in texts]
    assert (min(counts) < NUM_MIXED) == (end != "length")
    found = model.generate(
        list(MIXED),
        max_new_tokens=NUM_MIXED,
        stop_token_ids=(3 + ord(stop),) if end == "stop token" else None,
        stop=stop if end == "stop string" else None,
        sampling=list(MIXED.values()),
        return_cache=return_cache,
        strip_prompt=True,
    )
    assert found.token_ids == [
        output.token_ids[0][:count] for output, count in zip(alone, counts, strict=True)
    ]
    # The text of an ordinary stop token remains, unlike a stop string.
    shown = [
        t.partition(stop)[0] if end == "stop string" else t[:n]
        for t, n in zip(texts, counts, strict=True)
    ]
    assert found.texts == shown
    reasons = ["stop" if stop in text else "length" for text in texts]
    assert found.finish_reason == reasons
    for row, output in zip(found.logprobs, alone, strict=True):
        for new, expected in zip(row, output.logprobs[0], strict=False):
            assert abs(new.logprob - expected.logprob) < 1e-4
            assert list(new.top) == list(expected.top)
    if return_cache:
        new = [text[:count] for text, count in zip(texts, counts, strict=True)]
        assert_cache_after(model, found.cache, list(MIXED), new)


RANDOM_OPTIONS = [
    {"temperature": 0},
    {"temperature": 1.2},
    {"temperature": 0.8, "top_k": 3},
    {"top_p": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_new_tokens": 6},
]


@pytest.mark.parametrize("seed", [pytest.param(n, marks=NIGHTLY_IF_COMPILED) for n in range(4)])
def test_random_batches_and_streams_answer_as_prompts_alone(model, seed):
    """A sequence ends at the wrong token, or depends on others in its batch."""
    rng = random.Random(seed)
    prompts = ["".join(rng.choices("abcd", k=rng.randint(1, 20))) for _ in range(3)]
    shared = {"logit_bias": LETTERS, "logprobs": 2}
    sampling = [
        SamplingParams(**rng.choice(RANDOM_OPTIONS), **shared, seed=rng.randrange(2**64))
        for _ in prompts
    ]
    options = {
        "max_new_tokens": rng.randint(1, 20),
        "stop": rng.choice([None, "ab", ["bca", "dd"]]),
        "stop_token_ids": rng.choice([None, "auto", (3 + ord("c"), 1, 2, 3, 4, 5)]),
        "strip_prompt": True,
    }
    alone = [
        model.generate(prompt, sampling=params, **options)
        for prompt, params in zip(prompts, sampling, strict=True)
    ]
    found = model.generate(prompts, sampling=sampling, **options)
    del options["strip_prompt"]
    stream = model.stream(prompts, sampling=sampling, **options)
    assert ["".join(column) for column in zip(*stream, strict=True)] == found.texts
    output = stream.output
    assert (output.texts, output.token_ids) == (found.texts, found.token_ids)
    assert output.finish_reason == found.finish_reason
    assert found.texts == [output.texts for output in alone]
    assert found.token_ids == [output.token_ids[0] for output in alone]
    assert found.finish_reason == [output.finish_reason[0] for output in alone]
    expected = [output.logprobs[0] for output in alone]
    for row, streamed, of_row in zip(found.logprobs, output.logprobs, expected, strict=True):
        for each in zip(row, streamed, of_row, strict=True):
            logprobs = [new.logprob for new in each]
            np.testing.assert_allclose(logprobs, logprobs[-1], rtol=0, atol=1e-4)


def test_generate_with_n_answers_processes_prompts_once(model, texts, monkeypatch):
    """Answers to a prompt are equal, differ from those to repeated prompts, or cost a prompt each.

    Also: a stream, a stop string or the cache of the answers belongs to another answer.
    """
    programs, sizes = model._programs(), []
    prefill = programs.prefill
    monkeypatch.setattr(
        programs, "prefill", lambda *args: sizes.append(len(args[1])) or prefill(*args)
    )
    sampling = [dataclasses.replace(p, n=n) for p, n in zip(SAMPLING, (3, 2), strict=True)]
    found, cache = generate(model, sampling=sampling, return_cache=True)
    assert sizes == [2]
    assert [found[0], found[3]] == texts
    assert len(set(found)) == 5
    greedy = {"sampling": SamplingParams(temperature=0), "strip_prompt": True, "max_new_tokens": 4}
    repeated = [p + t for p, t in zip([PROMPTS[0]] * 3 + [PROMPTS[1]] * 2, found, strict=True)]
    assert model.generate(cache=cache, **greedy) == model.generate(repeated, **greedy)
    stop = found[1][6:9]
    stream = model.stream(PROMPTS[0], max_new_tokens=NEW, sampling=sampling[0], stop=stop)
    chunks = [*zip(*stream, strict=True)]
    assert ["".join(chunk) for chunk in chunks] == [text.partition(stop)[0] for text in found[:3]]
    assert stream.output.texts == ["".join(chunk) for chunk in chunks]
    with pytest.raises(ValueError, match="`sampling` must have n=1 for messages"):
        model.stream([{"role": "user", "content": "a"}], sampling=sampling[0])


def test_logprobs_match_a_forward_pass(model, texts):
    """A log probability is of another token or sequence, or after options of sampling."""
    sampling = [dataclasses.replace(SAMPLING[0], logprobs=3), SAMPLING[1]]
    found = model.generate(PROMPTS, max_new_tokens=NEW, sampling=sampling)
    assert found.logprobs[1] == []
    tokens = np.array([[1, *(3 + ord(c) for c in PROMPTS[0] + texts[0])]], "int32")
    logits = forward(model, tokens, np.ones_like(tokens, bool))[0, len(PROMPTS[0]) : -1]
    for new, row in zip(found.logprobs[0], logits.astype("float64"), strict=True):
        expected = log_softmax(row)
        assert abs(new.logprob - expected[new.token_id]) < 1e-4
        assert list(new.top) == np.argsort(-expected)[:3].tolist()
        np.testing.assert_allclose(list(new.top.values()), expected[list(new.top)], atol=1e-4)


@pytest.mark.once
@pytest.mark.parametrize("errors", ["replace", "strict"])
def test_stop_strings_are_found_at_their_last_token(errors):
    """A stop string that begins or ends inside a token's text is missed, or stays in the text."""
    rng = np.random.default_rng(0)
    preprocessor = HGRN2CausalLMPreprocessor(ByteTokenizer(errors=errors))
    strings = ("ab€", "éé", "a" * 5)
    for _ in range(20):
        data = "".join(rng.choice(list("aab€é"), size=40)).encode()
        streamed = StreamedText(preprocessor, 99, strings)
        options = SamplingParams(temperature=0), None, len(data)
        sequence = Sequence(np.array([99]), *options, listener=streamed.listen)
        while sequence.finish_reason is None:
            sequence.add(3 + data[len(sequence.token_ids)])
        counts = [n for n in range(len(data)) for s in strings if s.encode() in data[: n + 1]]
        count = min(counts, default=len(data) - 1) + 1
        assert sequence.token_ids == [3 + byte for byte in data[:count]]
        assert sequence.finish_reason == ("stop" if counts else "length")
        whole = data[:count].decode()
        starts = [whole.find(s) for s in strings if s in whole]
        assert streamed.shown == whole[: min(starts, default=None)]
        assert streamed.num_cut() == (len(whole) - min(starts) if starts else 0)


@pytest.mark.once
@pytest.mark.parametrize(
    ("options", "words"),
    [
        *[({"stop": s}, "must be a string, or a list of") for s in ("", [], ["a", ""], [1])],
        *[({"max_new_tokens": n}, "must be an integer, at least 1") for n in (0, 2.5)],
        *[
            ({name: 2**40}, "must be at most 2147483647")
            for name in ("max_length", "max_new_tokens")
        ],
        ({"stop": ["a"] * 17}, "must have at most 16 strings of at most 1024 .*; got 17"),
        ({"stop": "a" * 1025}, "must have at most 16 strings .* got 1, the longest of 1025"),
        ({"stop": ["a", "\ud800"]}, "must be valid Unicode"),
    ],
)
def test_options_out_of_range_raise(model, options, words):
    """Stop strings slow down each token of all requests, or an error does not name the option."""
    (name,) = options
    for method in (model.generate, model.stream):
        with pytest.raises(ValueError, match=f"`{name}` {words}"):
            method("a", **options)


@pytest.mark.once
@pytest.mark.parametrize("family", ["lfm2", "mamba_hybrid"])
def test_generation_beyond_trained_positions_warns_unless_the_limit_is_removed(family, tmp_path):
    """Text becomes nonsense without a word, or the limit of a checkpoint is lost in a preset."""
    model = tiny_causal_lm(family=family, num_layers=1, max_position_embeddings=6)
    model.save_to_preset(str(tmp_path))
    load = functools.partial(type(model).from_preset, str(tmp_path), preprocessor=None)
    prompt = {name: np.ones((1, 3), "int32") for name in ("token_ids", "padding_mask")}
    for options, is_limited in (({}, True), ({"max_position_embeddings": None}, False)):
        model = load(**options)
        model.compile(sampler="greedy")
        model.generate(prompt, max_length=6, stop_token_ids=None)
        for start in (
            functools.partial(model.generate, prompt, stop_token_ids=None),
            functools.partial(Engine, model, 1),
        ):
            match = "trained for positions of up to 6 tokens.*have 7"
            with pytest.warns(UserWarning, match=match) if is_limited else contextlib.nullcontext():
                start(max_length=7)


@pytest.mark.once
def test_unknown_option_or_stop_without_a_preprocessor_raises_an_error_with_a_remedy(model):
    """An option of another package is an error without a remedy."""
    for method in (model.generate, model.stream, model.chat):
        for options, words in (
            ({"temperature": 0.5}, r"`sampling=SamplingParams\(temperature=0\.5\)`"),
            ({"min_tokens": 3}, r"`sampling=SamplingParams\(min_new_tokens=3\)`"),
            ({"max_tokens": 3}, "Pass `max_new_tokens`"),
            ({"other": 3}, "has no argument `other`. Its arguments are .*`stop_token_ids`"),
        ):
            with pytest.raises(TypeError, match=words):
                method("a", **options)
    with pytest.raises(ValueError, match="`stop` needs a preprocessor"):
        type(model)(model.backbone).generate(pad([[1, 1]]), stop_token_ids=None, stop="a")
    with pytest.raises(TypeError, match=r"`prefill` has no argument `top_k`.*to `generate`"):
        model.prefill("a", top_k=3)
    for options, words in (
        ({"stop": "a"}, "`SamplingParams` has no argument `stop`. Pass `stop` to `generate`"),
        ({"max_tokens": 3}, "Pass `max_new_tokens` to `generate`"),
        ({"min_tokens": 3}, "Pass `min_new_tokens`."),
        (
            {"best_of": 3},
            "`SamplingParams` has no argument `best_of`. Its arguments are `temperature`",
        ),
    ):
        with pytest.raises(TypeError, match=words):
            SamplingParams(**options)


@pytest.mark.once
@pytest.mark.parametrize("method", ["generate", "stream", "prefill"])
def test_prompt_with_surrogates_raises(model, method):
    """A lone surrogate raises an error of the tokenizer that does not name the argument."""
    with pytest.raises(ValueError, match=r"`inputs` must be valid Unicode.*position 1"):
        getattr(model, method)(["b", "a\ud800"])
