"""Prompts of token ids, as lists and padded, and caches, for tests of generation."""

import keras
import numpy as np

from tests.models.tiny import VOCABULARY


def random_prompts(lengths=(5, 9, 2), seed=3):
    """Returns lists of random token ids."""
    rng = np.random.default_rng(seed)
    token_ids = rng.integers(1, VOCABULARY, (len(lengths), max(lengths)))
    return [ids[:length].tolist() for ids, length in zip(token_ids, lengths, strict=True)]


def pad(rows, width=None):
    """Returns lists of token ids as the inputs of a model without a preprocessor."""
    width = width or max(1, *map(len, rows))
    token_ids = np.zeros((len(rows), width), "int32")
    for padded, row in zip(token_ids, rows, strict=True):
        padded[: len(row)] = row
    mask = np.arange(width) < np.array([len(row) for row in rows])[:, None]
    return {"token_ids": token_ids, "padding_mask": mask}


def unpad(batch):
    """Returns the token ids of each sequence, the inverse function of `pad`."""
    pairs = zip(batch["token_ids"], batch["padding_mask"], strict=True)
    return [ids[np.asarray(mask, bool)].tolist() for ids, mask in pairs]


def generate(model, lengths, total, **options):
    """Generates after random prompts of these lengths, up to `total` tokens of each sequence."""
    inputs = pad(random_prompts(lengths), total)
    return model.generate(inputs, **{"stop_token_ids": None, **options})


def to_arrays(cache):
    """Returns copies of the arrays of a cache."""
    state = map(keras.ops.convert_to_numpy, keras.tree.flatten(cache.state))
    return [np.array(array) for array in (*state, cache.last_token, cache.num_tokens)]


def assert_caches_close(found, expected):
    """Asserts that caches have equal tokens and close states."""
    assert [*map(list, found.token_ids)] == [*map(list, expected.token_ids)]
    for a, b in zip(to_arrays(found), to_arrays(expected), strict=True):
        np.testing.assert_allclose(a.astype("f8"), b.astype("f8"), rtol=2e-4, atol=2e-5)
