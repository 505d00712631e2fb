"""Generation caches: a call that continues from a cache matches one call without a cache."""

import itertools

import keras
import keras_hub
import numpy as np
import pytest

import keras_recurrent
from keras_recurrent.models import GenerationCache, SamplingParams
from tests.generation.test_text import text_model
from tests.generation.tokens import assert_caches_close, pad, random_prompts, to_arrays, unpad
from tests.models import tiny
from tests.models.tiny import (
    FEWER_LAYERS,
    VOCABULARY,
    nightly_on_tensorflow,
    shared_by_families,
    tiny_causal_lm,
)

BACKEND = keras.config.backend()
# One family with KV caches and one without; JAX and TensorFlow have one in all.
two_families = pytest.mark.parametrize("model", tiny.SHARED[:2], indirect=True, scope="module")
MAX_LENGTH = 64  # of the KV caches, as `generate` chooses for short sequences


@pytest.fixture(scope="module", params=tiny.SHARED)
def model(request):
    model = tiny_causal_lm(family=request.param, **FEWER_LAYERS)
    model.compile(sampler="greedy")
    return model


def prefill(model, rows, **options):
    if not model.backbone.keeps_state and "cache" not in options:
        options["max_length"] = MAX_LENGTH
    return model.prefill(pad(rows), **options)


def generate(model, rows, count, stop_token_ids=None, **options):
    """Returns the prompts, continued to `count` tokens; with `return_cache`, also the cache."""
    found = model.generate(pad(rows, count), stop_token_ids=stop_token_ids, **options)
    return (unpad(found[0]), found[1]) if options.get("return_cache") else unpad(found)


def continue_cache(model, cache, count, **options):
    """Returns `count` more tokens of each sequence; with `return_cache`, also the cache."""
    found = model.generate(None, count, None, cache=cache, **options)
    return (unpad(found[0]), found[1]) if options else unpad(found)


def concatenate(*parts):
    """Concatenates the token ids of each sequence."""
    return [list(itertools.chain(*row)) for row in zip(*parts, strict=True)]


def collect_tokens(stream):
    """Returns the token ids of each sequence of a stream."""
    return [[token for token in row if token is not None] for row in zip(*stream, strict=True)]


def make_other_model(model, **options):
    """Returns a model of the same family with other weights."""
    family = next(name for name, row in tiny.FAMILIES.items() if isinstance(model, row.causal_lm))
    other = tiny_causal_lm(family=family, **{"seed": 1, **FEWER_LAYERS, **options})
    other.compile(sampler="greedy")
    return other


def test_generate_from_a_cache_matches_one_call(model):
    """A continuation drops or repeats a token, or a returned cache lacks the last token."""
    prompts = random_prompts()
    expected, _ = generate(model, prompts, 20, return_cache=True)
    rows, cache = generate(model, prompts, 12, return_cache=True)
    for count in (1, 3, 4):
        np.testing.assert_array_equal(cache.num_tokens, [len(row) for row in rows])
        np.testing.assert_array_equal(cache.last_token, [row[-1] for row in rows])
        assert_caches_close(cache, prefill(model, rows))
        new, cache = continue_cache(model, cache, count, return_cache=True)
        rows = concatenate(rows, new)
    assert rows == expected


@nightly_on_tensorflow
@two_families
def test_cache_is_not_changed_by_calls_that_continue_it(model):
    """Two streams and a call from one cache overwrite its state, or the state of each other."""
    prompt = random_prompts((4,))
    cache = prefill(model, prompt)
    expected = generate(model, prompt, 14)[0][4:]
    other = generate(model, [prompt[0] + [7]], 15)[0][5:]
    first = model.stream(None, 10, None, cache=cache)
    second = model.stream(pad([[7]], 11), stop_token_ids=None, cache=cache)
    tokens, caches = ([], []), [(cache, to_arrays(cache))]
    for _ in range(10):
        for new, stream in zip(tokens, (first, second), strict=True):
            new.extend(next(stream))
        caches.append((first.cache, to_arrays(first.cache)))
        continue_cache(model, cache, 2)
    assert tokens == (expected, other)
    for each, before in caches:
        for a, b in zip(to_arrays(each), before, strict=True):
            np.testing.assert_array_equal(a, b)
    assert [int(each.num_tokens[0]) for each, _ in caches] == list(range(4, 15))
    assert continue_cache(model, caches[4][0], 6)[0] == expected[4:]


@two_families
def test_select_repeat_and_join_keep_the_states_of_sequences(model):
    """A sequence of the new cache has the tokens or the state of another one."""
    prompts = random_prompts()
    whole = generate(model, prompts, 16)
    new = [row[len(prompt) :] for row, prompt in zip(whole, prompts, strict=True)]
    cache = prefill(model, prompts)
    assert continue_cache(model, cache.select([2, 0, 2]), 7) == [new[i][:7] for i in (2, 0, 2)]
    assert continue_cache(model, cache.repeat(2), 3) == [new[i][:3] for i in (0, 0, 1, 1, 2, 2)]
    alone = [prefill(model, [prompt]) for prompt in reversed(prompts)]
    joined = GenerationCache.join(alone)
    assert continue_cache(model, joined, 7) == [row[:7] for row in reversed(new)]
    assert joined.nbytes == cache.nbytes == 3 * alone[0].nbytes
    other = prefill(make_other_model(model), prompts)
    for call, words in (
        (lambda: cache.select([3]), "from 0 to 2"),
        (lambda: cache.select([]), "list of integers"),
        (lambda: cache.repeat(0), "`times`"),
        (lambda: GenerationCache.join([]), "`caches`"),
        (lambda: GenerationCache.join(cache), "`caches` must be a list"),
        (lambda: GenerationCache.join([cache, other]), "of one model"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


@shared_by_families
def test_prefill_in_chunks_matches_single_prompts(family, monkeypatch):
    """A chunk of a long prompt is lost, or shorter prompts of the batch process its padding.

    On torch, the states of all sequences exist twice, or states come to other sequences.
    """
    monkeypatch.setattr("keras_recurrent.generation.prompts.MIN_CHUNK", 4)
    monkeypatch.setattr("keras_recurrent.generation.prompts.TOKENS_PER_CHUNK", 4)
    monkeypatch.setattr("keras_recurrent.generation.prompts.MIN_SEQUENCES", 2)
    model = tiny_causal_lm(family=family, **FEWER_LAYERS)
    prompts = random_prompts((30, 11, 4))
    if BACKEND == "torch":  # which then compiles no kernels below
        prefill(model, prompts)
    shapes, states, hidden_states = [], [], type(model.backbone).hidden_states

    def record(self, token_ids, *args, **kwargs):
        shapes.append(tuple(token_ids.shape))
        states.append(kwargs["cache"])
        return hidden_states(self, token_ids, *args, **kwargs)

    monkeypatch.setattr(type(model.backbone), "hidden_states", record)
    cache = prefill(model, prompts)
    assert max(length for _, length in shapes) == 4
    if BACKEND == "torch":
        # Two sequences, then one. Attention would read the empty positions of an initial state.
        first = [n for n, state in enumerate(states) if state is None]
        assert [shapes[n][0] for n in first] == [2, 1]
    continued = prefill(model, [row[-8:] for row in prompts], cache=cache)
    for row, prompt in enumerate(prompts):
        whole = [*prompt, *prompt[-8:]]
        assert_caches_close(continued.select([row]), prefill(model, [whole]))
    for row, prompt in enumerate(prompts):
        assert_caches_close(cache.select([row]), prefill(model, [prompt]))


@pytest.mark.once
@two_families
def test_cache_without_space_for_tokens_raises(model):
    """A KV cache drops its first tokens, or an error does not name the sequence."""
    prompts = random_prompts()
    if model.backbone.keeps_state:
        cache, longer = prefill(model, prompts), prefill(model, random_prompts((30, 4, 4)))
        assert (cache.max_length, cache.nbytes) == (None, longer.nbytes)
        return
    with pytest.raises(ValueError, match="`max_length` must be the maximum number of tokens"):
        model.prefill(pad(prompts))
    with pytest.raises(ValueError, match="`max_length` is 8 tokens, and sequence 1 has 9"):
        model.prefill(pad(prompts), max_length=8)
    cache = model.prefill(pad(prompts), max_length=12)
    assert cache.max_length == 12
    _, cache = continue_cache(model, cache, 2, return_cache=True)
    with pytest.raises(ValueError, match=r"sequence 1 has used 11: 1 are left.*may need 2"):
        continue_cache(model, cache, 2)
    whole = generate(model, prompts, 12)
    last = [row[len(p) + 2 : len(p) + 3] for row, p in zip(whole, prompts, strict=True)]
    assert continue_cache(model, cache, 1) == last
    uneven = model.prefill(pad([[5] * 9, [6, 7]]), max_length=12)
    uneven = model.prefill(pad([[8], [9] * 7]), cache=uneven)
    assert uneven.num_tokens.tolist() == [10, 9]
    with pytest.raises(ValueError, match="`max_length` is 12 tokens, and sequence 0 has 13"):
        model.prefill(pad([[8] * 3, [9]]), cache=uneven)
    with pytest.raises(ValueError, match="only to the first `prefill`"):
        model.prefill(pad(prompts), max_length=20, cache=cache)


@pytest.mark.once
def test_arguments_that_do_not_fit_a_cache_raise(hgrn2):
    cache, two = prefill(hgrn2, random_prompts()), pad(random_prompts((3, 3)), 8)
    for call, words in (
        (lambda: hgrn2.generate(two, stop_token_ids=None, cache=cache), "text for each sequence"),
        (lambda: hgrn2.generate(None, 3, "auto", cache=cache), "`stop_token_ids` must"),
        (lambda: hgrn2.generate(None, None, None, cache=cache), "must be the number of tokens"),
        (lambda: hgrn2.generate(None, 3, (VOCABULARY,), cache=cache), "from 0 to"),
        (
            lambda: hgrn2.generate(None, 3, (1, 1.5), cache=cache),
            "`stop_token_ids` must be a tuple",
        ),
        (lambda: hgrn2.generate(None, 0, None, cache=cache), "`max_length`"),
        (lambda: hgrn2.generate("text", 3, None, cache=cache), "no preprocessor"),
        (lambda: hgrn2.stream(pad([[], []], 5), stop_token_ids=None), "at least one token"),
        (lambda: hgrn2.generate(two, return_cache=1), "`return_cache`"),
        (lambda: hgrn2.generate(two, strip_prompt="yes"), "`strip_prompt`"),
        (lambda: hgrn2.generate(None, 3, None, cache=cache.state), "must be a `GenerationCache`"),
        (lambda: cache.num_tokens.sort(), "read-only"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


@pytest.mark.parametrize("family", [pytest.param("griffin", marks=tiny.NIGHTLY_IF_COMPILED)])
def test_run_eagerly_generates_the_same_tokens_and_caches(family):
    """Steps without compilation differ, in `generate`, `stream` or after a cache."""
    model, found = tiny_causal_lm(family=family, **FEWER_LAYERS), []
    prompts, more = random_prompts((3, 5)), random_prompts((2, 2), seed=5)
    sampling = [SamplingParams(temperature=0), SamplingParams(seed=1, presence_penalty=1.0)]
    for run_eagerly in (False, True):
        model.compile(sampler="greedy", run_eagerly=run_eagerly)
        whole, cache = generate(model, prompts, 9, return_cache=True, sampling=sampling)
        continued = generate(model, more, 5, cache=cache)
        streamed = list(model.stream(pad(more, 5), 5, None, cache=cache))
        assert (keras_recurrent.which_generation(model).name == "eager") == run_eagerly
        found.append((whole, continued, streamed, to_arrays(cache)))
    assert found[0][:3] == found[1][:3]
    for a, b in zip(found[0][3], found[1][3], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.once
def test_max_length_does_not_count_padding_columns(hgrn2):
    """Padding columns count as tokens, or `max_length` differs between calls."""
    first, second = random_prompts((3, 3)), random_prompts((2, 2), seed=5)
    expected = generate(hgrn2, first, 8)
    assert {len(row) for row in expected} == {8}
    stop = expected[0][5]
    cache = hgrn2.prefill(pad(first), max_length=8)
    for columns in (3, 8, 12):
        assert generate(hgrn2, first, columns, max_length=8) == expected
        assert generate(hgrn2, first, columns, max_length=8, return_cache=True)[0] == expected
        stopped = generate(hgrn2, first, columns, (stop,), max_length=8)
        assert stopped[0] == expected[0][: expected[0].index(stop, 3) + 1]
        new = hgrn2.generate(pad(first, columns), 8, None, strip_prompt=True)
        assert unpad(new) == [row[3:] for row in expected]
        with pytest.raises(ValueError, match=r"`max_length` is 2 tokens, .* prompt 0 alone has 3"):
            generate(hgrn2, first, columns, max_length=2)
        more = generate(hgrn2, second, columns, max_length=5, cache=cache)
        assert {len(row) for row in more} == {5}
        stream = hgrn2.stream(pad(second, columns), 5, None, cache=cache)
        assert concatenate(second, collect_tokens(stream)) == more


@nightly_on_tensorflow
def test_random_tokens_do_not_depend_on_the_kind_of_call(hgrn2):
    """Random numbers depend on more than seed, call and row, such as on a returned cache."""
    model, prompts = hgrn2, random_prompts((4, 4))

    def call_twice(function):
        keras.utils.set_random_seed(5)
        model.compile(sampler=keras_hub.samplers.RandomSampler(seed=11))
        return function(), function()

    def stream():
        return model.stream(pad(prompts, 12), stop_token_ids=None)

    def begin_stream():
        next(stream())
        return int(keras.ops.convert_to_numpy(model.sampler.variables[0])[1])

    expected = call_twice(lambda: generate(model, prompts, 12))
    assert expected[0] != expected[1]
    assert call_twice(lambda: generate(model, prompts, 12, return_cache=True)[0]) == expected
    assert call_twice(lambda: concatenate(prompts, collect_tokens(stream()))) == expected
    # Each call advances the sampler's generator by one state, however many tokens it draws.
    assert call_twice(begin_stream) == (1, 2)


@two_families
def test_sequences_that_stop_early_match_single_sequences(model):
    """A state has tokens after a stop token, or tokens of `stream` and `generate` differ."""
    prompts = random_prompts()
    # A token that the second sequence generates early, and another one late or never.
    stop = generate(model, prompts, 20)[1][len(prompts[1]) + 1]
    ended, cache = model.generate(pad(prompts, 20), None, (stop,), return_cache=True)
    assert not ended["token_ids"][~np.asarray(ended["padding_mask"], bool)].any()
    rows = unpad(ended)
    assert len({len(row) for row in rows}) > 1
    stream = model.stream(pad(prompts, 20), stop_token_ids=(stop,))
    assert_caches_close(stream.cache, prefill(model, prompts))
    assert concatenate(prompts, collect_tokens(stream)) == rows
    for found in (cache, stream.cache):
        assert_caches_close(found, prefill(model, rows))
    alone = [continue_cache(model, prefill(model, [row]), 5)[0] for row in rows]
    assert continue_cache(model, cache, 5) == alone


@pytest.mark.once
def test_stream_that_was_closed_or_has_no_new_tokens_ends(hgrn2):
    closed = hgrn2.stream(pad(random_prompts(), 14), stop_token_ids=None)
    next(closed)
    closed.close()
    with pytest.raises(RuntimeError, match="was closed"):
        _ = closed.cache
    assert list(closed) == []
    full = hgrn2.stream(pad(random_prompts((4, 4))), stop_token_ids=None)
    assert list(full) == []
    assert_caches_close(full.cache, prefill(hgrn2, random_prompts((4, 4))))


@pytest.mark.once
def test_stream_after_an_interrupted_step_has_no_cache(hgrn2, monkeypatch):
    """A cache has the state after a token that it does not list."""
    stream = hgrn2.stream(pad([[5, 6]], 9), stop_token_ids=None)
    next(stream)
    batch = stream._loop.batch

    def interrupt(*arguments, launch=batch._launch):
        launch(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(batch, "_launch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    with pytest.raises(RuntimeError, match="an exception interrupted a step"):
        stream.cache  # noqa: B018
    assert list(stream) == []


@pytest.mark.skipif(BACKEND != "tensorflow", reason="tensors of TensorFlow")
def test_prefill_accepts_tensors_of_strings():
    import tensorflow as tf

    model = text_model()
    assert model.prefill(tf.constant(["abc", "d"])).num_tokens.tolist() == [4, 2]
    assert model.prefill(tf.constant("abc")).num_tokens.tolist() == [4]
