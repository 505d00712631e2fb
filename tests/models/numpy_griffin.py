"""Hawk, Griffin and the Transformer in NumPy and float64, one row and one token at a time.

Written from the paper: De et al. 2024, arXiv:2402.19427. Padding is left out of the row and each
document is a run of its own, which is what masks and segments mean.
"""

import numpy as np

from tests.models.numpy_documents import part, run


def logits(model, token_ids, padding_mask=None, segment_ids=None):
    """`[B, T, vocabulary]`, NaN at padding."""
    return run(document, model, token_ids, padding_mask, segment_ids)


def document(weights, config, tokens):
    """The logits of one document."""
    pattern = config["block_types"]
    embeddings = weights["token_embedding/embeddings"]
    x = embeddings[tokens] * (config["embedding_scale"] or 1)
    for i in range(config["num_layers"]):
        block_type = pattern[i % len(pattern)]
        x = residual_block(part(weights, f"block_{i}/"), x, block_type, config)
    z = rms_norm(part(weights, "final_norm/"), x) @ embeddings.T
    cap = config["final_logit_soft_cap"]
    return cap * np.tanh(z / cap) if cap else z


def residual_block(w, x, block_type, config):
    mixer, y = part(w, "temporal_block/"), rms_norm(part(w, "temporal_norm/"), x)
    if block_type == "recurrent":
        x = x + recurrent_block(mixer, y)
    else:
        window = config["sliding_window"] if block_type == "local_attention" else len(x)
        x = x + attention(mixer, y, window, config)
    return x + gated_mlp(part(w, "mlp/"), rms_norm(part(w, "channel_norm/"), x))


def attention(w, x, window, config):
    """One query head after the other, each with the key and value head of its group."""
    size, group = config["head_dim"], config["num_query_heads"] // config["num_key_value_heads"]
    turned = int(size * config["partial_rotary_factor"])
    wavelength = config["rope_max_wavelength"]
    t = np.arange(len(x))
    seen = (t[None] <= t[:, None]) & (t[None] > t[:, None] - window)
    outputs = []
    for head in range(config["num_query_heads"]):
        of_query = slice(head * size, (head + 1) * size)
        of_key = slice(head // group * size, (head // group + 1) * size)
        q = rotate(linear(part(w, "q_proj/"), x)[:, of_query], turned, wavelength)
        k = rotate(linear(part(w, "k_proj/"), x)[:, of_key], turned, wavelength)
        scores = np.where(seen, q @ k.T / np.sqrt(size), -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        outputs.append(scores @ linear(part(w, "v_proj/"), x)[:, of_key])
    return linear(part(w, "o_proj/"), np.concatenate(outputs, axis=-1))


def rotate(x, turned, wavelength):
    """Channel j and j + turned / 2 are a point in the plane, which turns with the position."""
    half = turned // 2
    if half == 0:
        return x
    angles = np.arange(len(x))[:, None] * wavelength ** (-2 * np.arange(half) / turned)
    points = (x[:, :half] + 1j * x[:, half:turned]) * np.exp(1j * angles)
    return np.concatenate([points.real, points.imag, x[:, turned:]], axis=-1)


def rms_norm(w, x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (1 + w["scale"])


def gated_mlp(w, x):
    gate, up = linear(part(w, "gate_proj/"), x), linear(part(w, "up_proj/"), x)
    return linear(part(w, "down_proj/"), gelu(gate) * up)


def recurrent_block(w, x):
    y = gelu(linear(part(w, "linear_y/"), x))
    x = conv1d(part(w, "conv1d/"), linear(part(w, "linear_x/"), x))
    complex_unit = part(w, "cg_lru/")
    h = cg_lru(complex_unit, x) if complex_unit else rg_lru(part(w, "rg_lru/"), x)
    return linear(part(w, "linear_out/"), h * y)


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


def cg_lru(w, x):
    """Appendix B: the two halves of x, and of h, are real and imaginary parts."""
    r = sigmoid(block_diagonal(part(w, "recurrence_gate/"), x))
    i = sigmoid(block_diagonal(part(w, "input_gate/"), x))
    log_a = 8 * r * (1j * w["theta"] - np.log1p(np.exp(-w["a_logit"])))
    half = x.shape[1] // 2
    u = i * (x[:, :half] + 1j * x[:, half:])
    h = np.empty_like(u)
    h[0] = u[0]
    for t in range(1, len(x)):
        a = np.exp(log_a[t])
        h[t] = a * h[t - 1] + np.sqrt(1 - np.abs(a) ** 2) * u[t]
    return np.concatenate([h.real, h.imag], axis=1)


def block_diagonal(w, x):
    blocks = x.reshape(len(x), len(w["kernel"]), -1)
    return np.einsum("thi,hij->thj", blocks, w["kernel"]).reshape(len(x), -1) + w["bias"].ravel()


def linear(w, x):
    return x @ w["kernel"] + w.get("bias", 0)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
