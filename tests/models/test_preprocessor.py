"""Strings to rows of tokens."""

import grain
import keras
import keras_hub
import numpy as np
import pytest

from keras_recurrent.models import GriffinCausalLMPreprocessor, packing
from keras_recurrent.tokenizers import ByteTokenizer
from tests.models.tiny import FAMILIES, any_family, tiny_causal_lm

pytestmark = pytest.mark.once

PAD, START, END = 0, 1, 2


def preprocessor(**kwargs):
    return GriffinCausalLMPreprocessor(ByteTokenizer(), **{"sequence_length": 16, **kwargs})


def arrays(sample):
    """`(x, y, sample_weight)` in NumPy."""
    return keras.tree.map_structure(np.asarray, keras.tree.map_structure(to_numpy, sample))


def to_numpy(x):
    return keras.ops.convert_to_numpy(x) if keras.ops.is_tensor(x) else np.asarray(x)


def assert_same(a, b):
    keras.tree.map_structure(np.testing.assert_array_equal, arrays(a), arrays(b))


def texts(n=40, longest=60, seed=0):
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(list("abcdé"), rng.integers(0, longest))) for _ in range(n)]


def test_padded_rows_are_those_of_kerashub():
    strings = ["short", "long enough to be cut off", ""]
    theirs = keras_hub.models.CausalLMPreprocessor(ByteTokenizer(), sequence_length=16)
    assert_same(preprocessor()(strings), theirs(strings))
    assert_same(preprocessor()("short"), theirs("short"))
    x, _, _ = preprocessor()(strings)
    assert sorted(x) == ["padding_mask", "token_ids"]


def test_prompts_begin_with_the_start_token_and_come_back_as_text():
    for packed in (False, True):
        prompts = preprocessor(packed=packed).generate_preprocess(["é", ""], sequence_length=5)
        token_ids = to_numpy(prompts["token_ids"])
        assert token_ids.tolist() == [[START, 198, 172, PAD, PAD], [START, PAD, PAD, PAD, PAD]]
        assert preprocessor(packed=packed).generate_postprocess(prompts) == ["é", ""]


def test_packed_rows_lose_no_text_and_cross_no_boundary():
    documents = texts()
    x, y, weight = arrays(preprocessor(packed=True)(documents))
    token_ids, segment_ids = x["token_ids"], x["segment_ids"]
    assert token_ids.shape == segment_ids.shape == y.shape == weight.shape
    assert token_ids.shape[1] == 16
    np.testing.assert_array_equal(x["padding_mask"], segment_ids > 0)
    # At most about half of the place is lost to padding, whatever the lengths.
    assert (segment_ids > 0).mean() > 0.7

    found = []
    for row in range(len(token_ids)):
        assert (np.diff(segment_ids[row][segment_ids[row] > 0]) >= 0).all()
        for segment in range(1, segment_ids[row].max() + 1):
            here = segment_ids[row] == segment
            tokens, labels, learned = token_ids[row, here], y[row, here], weight[row, here]
            # A label is the next token of the same document.
            np.testing.assert_array_equal(labels[:-1], tokens[1:])
            assert learned[:-1].all()
            # A document's last token has no label; a piece that goes on has one.
            assert learned[-1] == (tokens[-1] != END)
            last = labels[-1:] if learned[-1] else labels[:0]
            found.append(np.concatenate([tokens, last]).tolist())
    wanted = [[START, *ByteTokenizer()([text])[0], END] for text in documents]
    whole = [tokens for tokens in wanted if len(tokens) <= 17]
    for tokens in whole:
        found.remove(tokens)
    # What is left are the pieces of longer documents, in their order, each taking up the last
    # token of the one before.
    for tokens in (tokens for tokens in wanted if len(tokens) > 17):
        for begin in range(0, len(tokens) - 1, 16):
            found.remove(tokens[begin : begin + 17])
    assert not found


def test_every_token_but_the_first_is_a_label_once():
    documents = [np.arange(1, n + 1) for n in (1, 2, 15, 16, 17, 18, 33, 50)]
    token_ids, mask, _, labels, has_label = packing.pack_documents(documents, 16, pad_token_id=0)
    learned = np.sort(labels[has_label])
    np.testing.assert_array_equal(learned, np.sort(np.concatenate([d[1:] for d in documents])))
    assert mask.sum() == sum(len(d) - (len(d) in (17, 33)) for d in documents)
    assert (token_ids[~mask] == 0).all()


def test_packing_is_linear_and_the_rows_follow_the_text():
    documents = [np.full(n, 7) for n in np.random.default_rng(0).integers(2, 16, 2000)]
    token_ids, mask, *_ = packing.pack_documents(documents, 16, pad_token_id=0)
    assert mask.sum() == sum(map(len, documents))
    assert mask.mean() > 0.9
    for nothing in ([], [np.array([], "int32")]):
        token_ids, mask, *_ = packing.pack_documents(nothing, 16, pad_token_id=0)
        assert token_ids.shape == (1, 16)
        assert not mask.any()


def test_packing_without_start_and_end_tokens():
    pack = preprocessor(packed=True, add_start_token=False, add_end_token=False)
    x, y, weight = arrays(pack(["ab", "", "c"], sequence_length=4))
    assert x["token_ids"].tolist() == [[100, 101, 102, 0]]
    assert x["segment_ids"].tolist() == [[1, 1, 2, 0]]
    assert y.tolist() == [[101, 0, 0, 0]]
    assert weight.tolist() == [[True, False, False, False]]


def test_a_single_string_packs_as_a_batch_of_one():
    assert_same(preprocessor(packed=True)("hello"), preprocessor(packed=True)(["hello"]))


@pytest.mark.parametrize("packed", [False, True])
def test_grain_pipelines_give_the_same_rows(packed):
    process = preprocessor(packed=packed)
    (sample,) = grain.MapDataset.source([texts()]).map(process)
    assert all(isinstance(leaf, np.ndarray) for leaf in keras.tree.flatten(sample))
    assert_same(sample, process(texts()))


@pytest.mark.parametrize("packed", [False, True])
def test_tensorflow_pipelines_give_the_same_rows(packed):
    tf = pytest.importorskip("tensorflow")
    process = preprocessor(packed=packed)
    batches = tf.data.Dataset.from_tensor_slices(texts()).batch(40)
    rows = batches.map(process)
    assert_same(next(iter(rows)), process(texts()))
    shapes = {tuple(spec.shape) for spec in keras.tree.flatten(rows.element_spec)}
    assert shapes == {(None, 16)}
    if packed:
        again = rows.unbatch().batch(4, drop_remainder=True)
        assert next(iter(again))[1].shape == (4, 16)
        single = tf.data.Dataset.from_tensor_slices(["hello"]).map(process)
        assert_same(next(iter(single)), process("hello"))


@pytest.mark.once
@pytest.mark.parametrize("packed", [False, True])
@any_family
def test_a_models_inputs_are_what_its_preprocessor_makes(family, packed):
    cls = FAMILIES[family]
    preprocessor = cls.preprocessor(cls.tokenizer(), sequence_length=8, packed=packed)
    model = tiny_causal_lm(preprocessor=preprocessor, family=family, vocabulary_size=259)
    x, _, _ = preprocessor(["one", "two"])
    keras.tree.assert_same_structure(dict(x), model.input)
    token_ids = {name: x[name] for name in ("token_ids", "padding_mask")}
    for inputs in (x, token_ids, {**token_ids, "segment_ids": x["token_ids"] * 0}):
        assert tuple(model(inputs).shape) == (*x["token_ids"].shape, 259)


def test_it_serializes():
    process = preprocessor(packed=True, add_end_token=False)
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(process))
    assert again.packed
    assert_same(again(texts()), process(texts()))


@pytest.mark.once
def test_rows_without_tokens_are_errors():
    for length in (0, -1, "8", 2.5, None):
        with pytest.raises(ValueError, match="`sequence_length` must be an integer, at least 1"):
            GriffinCausalLMPreprocessor(ByteTokenizer(), sequence_length=length)
    preprocessor = GriffinCausalLMPreprocessor(ByteTokenizer(), sequence_length=8, packed=True)
    with pytest.raises(ValueError, match="`sequence_length` must be an integer, at least 1; got 0"):
        preprocessor(["tick"], sequence_length=0)


@pytest.mark.once
def test_labels_beside_strings_to_pack_are_errors():
    packs = preprocessor(packed=True)
    with pytest.raises(
        ValueError, match="`y` and `sample_weight` are made from the strings in `x`"
    ):
        packs(["tick"], y=[1])
