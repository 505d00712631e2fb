"""HypeNet and MiniCPM-SALA in NumPy and float64, one document at a time.

Written from the papers, arXiv:2601.22156 and arXiv:2602.11761, and what the published models
compute: each head as a sum over all tokens before, without a state.
"""

import numpy as np

from tests.models.numpy_documents import part, run


def logits(model, token_ids, padding_mask=None, segment_ids=None):
    """`[B, T, vocabulary]`, NaN at padding."""
    return run(document, model, token_ids, padding_mask, segment_ids)


def document(weights, config, tokens):
    """The logits of one document."""
    embeddings = weights["token_embedding/embeddings"]
    x = embeddings[tokens] * (config["embedding_scale"] or 1)
    scale, epsilon = config["residual_scale"] or 1, config["layer_norm_epsilon"]
    for i, block_type in enumerate(config["block_types"]):
        w = part(weights, f"block_{i}/")
        mix = {"lightning_attention": lightning, "global_attention": attention}[block_type]
        y = norm(x, w["temporal_norm/scale"], epsilon)
        x = x + scale * mix(part(w, "temporal_block/"), y, config)
        y = norm(x, w["channel_norm/scale"], epsilon)
        x = x + scale * swiglu(part(w, "mlp/"), y)
    x = norm(x, weights["final_norm/scale"], epsilon) * (config["output_scale"] or 1)
    if config["tie_word_embeddings"]:
        return x @ embeddings.T
    return x @ weights["token_embedding/reverse_embeddings"]


def lightning(w, x, config):
    heads = config["num_lightning_heads"] or config["num_query_heads"]
    size = config["lightning_head_dim"] or config["head_dim"]
    epsilon = config["layer_norm_epsilon"]
    q, k, v = (x @ w[f"{name}_proj/kernel"] for name in "qkv")
    q, k, v = (y.reshape(len(x), -1, size) for y in (q, k, v))
    q = rotated(norm(q, w["q_norm/scale"], epsilon), config["rope_max_wavelength"])
    k = rotated(norm(k, w["k_norm/scale"], epsilon), config["rope_max_wavelength"])
    distance = np.arange(len(x))[:, None] - np.arange(len(x))
    outputs = []
    for head in range(heads):
        shared = head * k.shape[1] // heads
        # The slopes of ALiBi, for heads that are a power of two.
        decay = np.where(distance >= 0, np.exp(-(2.0 ** (-8 * (head + 1) / heads)) * distance), 0)
        outputs.append(decay * (q[:, head] @ k[:, shared].T) @ v[:, shared])
    o = np.concatenate(outputs, axis=-1) * (config["lightning_query_scale"] or 1)
    o = norm(o, w["norm/scale"], epsilon) * sigmoid(x @ w["u_proj/kernel"])
    return o @ w["o_proj/kernel"]


def attention(w, x, config):
    heads, size = config["num_query_heads"], config["head_dim"]
    q, k, v = (x @ w[f"{name}_proj/kernel"] for name in "qkv")
    q, k, v = (y.reshape(len(x), -1, size) for y in (q, k, v))
    if config["use_qk_norm"]:
        q = norm(q, w["q_norm/scale"], config["layer_norm_epsilon"])
        k = norm(k, w["k_norm/scale"], config["layer_norm_epsilon"])
    a = config["attention_logit_scaling"]
    if a is not None:
        q = q * (np.log(np.arange(len(x)) + a) / np.log(np.floor(a)))[:, None, None]
    outputs = []
    for head in range(heads):
        shared = head * k.shape[1] // heads
        z = q[:, head] @ k[:, shared].T / np.sqrt(size)
        z = np.where(np.tri(len(x), dtype=bool), z, -np.inf)
        p = np.exp(z - z.max(-1, keepdims=True))
        outputs.append(p / p.sum(-1, keepdims=True) @ v[:, shared])
    o = np.concatenate(outputs, axis=-1) * sigmoid(x @ w["gate_proj/kernel"])
    return o @ w["o_proj/kernel"]


def rotated(x, wavelength):
    """Complex numbers that turn; the parts of a number are half a head apart."""
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None, None] * wavelength ** (-np.arange(half) / half)
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
    return np.concatenate([z.real, z.imag], axis=-1)


def norm(x, scale, epsilon):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale


def swiglu(w, x):
    gate = x @ w["gate_proj/kernel"]
    return gate * sigmoid(gate) * (x @ w["up_proj/kernel"]) @ w["down_proj/kernel"]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))
