"""A cache that is kept: going on from it is what reading and writing all at once is."""

import itertools

import keras
import keras_hub
import numpy as np
import pytest

import keras_recurrent
from keras_recurrent.models import GenerationCache, SamplingParams
from tests.generation.test_programs import prompts
from tests.generation.test_text import text_model
from tests.models import tiny
from tests.models.tiny import FEWER_LAYERS, VOCABULARY, shared_by_families, tiny_causal_lm

BACKEND = keras.config.backend()
ROOM = 64  # what attention to all tokens has room for, as `generate` makes it for short rows
ROWS = (5, 9, 2)  # the lengths of prompts


@pytest.fixture(scope="module", params=tiny.SHARED)
def model(request):
    model = tiny_causal_lm(family=request.param, **FEWER_LAYERS)
    model.compile(sampler="greedy")
    return model


def tokens(rows, width=None):
    """Lists of token ids as the inputs of a model."""
    width = width or max(1, *map(len, rows))
    found = {"token_ids": np.zeros((len(rows), width), "int32")}
    found["padding_mask"] = np.arange(width) < np.array([len(row) for row in rows])[:, None]
    for place, row in zip(found["token_ids"], rows, strict=True):
        place[: len(row)] = row
    return found


def lists(written):
    """The tokens of each row."""
    pairs = zip(written["token_ids"], written["padding_mask"], strict=True)
    return [ids[np.asarray(mask, bool)].tolist() for ids, mask in pairs]


def given(lengths=ROWS, seed=3):
    return lists(prompts(lengths, max(lengths), seed))


def attends_to_all(model):
    return not all(block.keeps_state for block in model.backbone.transformer_layers)


def prefill(model, rows, **kwargs):
    room = {"max_length": ROOM} if attends_to_all(model) and "cache" not in kwargs else {}
    return model.prefill(tokens(rows), **room, **kwargs)


def generate(model, rows, count, stop_token_ids=None, **kwargs):
    """Rows of `count` tokens, those given with them; with `return_cache` the cache, too."""
    inputs = tokens(rows, count)
    found = model.generate(inputs, stop_token_ids=stop_token_ids, **kwargs)
    return (lists(found[0]), found[1]) if kwargs.get("return_cache") else lists(found)


def more(model, cache, count, stop_token_ids=None, **kwargs):
    """`count` more tokens of each row."""
    found = model.generate(None, count, stop_token_ids, cache=cache, **kwargs)
    return (lists(found[0]), found[1]) if kwargs else lists(found)


def joined(*parts):
    return [list(itertools.chain(*row)) for row in zip(*parts, strict=True)]


def arrays(cache):
    found = [keras.ops.convert_to_numpy(a) for a in keras.tree.flatten(cache.state)]
    return [np.array(a) for a in (*found, cache.last_token, cache.num_tokens)]


def assert_same(a, b):
    """Two caches, to rounding."""
    for x, y in zip(arrays(a), arrays(b), strict=True):
        np.testing.assert_allclose(x.astype("f8"), y.astype("f8"), rtol=2e-4, atol=2e-5)


def test_going_on_neither_drops_nor_repeats_a_token(model):
    rows = given()
    whole = generate(model, rows, 20)
    written, cache = generate(model, rows, 12, return_cache=True)
    for count in (1, 3, 4):
        np.testing.assert_array_equal(cache.num_tokens, [len(row) for row in written])
        np.testing.assert_array_equal(cache.last_token, [row[-1] for row in written])
        assert_same(cache, prefill(model, written))
        found, cache = more(model, cache, count, return_cache=True)
        written = joined(written, found)
    assert written == whole


def test_a_cache_never_changes(model):
    """Also where two streams, and what other calls write, go on from it in turns."""
    cache = prefill(model, given((4,)))
    before = arrays(cache)
    expected = generate(model, given((4,)), 14)[0][4:]
    other = generate(model, [given((4,))[0] + [7]], 15)[0][5:]
    first = model.stream(None, 10, None, cache=cache)
    second = model.stream(tokens([[7]], 11), stop_token_ids=None, cache=cache)
    found, kept = ([], []), []
    for _ in range(10):
        for texts, stream in zip(found, (first, second), strict=True):
            texts.extend(next(stream))
        kept.append((first.cache, arrays(first.cache)))
        more(model, cache, 2)
    assert found == (expected, other)
    for cache_then, then in [(cache, before), *kept]:
        for a, b in zip(arrays(cache_then), then, strict=True):
            np.testing.assert_array_equal(a, b)
    assert [int(c.num_tokens[0]) for c, _ in kept] == list(range(5, 15))
    assert more(model, kept[3][0], 6)[0] == expected[4:]


def test_rows_are_selected_repeated_and_joined(model):
    rows = given()
    whole = [row[len(p) :] for row, p in zip(generate(model, rows, 16), rows, strict=True)]
    cache = prefill(model, rows)
    assert more(model, cache.select([2, 0, 2]), 7) == [whole[i][:7] for i in (2, 0, 2)]
    assert more(model, cache.repeat(2), 3) == [whole[i][:3] for i in (0, 0, 1, 1, 2, 2)]
    alone = [prefill(model, [row]) for row in reversed(rows)]
    together = GenerationCache.join(alone)
    assert more(model, together, 7) == [row[:7] for row in reversed(whole)]
    assert together.nbytes == cache.nbytes == 3 * alone[0].nbytes
    for wrong, words in (
        (lambda: cache.select([3]), "from 0 to 2"),
        (lambda: cache.select([]), "list of integers"),
        (lambda: cache.repeat(0), "`times`"),
        (lambda: GenerationCache.join([]), "`caches`"),
        (lambda: GenerationCache.join(cache), "`caches` must be a list"),
        (lambda: GenerationCache.join([cache, prefill(other_model(model), rows)]), "of one model"),
    ):
        with pytest.raises(ValueError, match=words):
            wrong()


def other_model(model, **kwargs):
    family = next(name for name, row in tiny.FAMILIES.items() if isinstance(model, row.causal_lm))
    other = tiny_causal_lm(family=family, **{"seed": 1, **FEWER_LAYERS, **kwargs})
    other.compile(sampler="greedy")
    return other


@shared_by_families
def test_long_prompts_are_read_in_pieces(family, monkeypatch):
    monkeypatch.setattr("keras_recurrent.generation.lengths.MIN_CHUNK", 4)
    monkeypatch.setattr("keras_recurrent.generation.lengths.TOKENS_PER_CHUNK", 4)
    model = tiny_causal_lm(family=family, **FEWER_LAYERS)
    rows = given((30, 11, 4))
    lengths, states, hidden_states = [], [], type(model.backbone).hidden_states

    def counted(self, token_ids, *args, **kwargs):
        lengths.append(token_ids.shape[1])
        states.append(kwargs["cache"])
        return hidden_states(self, token_ids, *args, **kwargs)

    monkeypatch.setattr(type(model.backbone), "hidden_states", counted)
    cache = prefill(model, rows)
    assert max(lengths) == 4
    if BACKEND == "torch":  # an empty state would make attention read empty slots
        assert states[0] is None
        assert None not in states[1:]
    for i, row in enumerate(rows):
        assert_same(cache.select([i]), prefill(model, [row]))


@pytest.mark.once
def test_the_room_ends(model):
    rows = given()
    if not attends_to_all(model):
        assert prefill(model, rows).max_length is None
        assert prefill(model, rows).nbytes == prefill(model, given((30, 4, 4))).nbytes
        return
    with pytest.raises(ValueError, match="`max_length` must be the maximum number of tokens"):
        model.prefill(tokens(rows))
    with pytest.raises(ValueError, match="`max_length` is 8 tokens, and sequence 1 has 9"):
        model.prefill(tokens(rows), max_length=8)
    cache = model.prefill(tokens(rows), max_length=12)
    assert cache.max_length == 12
    _, cache = more(model, cache, 2, return_cache=True)
    with pytest.raises(ValueError, match=r"sequence 1 has used 11: 1 are left.*may need 2"):
        more(model, cache, 2)
    assert more(model, cache, 1) == [
        row[n + 2 : n + 3] for row, n in zip(generate(model, rows, 12), ROWS, strict=True)
    ]
    uneven = model.prefill(tokens([[5] * 9, [6, 7]]), max_length=12)
    uneven = model.prefill(tokens([[8], [9] * 7]), cache=uneven)
    assert uneven.num_tokens.tolist() == [10, 9]
    with pytest.raises(ValueError, match="`max_length` is 12 tokens, and sequence 0 has 13"):
        model.prefill(tokens([[8] * 3, [9]]), cache=uneven)
    with pytest.raises(ValueError, match="only to the first `prefill`"):
        model.prefill(tokens(rows), max_length=20, cache=cache)


@pytest.mark.once
@shared_by_families
def test_what_no_cache_goes_with(family):
    model = tiny_causal_lm(family=family, **FEWER_LAYERS)
    model.compile(sampler="greedy")
    cache, rows = prefill(model, given()), tokens(given((3, 3)), 8)
    for call, words in (
        (lambda: model.generate(rows, stop_token_ids=None, cache=cache), "text for each sequence"),
        (lambda: model.generate(None, 3, "auto", cache=cache), "`stop_token_ids` must"),
        (lambda: model.generate(None, None, None, cache=cache), "must be the number of tokens"),
        (lambda: model.generate(None, 3, (VOCABULARY,), cache=cache), "from 0 to"),
        (lambda: model.generate(None, 0, None, cache=cache), "`max_length`"),
        (lambda: model.generate("text", 3, None, cache=cache), "no preprocessor"),
        (lambda: model.stream(tokens([[], []], 5), stop_token_ids=None), "at least one token"),
        (lambda: model.generate(rows, return_cache=1), "`return_cache`"),
        (lambda: model.generate(rows, strip_prompt="yes"), "`strip_prompt`"),
        (lambda: model.generate(None, 3, None, cache=cache.state), "must be a `GenerationCache`"),
        (lambda: cache.num_tokens.sort(), "read-only"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


@pytest.mark.parametrize("family", [pytest.param("griffin", marks=tiny.NIGHTLY_IF_COMPILED)])
def test_run_eagerly_generates_the_same_tokens_and_caches(family):
    """Fails if steps without compilation differ, in `generate`, `stream`, or after a cache."""
    model, found = tiny_causal_lm(family=family, **FEWER_LAYERS), []
    rows, more = given((3, 5)), given((2, 2), seed=5)
    sampling = [SamplingParams(temperature=0), SamplingParams(seed=1, presence_penalty=1.0)]
    for run_eagerly in (False, True):
        model.compile(sampler="greedy", run_eagerly=run_eagerly)
        whole, cache = generate(model, rows, 9, return_cache=True, sampling=sampling)
        continued = generate(model, more, 5, cache=cache)
        streamed = list(model.stream(tokens(more, 5), 5, None, cache=cache))
        assert (keras_recurrent.which_generation(model).name == "eager") == run_eagerly
        found.append((whole, continued, streamed, keras.tree.flatten(cache.state)))
    assert found[0][:3] == found[1][:3]
    for a, b in zip(found[0][3], found[1][3], strict=True):
        arrays = map(keras.ops.convert_to_numpy, (a, b))
        np.testing.assert_allclose(*arrays, rtol=1e-4, atol=1e-4)


@pytest.mark.once
def test_max_length_of_tokens_ignores_padding_columns():
    """Padding columns count as tokens, or `max_length` differs between calls."""
    model = tiny_causal_lm(family="hgrn2", num_layers=1)
    model.compile(sampler="greedy")
    first, second = given((3, 3)), given((2, 2), seed=5)
    wanted = generate(model, first, 8)
    assert {len(row) for row in wanted} == {8}
    stop = wanted[0][5]
    cache = model.prefill(tokens(first), max_length=8)
    for columns in (3, 8, 12):
        assert generate(model, first, columns, max_length=8) == wanted
        assert generate(model, first, columns, max_length=8, return_cache=True)[0] == wanted
        stopped = generate(model, first, columns, (stop,), max_length=8)
        assert stopped[0] == wanted[0][: wanted[0].index(stop, 3) + 1]
        new = model.generate(tokens(first, columns), 8, None, strip_prompt=True)
        assert lists(new) == [row[3:] for row in wanted]
        with pytest.raises(ValueError, match=r"`max_length` is 2 tokens, .* prompt 0 alone has 3"):
            generate(model, first, columns, max_length=2)
        more = generate(model, second, columns, max_length=5, cache=cache)
        assert {len(row) for row in more} == {5}
        stream = model.stream(tokens(second, columns), 5, None, cache=cache)
        assert joined(second, streamed_tokens(stream)) == more


@pytest.mark.once
def test_max_length_of_a_dataset_of_tokens():
    """Fails if KerasHub's loop gets a dataset, of which it ignores `max_length`."""
    tf = pytest.importorskip("tensorflow")
    model = tiny_causal_lm(family="hgrn2", num_layers=1)
    batch = tokens(given((3, 3, 3)))
    for sampler in ("greedy", "beam"):
        model.compile(sampler=sampler)
        wanted = lists(model.generate(batch, 8, None))
        assert {len(row) for row in wanted} == {8}
        dataset = tf.data.Dataset.from_tensor_slices(batch).batch(2)
        assert lists(model.generate(dataset, 8, None)) == wanted


@shared_by_families
def test_random_tokens_are_those_of_one_call(family):
    """Fails if draws depend on more than seed, batch and row, such as whether a cache is kept."""
    model, rows = tiny_causal_lm(family=family, **FEWER_LAYERS), given((4, 4))

    def seeded(write):
        keras.utils.set_random_seed(5)
        model.compile(sampler=keras_hub.samplers.RandomSampler(seed=11))
        return write(), write()

    def stream():
        return model.stream(tokens(rows, 12), stop_token_ids=None)

    def part_of_a_stream():
        next(stream())
        return int(keras.ops.convert_to_numpy(model.sampler.variables[0])[1])

    plain = seeded(lambda: generate(model, rows, 12))
    assert plain[0] != plain[1]
    assert seeded(lambda: generate(model, rows, 12, return_cache=True)[0]) == plain
    assert seeded(lambda: joined(rows, streamed_tokens(stream()))) == plain
    # Each call takes one state of the sampler's generator, whatever it draws.
    assert seeded(part_of_a_stream) == (1, 2)


def streamed_tokens(stream):
    """The new tokens of each row."""
    return [[token for token in row if token is not None] for row in zip(*stream, strict=True)]


def test_rows_that_stop_have_tokens_and_states_of_each_alone(model):
    """A state has tokens after a stop token, or those of `stream` and `generate` differ."""
    rows = given()
    # A token that the second row generates early, and another one late or never.
    stop = generate(model, rows, 20)[1][len(rows[1]) + 1]
    stopped, cache = generate(model, rows, 20, (stop,), return_cache=True)
    assert len({len(row) for row in stopped}) > 1
    stream = model.stream(tokens(rows, 20), stop_token_ids=(stop,))
    assert_same(stream.cache, prefill(model, rows))
    assert joined(rows, streamed_tokens(stream)) == stopped
    for found in (cache, stream.cache):
        assert_same(found, prefill(model, stopped))
    assert more(model, cache, 5) == [more(model, prefill(model, [row]), 5)[0] for row in stopped]


@pytest.mark.once
def test_stream_that_was_closed_or_has_no_new_tokens_ends(model):
    closed = model.stream(tokens(given(), 14), stop_token_ids=None)
    next(closed)
    closed.close()
    with pytest.raises(RuntimeError, match="was closed"):
        _ = closed.cache
    assert list(closed) == []
    full = model.stream(tokens(given((4, 4))), stop_token_ids=None)
    assert list(full) == []
    assert_same(full.cache, prefill(model, given((4, 4))))


@pytest.mark.once
def test_stream_after_an_interrupted_step_has_no_cache(monkeypatch):
    """Its state may be a token ahead of the tokens of its cache."""
    model = tiny_causal_lm(family="hgrn2", num_layers=1)
    model.compile(sampler="greedy")
    stream = model.stream(tokens([[5, 6]], 9), stop_token_ids=None)
    next(stream)
    batch = stream._loop.batch

    def interrupted(*arguments, launch=batch._launch):
        launch(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(batch, "_launch", interrupted)
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
