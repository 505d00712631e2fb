"""Hawk in NumPy and float64, one row and one token at a time, written from the paper.

De et al. 2024, arXiv:2402.19427. Padding is left out of the row and each document is a run of its
own, which is what masks and segments mean.
"""

import numpy as np


def logits(weights, token_ids, num_layers, padding_mask=None, segment_ids=None):
    """`[B, T, vocabulary]`, NaN at padding. `weights`: `{path without the model's name: array}`."""
    weights = {path: np.asarray(array, "float64") for path, array in weights.items()}
    embeddings = weights["token_embedding/embeddings"]
    out = np.full((*token_ids.shape, len(embeddings)), np.nan)
    for row, tokens in enumerate(token_ids):
        real = np.ones(len(tokens), bool) if padding_mask is None else padding_mask[row] > 0
        segments = np.zeros(len(tokens), int) if segment_ids is None else segment_ids[row]
        for segment in np.unique(segments[real]):
            places = np.flatnonzero(real & (segments == segment))
            x = embeddings[tokens[places]]
            for i in range(num_layers):
                x = residual_block(part(weights, f"block_{i}/"), x)
            out[row, places] = rms_norm(part(weights, "final_norm/"), x) @ embeddings.T
    return out


def part(weights, prefix):
    return {k.removeprefix(prefix): w for k, w in weights.items() if k.startswith(prefix)}


def residual_block(w, x):
    x = x + recurrent_block(part(w, "temporal_block/"), rms_norm(part(w, "temporal_norm/"), x))
    return x + gated_mlp(part(w, "mlp/"), rms_norm(part(w, "channel_norm/"), x))


def rms_norm(w, x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (1 + w["scale"])


def gated_mlp(w, x):
    gate, up = linear(part(w, "gate_proj/"), x), linear(part(w, "up_proj/"), x)
    return linear(part(w, "down_proj/"), gelu(gate) * up)


def recurrent_block(w, x):
    y = gelu(linear(part(w, "linear_y/"), x))
    x = conv1d(part(w, "conv1d/"), linear(part(w, "linear_x/"), x))
    return linear(part(w, "linear_out/"), rg_lru(part(w, "rg_lru/"), x) * y)


def conv1d(w, x):
    kernel, y = w["kernel"], np.zeros_like(x)
    for t in range(len(x)):
        for back in range(min(len(kernel), t + 1)):
            y[t] += kernel[-1 - back] * x[t - back]
    return y + w["bias"]


def rg_lru(w, x):
    r = sigmoid(block_diagonal(part(w, "recurrence_gate/"), x))
    i = sigmoid(block_diagonal(part(w, "input_gate/"), x))
    log_a = -8 * np.log1p(np.exp(-w["a_logit"])) * r
    h = np.empty_like(x)
    h[0] = i[0] * x[0]
    for t in range(1, len(x)):
        a = np.exp(log_a[t])
        h[t] = a * h[t - 1] + np.sqrt(1 - a**2) * i[t] * x[t]
    return h


def block_diagonal(w, x):
    blocks = x.reshape(len(x), len(w["kernel"]), -1)
    return np.einsum("thi,hij->thj", blocks, w["kernel"]).reshape(len(x), -1) + w["bias"].ravel()


def linear(w, x):
    return x @ w["kernel"] + w["bias"]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
