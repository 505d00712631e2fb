"""HGRN2 in NumPy and float64, one row and one token at a time.

Written from the paper, Qin et al. 2024, arXiv:2404.07904, and what its published models compute.
"""

import numpy as np

from tests.models.numpy_documents import part, run
from tests.models.numpy_griffin import attention


def logits(model, token_ids, padding_mask=None, segment_ids=None):
    """`[B, T, vocabulary]`, NaN at padding."""
    return run(document, model, token_ids, padding_mask, segment_ids)


def document(weights, config, tokens):
    """The logits of one document."""
    embeddings = weights["token_embedding/embeddings"]
    bounds = lower_bounds(weights.get("lower_bounds/logits", np.zeros((1, 1))))
    x = embeddings[tokens]
    for i in range(config["num_layers"]):
        w = part(weights, f"block_{i}/")
        bound = bounds[i] if len(bounds) > 1 else 0
        y = rms_norm(part(w, "temporal_norm/"), x)
        if i in config.get("attention_layers", ()):
            heads = {"head_dim": x.shape[1] // config["num_query_heads"]}
            heads |= {**config, **heads, "partial_rotary_factor": 1}
            x = x + attention(
                part(w, "temporal_block/"), y, config["sliding_window"] or len(x), heads
            )
        else:
            x = x + hgrn2(part(w, "temporal_block/"), y, bound, config)
        x = x + swiglu(part(w, "mlp/"), rms_norm(part(w, "channel_norm/"), x))
    x = rms_norm(part(weights, "final_norm/"), x)
    tied = config["tie_word_embeddings"]
    return x @ (embeddings.T if tied else weights["token_embedding/reverse_embeddings"])


def lower_bounds(logits):
    shares = np.exp(logits) / np.exp(logits).sum(axis=0)
    return np.cumsum(shares, axis=0) - shares[0]


def hgrn2(w, x, bound, config):
    """As a sum over all tokens before, without a state."""
    size = config["expand_ratio"]
    q, f, v = (conv1d(w, name, x @ w[f"{name}_proj/kernel"]) for name in "qfi")
    q = ACTIVATIONS[config["gate_activation"]](q)
    v = ACTIVATIONS[config["input_activation"]](v)
    f = bound + (1 - bound) * sigmoid(f)
    outputs = np.zeros_like(x)
    for start in range(0, x.shape[1], size):
        head = slice(start, start + size)
        for t in range(len(x)):
            for s in range(t + 1):
                kept = np.prod(f[s + 1 : t + 1, head], axis=0)
                weight = q[t, head] @ (kept * (1 - f[s, head])) / np.sqrt(size)
                outputs[t, head] += weight * v[s, head]
    return rms_norm(part(w, "norm/"), outputs, 1e-5) @ w["o_proj/kernel"]


def conv1d(w, name, x):
    if f"{name}_conv1d/kernel" not in w:
        return x
    kernel, y = w[f"{name}_conv1d/kernel"], np.zeros_like(x)
    for t in range(len(x)):
        for back in range(min(len(kernel), t + 1)):
            y[t] += kernel[-1 - back] * x[t - back]
    return y


def swiglu(w, x):
    gate, up = x @ w["gate_proj/kernel"], x @ w["up_proj/kernel"]
    return silu(gate) * up @ w["down_proj/kernel"]


def rms_norm(w, x, epsilon=1e-6):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * w["scale"]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


ACTIVATIONS = {"linear": lambda x: x, "sigmoid": sigmoid, "silu": silu}
