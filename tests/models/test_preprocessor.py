"""Preprocessors: strings to padded or packed sequences of tokens."""

import itertools

import keras
import keras_hub
import numpy as np
import pytest

from keras_recurrent.models import GriffinCausalLMPreprocessor, packing
from keras_recurrent.tokenizers import ByteTokenizer
from tests.layers.table import assert_rejects
from tests.models.test_responses import arrays

pytestmark = pytest.mark.once

PAD, START, END = 0, 1, 2


def preprocessor(**kwargs):
    return GriffinCausalLMPreprocessor(ByteTokenizer(), **{"sequence_length": 16, **kwargs})


def assert_equal(a, b):
    keras.tree.map_structure(np.testing.assert_array_equal, arrays(a), arrays(b))


def texts(n=40, longest=60, seed=0):
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(list("abcdé"), rng.integers(0, longest))) for _ in range(n)]


def test_padded_sequences_equal_those_of_keras_hub():
    strings = ["short", "long enough to be cut off", ""]
    hub = keras_hub.models.CausalLMPreprocessor(ByteTokenizer(), sequence_length=16)
    assert_equal(preprocessor()(strings), hub(strings))
    assert_equal(preprocessor()("short"), hub("short"))
    x, _, _ = preprocessor()(strings)
    assert sorted(x) == ["padding_mask", "token_ids"]


def test_generate_preprocess_adds_the_start_token_and_postprocess_returns_text():
    for packed in (False, True):
        prompts = preprocessor(packed=packed).generate_preprocess(["é", ""], sequence_length=5)
        token_ids = arrays(prompts["token_ids"])
        assert token_ids.tolist() == [[START, 198, 172, PAD, PAD], [START, PAD, PAD, PAD, PAD]]
        assert preprocessor(packed=packed).generate_postprocess(prompts) == ["é", ""]


def test_packed_sequences_lose_no_text_and_no_label_crosses_a_document():
    documents = texts()
    x, y, weight = arrays(preprocessor(packed=True)(documents))
    token_ids, segment_ids = x["token_ids"], x["segment_ids"]
    assert token_ids.shape == segment_ids.shape == y.shape == weight.shape
    assert token_ids.shape[1] == 16
    np.testing.assert_array_equal(x["padding_mask"], segment_ids > 0)
    # Documents of any lengths leave at most about half of the positions to padding.
    assert (segment_ids > 0).mean() > 0.7

    found = []
    for row in range(len(token_ids)):
        assert (np.diff(segment_ids[row][segment_ids[row] > 0]) >= 0).all()
        for segment in range(1, segment_ids[row].max() + 1):
            part = segment_ids[row] == segment
            tokens, labels, learned = token_ids[row, part], y[row, part], weight[row, part]
            # A label is the next token of the same document.
            np.testing.assert_array_equal(labels[:-1], tokens[1:])
            assert learned[:-1].all()
            # The last token of a document has no label; the last token of a part has one.
            assert learned[-1] == (tokens[-1] != END)
            last = labels[-1:] if learned[-1] else labels[:0]
            found.append(np.concatenate([tokens, last]).tolist())
    expected = [[START, *ByteTokenizer()([text])[0], END] for text in documents]
    whole = [tokens for tokens in expected if len(tokens) <= 17]
    for tokens in whole:
        found.remove(tokens)
    # The remaining parts belong to longer documents; each begins with the last token of the part
    # before.
    for tokens in (tokens for tokens in expected if len(tokens) > 17):
        for begin in range(0, len(tokens) - 1, 16):
            found.remove(tokens[begin : begin + 17])
    assert not found


def test_pack_documents_fills_sequences_and_accepts_no_documents():
    documents = [np.full(n, 7) for n in np.random.default_rng(0).integers(2, 16, 2000)]
    token_ids, mask, *_ = packing.pack_documents(documents, 16, pad_token_id=0)
    assert mask.sum() == sum(map(len, documents))
    assert mask.mean() > 0.9
    for documents in ([], [np.array([], "int32")]):
        token_ids, mask, *_ = packing.pack_documents(documents, 16, pad_token_id=0)
        assert token_ids.shape == (1, 16)
        assert not mask.any()


def test_packing_without_start_and_end_tokens_separates_documents():
    pack = preprocessor(packed=True, add_start_token=False, add_end_token=False)
    x, y, weight = arrays(pack(["ab", "", "c"], sequence_length=4))
    assert x["token_ids"].tolist() == [[100, 101, 102, 0]]
    assert x["segment_ids"].tolist() == [[1, 1, 2, 0]]
    assert y.tolist() == [[101, 0, 0, 0]]
    assert weight.tolist() == [[True, False, False, False]]


def test_a_single_string_packs_as_a_batch_of_one():
    assert_equal(preprocessor(packed=True)("hello"), preprocessor(packed=True)(["hello"]))


@pytest.mark.parametrize("packed", [False, True])
def test_tensorflow_pipelines_give_equal_sequences(packed):
    tf = pytest.importorskip("tensorflow")
    process = preprocessor(packed=packed)
    batches = tf.data.Dataset.from_tensor_slices(texts()).batch(40)
    samples = batches.map(process)
    assert_equal(next(iter(samples)), process(texts()))
    shapes = {tuple(spec.shape) for spec in keras.tree.flatten(samples.element_spec)}
    assert shapes == {(None, 16)}
    if packed:
        again = samples.unbatch().batch(4, drop_remainder=True)
        assert next(iter(again))[1].shape == (4, 16)
        single = tf.data.Dataset.from_tensor_slices(["hello"]).map(process)
        assert_equal(next(iter(single)), process("hello"))


def test_preprocessor_serializes_with_its_options():
    process = preprocessor(packed=True, add_end_token=False)
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(process))
    assert again.packed
    assert_equal(again(texts()), process(texts()))


def test_preprocessor_rejects_invalid_arguments_and_labels_next_to_strings():
    match = "`sequence_length` must be an integer, at least 1"
    for length in (0, -1, "8", 2.5, None):
        assert_rejects(match, preprocessor, sequence_length=length)
    assert_rejects(f"{match}; got 0", preprocessor(packed=True), ["tick"], sequence_length=0)
    for name, value in itertools.product(
        ("packed", "add_start_token", "add_end_token"), ("yes", 1)
    ):
        match = f"`{name}` must be True or False; got {value!r}"
        assert_rejects(match, preprocessor, **{name: value})
    match = "`y` and `sample_weight` are made from the strings in `x`"
    assert_rejects(match, preprocessor(packed=True), ["tick"], y=[1])
