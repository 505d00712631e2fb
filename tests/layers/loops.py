"""Layers as loops over tokens in NumPy float64, written from the papers and not from our code.

Each unit is a class with `step(x)` for one token of one sequence; a new object begins a document.
`run` calls it for the real tokens of a batch.
"""

import functools

import keras
import numpy as np


def run(make, x, mask=None, segment_ids=None):
    """Outputs of the units that `make()` returns, one for each document; 0 at padding."""
    x = np.asarray(x, "float64")
    output = np.zeros_like(x)
    for row in range(x.shape[0]):
        unit, document = None, None
        for t in range(x.shape[1]):
            if mask is not None and not mask[row, t]:
                continue
            segment = 0 if segment_ids is None else segment_ids[row, t]
            if unit is None or segment != document:
                unit, document = make(), segment
            output[row, t] = unit.step(x[row, t])
    return output


def unit(layer, values=None):
    """Returns a function that makes the unit of a layer, with its weights or the given values."""
    if values is None:
        values = [keras.ops.convert_to_numpy(weight.value) for weight in layer.weights]
    weights = {
        weight.path.split("/", 1)[1]: np.asarray(value).astype("float64")
        for weight, value in zip(layer.weights, values, strict=True)
    }
    make, config = UNITS[type(layer).__name__], layer.get_config()
    return lambda: make(weights, config)


class RGLRU:
    """With a weight `theta`, the complex CG-LRU: halves of x and h are real and imaginary parts."""

    def __init__(self, weights, config):
        self.w, self.h, self.scale_first = weights, None, config["scale_first_input"]

    def step(self, x):
        r, i = sigmoid(gate(self.w, "recurrence_gate", x)), sigmoid(gate(self.w, "input_gate", x))
        a = sigmoid(self.w["a_logit"]) ** (8 * r)
        is_complex = "theta" in self.w
        if is_complex:
            a = a * np.exp(1j * self.w["theta"] * 8 * r)
            x = x[: len(x) // 2] + 1j * x[len(x) // 2 :]
        scale = 1 if self.h is None and not self.scale_first else np.sqrt(1 - np.abs(a) ** 2)
        self.h = scale * i * x + (0 if self.h is None else a * self.h)
        return np.concatenate([self.h.real, self.h.imag]) if is_complex else self.h


class CausalConv1D:
    def __init__(self, weights, config):
        self.w, self.seen = weights, []
        self.activation = ACTIVATIONS[config.get("activation") or "linear"]

    def step(self, x):
        self.seen.append(x)
        y = self.w.get("bias", 0)
        for back, filter_weights in enumerate(self.w["kernel"][::-1]):
            if back < len(self.seen):
                y = y + filter_weights * self.seen[-1 - back]
        return self.activation(y)


class RecurrentBlock:
    def __init__(self, weights, config):
        self.w, self.conv1d = weights, CausalConv1D(below(weights, "conv1d"), {})
        self.unit = RGLRU(below(weights, config["recurrence"]), config)

    def step(self, x):
        recurrent = self.unit.step(self.conv1d.step(linear(self.w, "linear_x", x)))
        return linear(self.w, "linear_out", recurrent * gelu(linear(self.w, "linear_y", x)))


class LocalAttention:
    def __init__(self, weights, config):
        self.w, self.c, self.keys, self.values = weights, config, [], []

    def step(self, x):
        w, c, t = self.w, self.c, len(self.keys)
        heads, groups = c["num_query_heads"], c["num_key_value_heads"] or 1
        queries = [self.norm_and_rotate("q", q, t) for q in np.split(linear(w, "q_proj", x), heads)]
        keys = np.split(linear(w, "k_proj", x), groups)
        self.keys.append([self.norm_and_rotate("k", k, t) for k in keys])
        self.values.append(np.split(linear(w, "v_proj", x), groups))
        scaling, window = c["logit_scaling"], c["sliding_window"] or t + 1
        growth = np.log(t + scaling) / np.log(int(scaling)) if scaling else 1
        outputs = []
        for head, q in enumerate(queries):
            group = head * groups // heads
            seen = range(max(0, t + 1 - window), t + 1)
            scale = growth * (c.get("query_scale") or len(q) ** -0.5)
            logits = [scale * (q @ self.keys[s][group]) for s in seen]
            p = np.exp(logits - np.max(logits))
            outputs.append(p / p.sum() @ [self.values[s][group] for s in seen])
        output = np.concatenate(outputs)
        if "gate_proj/kernel" in w:
            output = output * sigmoid(linear(w, "gate_proj", x))
        return linear(w, "o_proj", output)

    def norm_and_rotate(self, name, x, t):
        if f"{name}_norm/scale" in self.w:
            x = norm(x, self.c["layer_norm_epsilon"]) * self.w[f"{name}_norm/scale"]
        rotated = int(len(x) * self.c["partial_rotary_factor"])
        return rotate(x, t, rotated, self.c["rope_max_wavelength"])


class HGRN2:
    def __init__(self, weights, config, lower_bound=0):
        self.w, self.size, self.s, self.bound = weights, config["expand_ratio"], 0, lower_bound
        names = "gate_activation", "input_activation"
        self.gate, self.activate = (ACTIVATIONS[config[name]] for name in names)
        self.convolutions = {
            name: CausalConv1D(below(weights, f"{name}_conv1d"), {})
            for name in "qfi"
            if f"{name}_conv1d/kernel" in weights
        }

    def step(self, x):
        return norm(self.recall(x), 1e-5) * self.w["norm/scale"] @ self.w["o_proj/kernel"]

    def recall(self, x):
        y = {name: x @ self.w[f"{name}_proj/kernel"] for name in "qfi"}
        for name, convolution in self.convolutions.items():
            y[name] = convolution.step(y[name])
        f = self.bound + (1 - self.bound) * sigmoid(y["f"] + self.w.get("f_bias", 0))
        parts = self.gate(y["q"]), f, self.activate(y["i"])
        q, f, v = (np.reshape(part, (-1, self.size)) for part in parts)
        self.s = f[..., None] * self.s + (1 - f)[..., None] * v[:, None]
        return np.einsum("hkv,hk->hv", self.s, q).ravel() / np.sqrt(self.size)


class HGRN:
    def __init__(self, weights, config):
        self.w, self.h = weights, 0

    def step(self, x):
        f, i, o = (x @ self.w[f"{name}_proj/kernel"] for name in "fio")
        self.h = sigmoid(f) * self.h + (1 - sigmoid(f)) * silu(i)
        return self.h * sigmoid(o)


class LightningAttention:
    def __init__(self, weights, config):
        self.w, self.c, self.s, self.t = weights, config, 0, 0
        names = "gate_activation", "value_activation", "query_key_activation"
        self.gate, self.value, self.feature = (ACTIVATIONS[config[name]] for name in names)
        heads, layer, layers = config["num_heads"], config["layer_index"], config["num_layers"]
        log_decay = {
            "paper": -(8 * np.arange(1, heads + 1) / heads) * (1 - layer / layers),
            "alibi": -alibi_slopes(heads),
            "checkpoints": -alibi_slopes(heads) * (1 - layer / max(layers - 1, 1) + 1e-5),
        }[config["decay_schedule"]]
        self.decay = np.exp(log_decay)[:, None, None]

    def step(self, x):
        w, c = self.w, self.c
        q, k, v, u = (x @ w[f"{name}_proj/kernel"] for name in "qkvu")
        q, k, v = self.feature(q), self.feature(k), self.value(v)
        q, k, v = (np.reshape(part, (-1, c["head_dim"])) for part in (q, k, v))
        epsilon = c["layer_norm_epsilon"]
        if c["use_qk_norm"]:
            q, k = norm(q, epsilon) * w["q_norm/scale"], norm(k, epsilon) * w["k_norm/scale"]
        if "lrpe/theta" in w:
            angle = w["lrpe/theta"] * self.t
            turn = np.concatenate([np.cos(angle), np.sin(angle)], axis=-1)
            q, k = np.tile(q, 2) * turn, np.tile(k, 2) * turn
        if c["rope_max_wavelength"]:
            q, k = (rotate(z, self.t, z.shape[-1], c["rope_max_wavelength"]) for z in (q, k))
        k, v = (np.repeat(part, len(q) // len(part), axis=0) for part in (k, v))
        self.s, self.t = self.decay * self.s + k[..., None] * v[:, None], self.t + 1
        o = np.einsum("hkv,hk->hv", self.s, q * (c["query_scale"] or 1)).ravel()
        return self.gate(u) * norm(o, epsilon) * w.get("norm/scale", 1) @ w["o_proj/kernel"]


class GatedShortConv:
    def __init__(self, weights, config):
        self.w, self.conv1d = weights, CausalConv1D(below(weights, "conv1d"), {})

    def step(self, x):
        b, c, u = (linear(self.w, f"{name}_proj", x) for name in "bcu")
        return linear(self.w, "o_proj", c * self.conv1d.step(b * u))


class Mamba2:
    def __init__(self, weights, config):
        self.w, self.c, self.s = weights, config, 0
        self.scales = config["projection_scales"] or [1] * 5
        self.x_conv1d, self.bc_conv1d = (
            CausalConv1D(below(weights, name), {"activation": "silu"})
            for name in ("x_conv1d", "bc_conv1d")
        )

    def step(self, u):
        w, c = self.w, self.c
        z, x, bc, dt = (u @ w[f"{name}_proj/kernel"] for name in ("z", "x", "bc", "dt"))
        z, x, dt = z * self.scales[0], x * self.scales[1], dt * self.scales[4]
        bc = bc.reshape(c["num_groups"], 2, -1) * np.reshape(self.scales[2:4], (2, 1))
        x = self.x_conv1d.step(x).reshape(c["num_heads"], -1)
        bc = self.bc_conv1d.step(bc.ravel()).reshape(bc.shape)
        b, query = np.repeat(bc, c["num_heads"] // c["num_groups"], axis=0).swapaxes(0, 1)
        dt = np.logaddexp(0, dt + w["dt_bias"])
        decay = np.exp(-dt * np.exp(w["a_log"]))
        self.s = decay[:, None, None] * self.s + b[:, :, None] * (dt[:, None] * x)[:, None]
        o = (np.einsum("hnp,hn->hp", self.s, query) + w["skip"][:, None] * x).ravel()
        if c["norm_position"] == "before_gate":
            o = self.normalize(o)
        o = o * silu(z)
        if c["norm_position"] == "after_gate":
            o = self.normalize(o)
        return o @ w["o_proj/kernel"]

    def normalize(self, o):
        groups = o.reshape(self.c["num_groups"], -1)
        return norm(groups, self.c["layer_norm_epsilon"]).ravel() * self.w["norm/scale"]


class GatedMLP:
    def __init__(self, weights, config, activation="gelu"):
        self.w, self.activation = weights, ACTIVATIONS[activation]
        self.gate_scale = config.get("gate_scale") or 1

    def step(self, x):
        gate = self.activation(self.gate_scale * linear(self.w, "gate_proj", x))
        return linear(self.w, "down_proj", gate * linear(self.w, "up_proj", x))


class SquaredReLUMLP:
    def __init__(self, weights, config):
        self.w = weights

    def step(self, x):
        return linear(self.w, "down_proj", np.maximum(linear(self.w, "up_proj", x), 0) ** 2)


class RMSNorm:
    def __init__(self, weights, config):
        self.scale = weights.get("scale", 1) + config.get("zero_centered", False)
        self.num_groups = config.get("num_groups", 1)

    def step(self, x):
        return norm(x.reshape(self.num_groups, -1), 1e-6).ravel() * self.scale


# The loop of each layer: a class that is called with the layer's weights and configuration.
UNITS = {
    "RGLRU": RGLRU,
    "CGLRU": RGLRU,
    "CausalConv1D": CausalConv1D,
    "RecurrentBlock": RecurrentBlock,
    "LocalAttention": LocalAttention,
    "HGRN2": HGRN2,
    "HGRN": HGRN,
    "LightningAttention": LightningAttention,
    "GatedShortConv": GatedShortConv,
    "Mamba2": Mamba2,
    "GatedMLP": GatedMLP,
    "SwiGLU": functools.partial(GatedMLP, activation="silu"),
    "SGLU": functools.partial(GatedMLP, activation="linear"),
    "SquaredReLUMLP": SquaredReLUMLP,
    "RMSNorm": RMSNorm,
    "SimpleRMSNorm": RMSNorm,
}


def alibi_slopes(heads):
    """Heads beyond a power of two have every second slope of the next power."""
    power = 2 ** int(np.log2(heads))
    further = 2.0 ** (-4 * np.arange(1, 2 * power, 2) / power)
    return np.concatenate([2.0 ** (-8 * np.arange(1, power + 1) / power), further[: heads - power]])


def norm(x, epsilon):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)


def rotate(x, t, channels, wavelength):
    """Multiplies complex numbers by powers of i; their parts are half of `channels` apart."""
    half = channels // 2
    angle = t * wavelength ** (-np.arange(half) / max(half, 1))
    z = (x[..., :half] + 1j * x[..., half:channels]) * np.exp(1j * angle)
    return np.concatenate([z.real, z.imag, x[..., channels:]], axis=-1)


def below(weights, name):
    prefix = f"{name}/"
    return {path.removeprefix(prefix): w for path, w in weights.items() if path.startswith(prefix)}


def linear(weights, name, x):
    return x @ weights[f"{name}/kernel"] + weights.get(f"{name}/bias", 0)


def gate(weights, name, x):
    kernel, bias = weights[f"{name}/kernel"], weights[f"{name}/bias"]
    parts = np.split(x, len(kernel))
    bias = np.reshape(bias, (len(kernel), -1))
    return np.concatenate([p @ k + b for p, k, b in zip(parts, kernel, bias, strict=True)])


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def silu(z):
    return z * sigmoid(z)


def gelu(z):
    return z / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))


ACTIVATIONS = {"sigmoid": sigmoid, "silu": silu, "gelu": gelu, "linear": lambda z: z}
