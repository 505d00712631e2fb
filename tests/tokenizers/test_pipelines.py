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
    single = dataset.map(tokenizer)
    assert [row.tolist() for row in single.as_numpy_iterator()] == expected
    (nested,) = dataset.batch(4).map(lambda x: tokenizer(x[:, None]))
    assert nested.dtype == single.element_spec.dtype == tf.int32
    assert nested.to_list() == [[tokens] for tokens in expected]
    ((texts, single_text),) = dataset.batch(4).map(
        lambda x: (tokenizer.detokenize(tokenizer(x)), tokenizer.detokenize(tokenizer(x[0])))
    )
    assert [text.decode() for text in texts.numpy()] == TEXTS
    assert single_text.numpy().decode() == TEXTS[0]
