"""Prompts of token ids, as lists and padded, for tests of generation."""

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
