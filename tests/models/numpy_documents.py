"""What the NumPy models share: rows of padding and documents, taken apart."""

import numpy as np

from tests.models.tiny import weights_of


def run(document, model, token_ids, padding_mask=None, segment_ids=None):
    """`[B, T, vocabulary]` in float64, NaN at padding; each document is a run of its own.

    `document` is a function of the weights by their paths, the backbone's configuration and the
    tokens of one document; it returns their logits.
    """
    weights = {path: array.astype("float64") for path, array in weights_of(model).items()}
    config = model.backbone.get_config()
    out = np.full((*token_ids.shape, config["vocabulary_size"]), np.nan)
    for row, tokens in enumerate(token_ids):
        real = np.ones(len(tokens), bool) if padding_mask is None else padding_mask[row] > 0
        segments = np.zeros(len(tokens), int) if segment_ids is None else segment_ids[row]
        for segment in np.unique(segments[real]):
            places = np.flatnonzero(real & (segments == segment))
            out[row, places] = document(weights, config, tokens[places])
    return out


def part(weights, prefix):
    return {k.removeprefix(prefix): w for k, w in weights.items() if k.startswith(prefix)}
