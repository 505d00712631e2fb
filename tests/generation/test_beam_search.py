"""Beam search: its options, limits and results, against plain forward passes."""

import keras
import keras_hub
import numpy as np
import pytest

from keras_recurrent import which_generation
from keras_recurrent.generation import beam_search
from keras_recurrent.models import SamplingParams
from keras_recurrent.samplers import BeamSampler
from tests.generation.test_programs import prompts
from tests.generation.test_text import text_model
from tests.models import plain_generation
from tests.models.test_generation import MARGIN
from tests.models.tiny import VOCABULARY, tiny_causal_lm

BACKEND = keras.config.backend()
LENGTHS, TOTAL, STOPS = (3, 9, 6), 14, (3, 9, 53, 20)


@pytest.fixture(scope="module")
def model():
    return tiny_causal_lm(family="hgrn2", num_layers=1)


@pytest.fixture(scope="module")
def plain():
    """Another instance of the model, whose forward pass is compiled once."""
    return tiny_causal_lm(family="hgrn2", num_layers=1)


def given():
    return prompts(LENGTHS, TOTAL, seed=4)


def search(model, x=None, *, num_beams=3, run_eagerly=False, max_new_tokens=None, **options):
    sampler = BeamSampler(num_beams, return_all_beams=True, **options)
    model.compile(sampler=sampler, run_eagerly=run_eagerly)
    x = given() if x is None else x
    return model.generate(x, stop_token_ids=STOPS * 2, max_new_tokens=max_new_tokens)


RULES = {
    "at once": {"early_stopping": True},
    "never": {"early_stopping": "never"},
    "sums": {"length_penalty": 0.0},
    "long, few new tokens": {"length_penalty": 2.0, "max_new_tokens": 4},
    "short, eager": {"length_penalty": -1.0, "early_stopping": True, "run_eagerly": True},
}


@pytest.mark.parametrize("case", RULES)
def test_rules_and_limits(model, plain, case):
    """Fails if a rule is not that of transformers, or a row has the length or end of another."""
    rules = RULES[case]
    limit = rules.get("max_new_tokens")
    limits = limit and np.minimum(np.add(LENGTHS, limit), TOTAL)
    numbers = rules.get("length_penalty", 1.0), rules.get("early_stopping", False)
    x = given()
    wanted, margin = plain_generation.beam(plain, 3, *x.values(), STOPS, limits, *numbers)
    assert margin > MARGIN
    output = search(model, x, **rules)
    assert output.token_ids == [[tokens for _, tokens in row] for row in wanted]
    scores = [[score for score, _ in row] for row in wanted]
    np.testing.assert_allclose(output.scores, scores, atol=1e-4)
    reasons = [["stop" if ids[-1] in STOPS else "length" for _, ids in row] for row in wanted]
    assert output.finish_reason == reasons
    mode = which_generation(model).name
    assert (mode == "eager") == ("run_eagerly" in rules)
    assert BACKEND == "torch" or mode in ("eager", "program")


@pytest.mark.once
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
        plain = plain_generation.search_of_one(num_beams, size, stop_ids, 1.0, early_stopping)
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


@pytest.mark.skipif(BACKEND == "torch", reason="torch compiles no search")
def test_other_rules_and_stop_tokens_run_the_same_program(model, monkeypatch):
    search(model)
    monkeypatch.setattr(beam_search, "search", None)
    monkeypatch.setattr(model, "compile", lambda sampler, **_: setattr(model, "sampler", sampler))
    found = [search(model, **rules) for rules in RULES.values() if "run_eagerly" not in rules]
    assert len({str(output.token_ids) for output in found}) == len(found)


@pytest.mark.once
def test_one_beam_is_greedy_and_few_sequences_leave_beams_empty(model):
    output = search(model, num_beams=1)
    model.compile(sampler="greedy")
    sampling = SamplingParams(temperature=0, logprobs=0)
    greedy = model.generate(given(), stop_token_ids=STOPS, sampling=sampling)
    assert [row[0] for row in output.token_ids] == greedy.token_ids
    means = [np.mean([t.logprob for t in row]) for row in greedy.logprobs]
    np.testing.assert_allclose(np.ravel(output.scores), means, atol=1e-5)
    output = search(model, num_beams=VOCABULARY + 9, max_new_tokens=1)
    assert [sorted(ids for (ids,) in row) for row in output.token_ids] == [[*range(VOCABULARY)]] * 3
    np.testing.assert_allclose(np.exp(output.scores).sum(axis=1), 1, atol=1e-5)


@pytest.mark.once
@pytest.mark.parametrize("family", ["griffin", "hgrn2"])
def test_caches_before_and_after(family):
    """Fails if a cache is that of another beam, or contains a token twice or never."""
    model = tiny_causal_lm(family=family)
    rows, limit = given(), {"max_length": 64} if family == "griffin" else {}
    length = min(LENGTHS)
    first = {name: array[:, :length] for name, array in rows.items()}
    rest = {name: array[:, length:] for name, array in rows.items()}
    model.compile(sampler=BeamSampler(3))
    cache = model.prefill(first, **limit)
    with_cache, cache = model.generate(rest, None, STOPS, cache=cache, return_cache=True)
    whole, after = model.generate(rows, TOTAL, STOPS, return_cache=True)
    mask = np.asarray(whole["padding_mask"])
    np.testing.assert_array_equal(np.asarray(with_cache["padding_mask"]), mask[:, length:])
    np.testing.assert_array_equal(with_cache["token_ids"], whole["token_ids"][:, length:])
    wanted = model.prefill(whole, **limit)
    for found in (cache, after):
        for ids, expected in zip(found.token_ids, wanted.token_ids, strict=True):
            np.testing.assert_array_equal(ids, expected)
        arrays = (keras.tree.flatten(each.state) for each in (found, wanted))
        for pair in zip(*arrays, strict=True):
            np.testing.assert_allclose(*map(keras.ops.convert_to_numpy, pair), atol=1e-4)


@pytest.mark.once
def test_texts_of_all_beams():
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


@pytest.mark.once
def test_all_beams_of_a_dataset(model):
    """Fails if results of several batches are concatenated as texts."""
    tf = pytest.importorskip("tensorflow")
    model.compile(sampler=BeamSampler(3, return_all_beams=True))
    x = given()
    dataset = tf.data.Dataset.from_tensor_slices(x).batch(2)
    found, wanted = (model.generate(i, TOTAL, STOPS) for i in (dataset, x))
    assert found.token_ids == wanted.token_ids
    assert found.finish_reason == wanted.finish_reason
    assert (found.texts, len(found.scores), len(found.logprobs)) == (None, 3, 3)


@pytest.mark.once
def test_names_and_samplers_of_keras_hub_mean_it(model):
    for sampler, expected in (
        ("beam", BeamSampler()),
        (keras_hub.samplers.BeamSampler(4), BeamSampler(4)),
        (BeamSampler(2, length_penalty=0.5, early_stopping="never"), None),
    ):
        model.compile(sampler=sampler)
        again = tiny_causal_lm(family="hgrn2", num_layers=1)
        again.compile_from_config(model.get_compile_config()["config"])
        for found in (model.sampler, again.sampler):
            assert isinstance(found, BeamSampler)
            assert found.get_config() == (expected or sampler).get_config()


class Subclass(keras_hub.samplers.BeamSampler):
    """A beam search of a user, in the loop of KerasHub."""


@pytest.mark.once
def test_what_beam_search_cannot_do_is_refused(model):
    for arguments, words in (
        ({"num_beams": 0}, "`num_beams` must be an integer, at least 1; got 0"),
        ({"length_penalty": np.nan}, "`length_penalty` must be a finite number; got nan"),
        ({"early_stopping": "always"}, "`early_stopping` must be .*; got 'always'"),
        ({"return_all_beams": 1}, "`return_all_beams` must be True or False"),
    ):
        with pytest.raises(ValueError, match=words):
            BeamSampler(**arguments)
    for sampler, words in (
        (keras_hub.samplers.BeamSampler(temperature=0.5), "`temperature` of BeamSampler must be 1"),
        (Subclass(), "must not be of a subclass .* got a Subclass"),
    ):
        with pytest.raises(ValueError, match=words):
            model.compile(sampler=sampler)
    with pytest.raises(ValueError, match="works in `generate`"):
        BeamSampler()(None, None)
    model.compile(sampler="beam")
    with pytest.raises(ValueError, match="`stream` cannot be combined with beam search"):
        model.stream(given(), stop_token_ids=None)
    with pytest.raises(ValueError, match=r"`sampling` cannot be combined with .* BeamS"):
        model.generate(given(), stop_token_ids=None, sampling=SamplingParams())
    model = text_model()
    model.compile(sampler="beam")
    with pytest.raises(ValueError, match="`stop` cannot be combined with beam search"):
        model.generate("ab", stop="c")
