"""TransNormerLLM in NumPy and float64, one row and one token at a time.

Written from the paper, Qin et al. 2023, arXiv:2307.14995, and what its published models compute.
"""

import numpy as np

from tests.models.numpy_documents import part, run


def logits(model, token_ids, padding_mask=None, segment_ids=None):
    """`[B, T, vocabulary]`, NaN at padding."""
    return run(document, model, token_ids, padding_mask, segment_ids)


def document(weights, config, tokens):
    """The logits of one document."""
    embeddings = weights["token_embedding/embeddings"]
    x = embeddings[tokens] * np.sqrt(config["hidden_dim"])
    for i in range(config["num_layers"]):
        w = part(weights, f"block_{i}/")
        log_decay = log_decays(config, i)
        x = x + attention(part(w, "temporal_block/"), srms_norm(x), log_decay, config)
        x = x + sglu(part(w, "mlp/"), srms_norm(x))
    tied = config["tie_word_embeddings"]
    return srms_norm(x) @ (embeddings.T if tied else weights["token_embedding/reverse_embeddings"])


def log_decays(config, layer):
    heads, layers = config["num_heads"], config["num_layers"]
    if config["decay_schedule"] == "paper":
        return -8 * np.arange(1, heads + 1) / heads * (1 - layer / layers)
    # The slopes of ALiBi for three heads: those of two, and the first of four.
    assert heads == 3
    slopes = np.array([2**-4, 2**-8, 2**-2])
    return -slopes * (1 - layer / max(layers - 1, 1) + 1e-5)


def attention(w, x, log_decay, config):
    """As a sum over all tokens before, without a state."""
    size, outputs = config["head_dim"], []
    q, k = silu(x @ w["q_proj/kernel"]), silu(x @ w["k_proj/kernel"])
    v, u = x @ w["v_proj/kernel"], x @ w["u_proj/kernel"]
    t = np.arange(len(x))
    distance = t[:, None] - t[None]
    for head in range(config["num_heads"]):
        of_head = slice(head * size, (head + 1) * size)
        decay = np.where(distance >= 0, np.exp(log_decay[head] * distance), 0)
        scores = decay * products(q[:, of_head], k[:, of_head], distance, w, head)
        outputs.append(scores @ v[:, of_head])
    return u * srms_norm(np.concatenate(outputs, axis=-1)) @ w["o_proj/kernel"]


def products(q, k, distance, w, head):
    """q_t · k_s; with positions, each channel's part times the cosine of its angle."""
    if "lrpe/theta" not in w:
        return q @ k.T
    turned = np.cos(distance[..., None] * w["lrpe/theta"][head])
    return np.einsum("tk,sk,tsk->ts", q, k, turned)


def srms_norm(x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def sglu(w, x):
    return x @ w["gate_proj/kernel"] * (x @ w["up_proj/kernel"]) @ w["down_proj/kernel"]


def silu(x):
    return x / (1 + np.exp(-x))
