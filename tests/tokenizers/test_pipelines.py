"""Tokenizers in pipelines of Grain and TensorFlow."""

import grain
import numpy as np
import pytest

from keras_recurrent.tokenizers import ByteTokenizer
from tests.tokenizers import bpe

pytestmark = pytest.mark.once
TEXTS = ["hi you", "", "Grüße, 世界 🌍\n", "\x00\x7f"]


@pytest.mark.parametrize("make", [ByteTokenizer, bpe.tokenizer], ids=["bytes", "bpe"])
def test_pipelines_of_grain_and_tensorflow_give_the_tokens_of_a_call(make):
    tokenizer = make()
    expected = tokenizer(TEXTS)
    arrays = list(grain.MapDataset.source(TEXTS).map(tokenizer))
    assert all(isinstance(array, np.ndarray) for array in arrays)
    assert [array.tolist() for array in arrays] == expected
    tf = pytest.importorskip("tensorflow")
    dataset = tf.data.Dataset.from_tensor_slices(TEXTS)
    single, (batch,) = dataset.map(tokenizer), dataset.batch(4).map(tokenizer)
    assert single.element_spec.dtype == batch.dtype == tf.int32
    assert [row.tolist() for row in single.as_numpy_iterator()] == batch.to_list() == expected
    (nested,) = dataset.batch(4).map(lambda x: tokenizer(x[:, None]))
    assert nested.to_list() == [[tokens] for tokens in expected]
    for tokens in (single, dataset.batch(3).map(tokenizer)):
        round_trip = tokens.map(tokenizer.detokenize).as_numpy_iterator()
        assert [text.decode() for batch in round_trip for text in np.ravel(batch)] == TEXTS
