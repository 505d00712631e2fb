"""Beam search: options, limits and results, compared with plain forward passes."""

import keras
import keras_hub
import numpy as np
import pytest

from keras_recurrent import which_generation
from keras_recurrent.generation import beam_search
from keras_recurrent.models import SamplingParams
from keras_recurrent.samplers import BeamSampler
from tests.generation.test_text import text_model
from tests.generation.tokens import assert_caches_close, pad, random_prompts, unpad
from tests.models import plain_generation
from tests.models.test_generation import MARGIN
from tests.models.tiny import VOCABULARY, tiny_causal_lm

pytestmark = pytest.mark.once
BACKEND = keras.config.backend()
LENGTHS, TOTAL, STOPS = (3, 9, 6), 14, (3, 9, 53, 20)
PROMPTS = random_prompts(LENGTHS, seed=4)


@pytest.fixture(scope="module")
def model():
    return tiny_causal_lm(family="hgrn2", num_layers=1)


@pytest.fixture(scope="module")
def plain():
    """Another instance of the model, whose forward pass is compiled once."""
    return tiny_causal_lm(family="hgrn2", num_layers=1)


def search(model, *, num_beams=3, run_eagerly=False, max_new_tokens=None, **options):
    sampler = BeamSampler(num_beams, return_all_beams=True, **options)
    model.compile(sampler=sampler, run_eagerly=run_eagerly)
    inputs = pad(PROMPTS, TOTAL)
    return model.generate(inputs, stop_token_ids=STOPS * 2, max_new_tokens=max_new_tokens)


RULES = {
    "at once": {"early_stopping": True},
    "never": {"early_stopping": "never"},
    "sums": {"length_penalty": 0.0},
    "long, few new tokens": {"length_penalty": 2.0, "max_new_tokens": 4},
    "short, eager": {"length_penalty": -1.0, "early_stopping": True, "run_eagerly": True},
}


@pytest.mark.every_backend
@pytest.mark.parametrize("case", RULES)
def test_search_matches_beam_search_of_transformers(model, plain, case):
    """A stopping rule or a score differs, or a prompt has the length or end of another one."""
    options = RULES[case]
    limit = options.get("max_new_tokens")
    limits = limit and np.minimum(np.add(LENGTHS, limit), TOTAL)
    rules = options.get("length_penalty", 1.0), options.get("early_stopping", False)
    inputs = pad(PROMPTS, TOTAL).values()
    expected, margin = plain_generation.beam(plain, 3, *inputs, STOPS, limits, *rules)
    assert margin > MARGIN
    output = search(model, **options)
    assert output.token_ids == [[tokens for _, tokens in row] for row in expected]
    scores = [[score for score, _ in row] for row in expected]
    np.testing.assert_allclose(output.scores, scores, atol=1e-4)
    reasons = [["stop" if ids[-1] in STOPS else "length" for _, ids in row] for row in expected]
    assert output.finish_reason == reasons
    mode = which_generation(model).name
    assert (mode == "eager") == ("run_eagerly" in options)
    assert BACKEND == "torch" or mode in ("eager", "program")


@pytest.mark.parametrize("early_stopping", beam_search.EARLY_STOPPING)
def test_search_of_random_logits_finds_the_sequences_of_transformers(early_stopping):
    """A search ends too early or too late, which few models with real weights show."""
    num_searches, num_beams, size, stop_ids = 40, 3, 6, [1, 3]
    rng, convert = np.random.default_rng(0), keras.ops.convert_to_tensor
    tables = rng.normal(scale=2, size=(num_searches, size, 7, 7)).astype("float32")
    zeros = convert(np.zeros((num_searches, 1), "int32"))

    def step(token, mask, cache):
        """Looks up the logits of a position and the last token."""
        table, position = cache
        rows = keras.ops.reshape(table, (len(position), -1, 7))
        index = 7 * position + token
        return keras.ops.take_along_axis(rows, index[:, :, None], axis=1), (table, position + 1)

    found = beam_search.search(
        *(step, (convert(tables), zeros), zeros),
        *(convert(np.full(num_searches, size, "int32")), convert(np.array(stop_ids, "int32"))),
        *(1.0, beam_search.EARLY_STOPPING.index(early_stopping), num_beams, size),
    )
    tokens, counts = (keras.ops.convert_to_numpy(x) for x in (found.tokens, found.counts))
    log_p = plain_generation.log_softmax(tables.astype("float64"))
    for table, row, lengths in zip(log_p, tokens, counts, strict=True):
        plain = plain_generation.beam_search(num_beams, size, stop_ids, 1.0, early_stopping)
        running, result = next(plain), None
        while result is None:
            try:
                running = plain.send([table[len(ids), ids[-1] if ids else 0] for _, ids in running])
            except StopIteration as end:
                result = end.value
        ended, margin = result
        assert margin > 1e-5
        assert [ids[:n].tolist() for ids, n in zip(row, lengths, strict=True)] == [
            ids for _, ids in ended
        ]


@pytest.mark.every_backend
@pytest.mark.skipif(BACKEND == "torch", reason="torch compiles no search")
def test_rules_and_stop_tokens_share_a_program(model, monkeypatch):
    """Each value of a rule is compiled."""
    search(model)
    monkeypatch.setattr(beam_search, "search", None)
    monkeypatch.setattr(model, "compile", lambda sampler, **_: setattr(model, "sampler", sampler))
    found = [search(model, **rules) for rules in RULES.values() if "run_eagerly" not in rules]
    assert len({str(output.token_ids) for output in found}) == len(found)


def test_search_with_more_beams_than_tokens_finds_all_tokens(model):
    output = search(model, num_beams=VOCABULARY + 9, max_new_tokens=1)
    assert [sorted(ids for (ids,) in row) for row in output.token_ids] == [[*range(VOCABULARY)]] * 3
    np.testing.assert_allclose(np.exp(output.scores).sum(axis=1), 1, atol=1e-5)


@pytest.mark.parametrize("family", ["griffin", "hgrn2"])
def test_beam_search_from_a_cache_matches_one_call(family):
    """A cache has the state of another beam, or contains a token twice or never."""
    model = tiny_causal_lm(family=family)
    rows, limit = pad(PROMPTS, TOTAL), {"max_length": 64} if family == "griffin" else {}
    length = min(LENGTHS)
    first = {name: array[:, :length] for name, array in rows.items()}
    rest = {name: array[:, length:] for name, array in rows.items()}
    model.compile(sampler=BeamSampler(3))
    cache = model.prefill(first, **limit)
    with_cache, cache = model.generate(rest, None, STOPS, cache=cache, return_cache=True)
    whole, after = model.generate(rows, TOTAL, STOPS, return_cache=True)
    for name in ("token_ids", "padding_mask"):
        np.testing.assert_array_equal(with_cache[name], np.asarray(whole[name])[:, length:])
    expected = model.prefill(whole, **limit)
    for found in (cache, after):
        assert_caches_close(found, expected)


def test_texts_of_all_beams_are_lists_for_each_prompt():
    model = text_model()
    model.compile(sampler=BeamSampler(2, return_all_beams=True))
    texts = ["ab", "abcd"]
    output, cache = (model.generate(texts, max_new_tokens=4, return_cache=c) for c in (False, True))
    assert output.cache is None
    assert cache.cache.batch_size == 2
    short = model.generate(texts, max_new_tokens=4, strip_prompt=True).texts
    assert output.texts == [[p + t for t in row] for p, row in zip(texts, short, strict=True)]
    assert [len(row) for row in output.texts] == [2, 2]
    single = model.generate("abcd", max_new_tokens=4)
    assert single.texts == output.texts[1]
    assert single.token_ids == output.token_ids[1:]
    model.compile(sampler=BeamSampler(2))
    assert model.generate(texts, max_new_tokens=4) == [row[0] for row in output.texts]


@pytest.mark.parametrize("return_all_beams", [False, True])
def test_beam_search_on_a_dataset_matches_one_batch(model, return_all_beams):
    """`max_length` has no effect on the batches of a dataset, or their results are lost."""
    tf = pytest.importorskip("tensorflow")
    model.compile(sampler=BeamSampler(3, return_all_beams=return_all_beams))
    inputs = pad(PROMPTS, TOTAL)
    dataset = tf.data.Dataset.from_tensor_slices(inputs).batch(2)
    found, expected = (model.generate(x, 13, STOPS) for x in (dataset, inputs))
    if return_all_beams:
        assert found.token_ids == expected.token_ids
        assert found.finish_reason == expected.finish_reason
        assert (found.texts, len(found.scores), len(found.logprobs)) == (None, 3, 3)
    else:
        assert unpad(found) == unpad(expected)


def test_compile_converts_and_saves_beam_samplers(model):
    """The name "beam", KerasHub's class or a saved model has another search."""
    for sampler, expected in (
        ("beam", BeamSampler()),
        (keras_hub.samplers.BeamSampler(4), BeamSampler(4)),
        (BeamSampler(2, length_penalty=0.5, early_stopping="never"), None),
    ):
        model.compile(sampler=sampler)
        other = tiny_causal_lm(family="hgrn2", num_layers=1)
        other.compile_from_config(model.get_compile_config()["config"])
        for found in (model.sampler, other.sampler):
            assert isinstance(found, BeamSampler)
            assert found.get_config() == (expected or sampler).get_config()


class Subclass(keras_hub.samplers.BeamSampler):
    """A beam search of a user."""


def test_options_that_beam_search_does_not_support_raise(model):
    for arguments, words in (
        ({"num_beams": 0}, "`num_beams` must be an integer, at least 1; got 0"),
        ({"length_penalty": np.nan}, "`length_penalty` must be a finite number; got nan"),
        ({"early_stopping": "always"}, "`early_stopping` must be .*; got 'always'"),
        ({"return_all_beams": 1}, "`return_all_beams` must be True or False"),
    ):
        with pytest.raises(ValueError, match=words):
            BeamSampler(**arguments)
    texts, prompts = text_model(), pad(PROMPTS)
    for each in (model, texts):
        each.compile(sampler="beam")
    sampler = keras_hub.samplers.BeamSampler(temperature=0.5)
    for call, words in (
        (lambda: model.compile(sampler=sampler), "`temperature` of BeamSampler must be 1"),
        (lambda: model.compile(sampler=Subclass()), "must not be of a subclass .* got a Subclass"),
        (lambda: BeamSampler()(None, None), "works in `generate`"),
        (lambda: model.stream(prompts), "`stream` cannot be combined with beam search"),
        (
            lambda: model.generate(prompts, 20, None, sampling=SamplingParams()),
            "`sampling` cannot be combined with .* BeamS",
        ),
        (lambda: texts.generate("ab", stop="c"), "`stop` cannot be combined with beam search"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
