"""The layers as loops over tokens in NumPy float64, written from the papers, not from our code.

Each is a class with `step(x)` for one token of one row; a new object is a document's start.
`run` feeds it the real tokens of a batch.
"""

import keras
import numpy as np


def run(make, x, mask=None, segment_ids=None):
    """`make()` gives the unit at a document's start. Outputs at padding are 0."""
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
    """A function that makes the unit of a layer, with its weights or with the values given."""
    if values is None:
        values = [keras.ops.convert_to_numpy(weight.value) for weight in layer.weights]
    weights = {
        weight.path.split("/", 1)[1]: np.asarray(value).astype("float64")
        for weight, value in zip(layer.weights, values, strict=True)
    }
    config = layer.get_config()
    make = UNITS[type(layer).__name__]
    options = [config] if make is LightningAttention else []
    options += [config[name] for name in OPTIONS.get(make, ())]
    return lambda: make(weights, *options)


class RGLRU:
    def __init__(self, weights, scale_first_input=False):
        self.w, self.h, self.scale_first = weights, None, scale_first_input

    def step(self, x):
        r, i = sigmoid(gate(self.w, "recurrence_gate", x)), sigmoid(gate(self.w, "input_gate", x))
        a = sigmoid(self.w["a_logit"]) ** (8 * r)
        scale = 1 if self.h is None and not self.scale_first else np.sqrt(1 - a**2)
        self.h = scale * i * x + (0 if self.h is None else a * self.h)
        return self.h


class CGLRU:
    def __init__(self, weights, scale_first_input=False):
        self.w, self.h, self.scale_first = weights, None, scale_first_input

    def step(self, x):
        r, i = sigmoid(gate(self.w, "recurrence_gate", x)), sigmoid(gate(self.w, "input_gate", x))
        u = x[: len(x) // 2] + 1j * x[len(x) // 2 :]
        a = sigmoid(self.w["a_logit"]) ** (8 * r) * np.exp(1j * self.w["theta"] * 8 * r)
        scale = 1 if self.h is None and not self.scale_first else np.sqrt(1 - np.abs(a) ** 2)
        self.h = scale * i * u + (0 if self.h is None else a * self.h)
        return np.concatenate([self.h.real, self.h.imag])


class CausalConv1D:
    def __init__(self, weights, activation=None):
        self.w, self.seen = weights, []
        self.activation = ACTIVATIONS[activation or "linear"]

    def step(self, x):
        self.seen.append(x)
        y = self.w.get("bias", 0)
        for back, filter_weights in enumerate(self.w["kernel"][::-1]):
            if back < len(self.seen):
                y = y + filter_weights * self.seen[-1 - back]
        return self.activation(y)


class RecurrentBlock:
    def __init__(self, weights, scale_first_input, recurrence):
        self.w = weights
        self.conv1d = CausalConv1D(below(weights, "conv1d"))
        cls = {"rg_lru": RGLRU, "cg_lru": CGLRU}[recurrence]
        self.unit = cls(below(weights, recurrence), scale_first_input)

    def step(self, x):
        recurrent = self.unit.step(self.conv1d.step(linear(self.w, "linear_x", x)))
        return linear(self.w, "linear_out", recurrent * gelu(linear(self.w, "linear_y", x)))


ATTENTION_CONFIG = (
    "num_query_heads",
    "num_key_value_heads",
    "head_dim",
    "sliding_window",
    "rope_max_wavelength",
    "partial_rotary_factor",
    "logit_scaling",
    "layer_norm_epsilon",
)


class LocalAttention:
    def __init__(
        self, weights, heads, groups, head_dim, window, wavelength, rotary_factor, scaling, epsilon
    ):
        self.w, self.keys, self.values = weights, [], []
        self.heads, self.groups, self.window = heads, groups, window
        self.scaling, self.epsilon = scaling, epsilon
        turning = int(head_dim * rotary_factor)
        self.turn = wavelength ** (-np.arange(0, turning, 2) / max(turning, 1))

    def step(self, x):
        w, t = self.w, len(self.keys)
        queries = np.split(linear(w, "q_proj", x), self.heads)
        queries = [self.rotated(self.norm("q", q), t) for q in queries]
        keys = np.split(linear(w, "k_proj", x), self.groups)
        self.keys.append([self.rotated(self.norm("k", k), t) for k in keys])
        self.values.append(np.split(linear(w, "v_proj", x), self.groups))
        growth = np.log(t + self.scaling) / np.log(int(self.scaling)) if self.scaling else 1
        outputs = []
        for head, q in enumerate(queries):
            group = head * self.groups // self.heads
            seen = range(max(0, t + 1 - (self.window or t + 1)), t + 1)
            logits = [growth * (q @ self.keys[s][group]) / np.sqrt(len(q)) for s in seen]
            p = np.exp(logits - np.max(logits))
            outputs.append(p / p.sum() @ [self.values[s][group] for s in seen])
        output = np.concatenate(outputs)
        if "gate_proj/kernel" in w:
            output = output * sigmoid(linear(w, "gate_proj", x))
        return linear(w, "o_proj", output)

    def norm(self, name, x):
        """The norm of a head, if the layer has norms."""
        if f"{name}_norm/scale" not in self.w:
            return x
        return x / np.sqrt((x**2).mean() + self.epsilon) * self.w[f"{name}_norm/scale"]

    def rotated(self, x, t):
        """Complex numbers that turn: a pair's parts lie half the turning channels apart."""
        half = len(self.turn)
        z = (x[:half] + 1j * x[half : 2 * half]) * np.exp(1j * self.turn * t)
        return np.concatenate([z.real, z.imag, x[2 * half :]])


class HGRN2:
    def __init__(self, weights, size, gate_activation, input_activation):
        self.w, self.size, self.s = weights, size, 0
        self.activations = ACTIVATIONS[gate_activation], ACTIVATIONS[input_activation]
        self.convolutions = {
            name: CausalConv1D(below(weights, f"{name}_conv1d"))
            for name in "qfi"
            if f"{name}_conv1d/kernel" in weights
        }

    def step(self, x):
        maps = {name: x @ self.w[f"{name}_proj/kernel"] for name in "qfi"}
        for name, convolution in self.convolutions.items():
            maps[name] = convolution.step(maps[name])
        maps["f"] = maps["f"] + self.w.get("f_bias", 0)
        gate, activate = self.activations
        q, f, v = (
            np.reshape(part, (-1, self.size))
            for part in (gate(maps["q"]), sigmoid(maps["f"]), activate(maps["i"]))
        )
        self.s = f[..., None] * self.s + (1 - f)[..., None] * v[:, None]
        o = np.einsum("hkv,hk->hv", self.s, q).ravel() / np.sqrt(self.size)
        o = o / np.sqrt((o**2).mean() + 1e-5) * self.w["norm/scale"]
        return o @ self.w["o_proj/kernel"]


class HGRN:
    def __init__(self, weights):
        self.w, self.h = weights, 0

    def step(self, x):
        f, i, o = (x @ self.w[f"{name}_proj/kernel"] for name in "fio")
        self.h = sigmoid(f) * self.h + (1 - sigmoid(f)) * silu(i)
        return self.h * sigmoid(o)


class LightningAttention:
    def __init__(self, weights, c):
        self.w, self.c, self.s, self.t = weights, c, 0, 0
        names = "gate_activation", "value_activation", "query_key_activation"
        self.gate, self.value, self.feature = (ACTIVATIONS[c[name]] for name in names)
        # The schedules, for heads that are a power of two.
        heads, layer, layers = c["num_heads"], c["layer_index"], c["num_layers"]
        h = np.arange(1, heads + 1)
        log_decay = {
            "paper": lambda: -(8 * h / heads) * (1 - layer / layers),
            "alibi": lambda: -(2.0 ** (-8 * h / heads)),
            "checkpoints": lambda: -(2.0 ** (-8 * h / heads)) * (1 - layer / (layers - 1) + 1e-5),
        }[c["decay_schedule"]]()
        self.decay = np.exp(log_decay)[:, None, None]

    def step(self, x):
        w, c = self.w, self.c
        q, k, v, u = (x @ w[f"{name}_proj/kernel"] for name in "qkvu")
        q, k, v = self.feature(q), self.feature(k), self.value(v)
        q, k, v = (np.reshape(part, (-1, c["head_dim"])) for part in (q, k, v))
        if c["use_qk_norm"]:
            q, k = (
                self.norm(part) * w[f"{name}_norm/scale"] for part, name in ((q, "q"), (k, "k"))
            )
        if "lrpe/theta" in w:
            angle = w["lrpe/theta"] * self.t
            turn = np.concatenate([np.cos(angle), np.sin(angle)], axis=-1)
            q, k = np.tile(q, 2) * turn, np.tile(k, 2) * turn
        if c["rope_max_wavelength"]:
            q, k = self.rotated(q), self.rotated(k)
        k, v = (np.repeat(part, len(q) // len(part), axis=0) for part in (k, v))
        self.s, self.t = self.decay * self.s + k[..., None] * v[:, None], self.t + 1
        o = np.einsum("hkv,hk->hv", self.s, q * (c["query_scale"] or 1)).ravel()
        return self.gate(u) * self.norm(o) * w.get("norm/scale", 1) @ w["o_proj/kernel"]

    def norm(self, x):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.c["layer_norm_epsilon"])

    def rotated(self, x):
        half = x.shape[-1] // 2
        turn = self.c["rope_max_wavelength"] ** (-np.arange(half) / half)
        z = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * turn * self.t)
        return np.concatenate([z.real, z.imag], axis=-1)


class GatedMLP:
    def __init__(self, weights):
        self.w = weights

    def step(self, x):
        inside = gelu(linear(self.w, "gate_proj", x)) * linear(self.w, "up_proj", x)
        return linear(self.w, "down_proj", inside)


class SwiGLU:
    def __init__(self, weights):
        self.w = weights

    def step(self, x):
        gate, up = x @ self.w["gate_proj/kernel"], x @ self.w["up_proj/kernel"]
        return silu(gate) * up @ self.w["down_proj/kernel"]


class SGLU:
    def __init__(self, weights):
        self.w = weights

    def step(self, x):
        gate, up = x @ self.w["gate_proj/kernel"], x @ self.w["up_proj/kernel"]
        return gate * up @ self.w["down_proj/kernel"]


class SimpleRMSNorm:
    def __init__(self, weights):
        assert not weights

    def step(self, x):
        return x / np.sqrt((x**2).mean() + 1e-6)


class RMSNorm:
    def __init__(self, weights, zero_centered):
        self.scale = weights["scale"] + zero_centered

    def step(self, x):
        return x / np.sqrt((x**2).mean() + 1e-6) * self.scale


UNITS = {
    cls.__name__: cls
    for cls in (
        *(RGLRU, CGLRU, CausalConv1D, RecurrentBlock, LocalAttention),
        *(HGRN2, HGRN, GatedMLP, SwiGLU, RMSNorm),
        *(LightningAttention, SGLU, SimpleRMSNorm),
    )
}
OPTIONS = {
    RGLRU: ("scale_first_input",),
    CGLRU: ("scale_first_input",),
    RecurrentBlock: ("scale_first_input", "recurrence"),
    CausalConv1D: ("activation",),
    LocalAttention: ATTENTION_CONFIG,
    HGRN2: ("expand_ratio", "gate_activation", "input_activation"),
    RMSNorm: ("zero_centered",),
}


def below(weights, name):
    return {
        path.removeprefix(f"{name}/"): w for path, w in weights.items() if path.startswith(name)
    }


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


ACTIVATIONS = {"sigmoid": sigmoid, "silu": silu, "linear": lambda z: z}


def gelu(z):
    return z / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
