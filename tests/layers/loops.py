"""The layers again, in NumPy and float64, token by token: written from the papers, not from us.

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
    return lambda: UNITS[type(layer).__name__](weights)


class RGLRU:
    def __init__(self, weights):
        self.w, self.h = weights, None

    def step(self, x):
        r, i = sigmoid(gate(self.w, "recurrence_gate", x)), sigmoid(gate(self.w, "input_gate", x))
        a = sigmoid(self.w["a_logit"]) ** (8 * r)
        if self.h is None:
            self.h = i * x
        else:
            self.h = a * self.h + np.sqrt(1 - a**2) * i * x
        return self.h


class CGLRU:
    def __init__(self, weights):
        self.w, self.h = weights, None

    def step(self, x):
        r, i = sigmoid(gate(self.w, "recurrence_gate", x)), sigmoid(gate(self.w, "input_gate", x))
        u = x[: len(x) // 2] + 1j * x[len(x) // 2 :]
        a = sigmoid(self.w["a_logit"]) ** (8 * r) * np.exp(1j * self.w["theta"] * 8 * r)
        if self.h is None:
            self.h = i * u
        else:
            self.h = a * self.h + np.sqrt(1 - np.abs(a) ** 2) * i * u
        return np.concatenate([self.h.real, self.h.imag])


class CausalConv1D:
    def __init__(self, weights):
        self.w, self.seen = weights, []

    def step(self, x):
        self.seen.append(x)
        y = self.w.get("bias", 0)
        for back, filter_weights in enumerate(self.w["kernel"][::-1]):
            if back < len(self.seen):
                y = y + filter_weights * self.seen[-1 - back]
        return y


class RecurrentBlock:
    def __init__(self, weights):
        self.w = weights
        self.conv1d = CausalConv1D(below(weights, "conv1d"))
        self.rg_lru = RGLRU(below(weights, "rg_lru"))

    def step(self, x):
        recurrent = self.rg_lru.step(self.conv1d.step(linear(self.w, "linear_x", x)))
        return linear(self.w, "linear_out", recurrent * gelu(linear(self.w, "linear_y", x)))


class GatedMLP:
    def __init__(self, weights):
        self.w = weights

    def step(self, x):
        inside = gelu(linear(self.w, "gate_proj", x)) * linear(self.w, "up_proj", x)
        return linear(self.w, "down_proj", inside)


class RMSNorm:
    def __init__(self, weights):
        self.w = weights

    def step(self, x):
        return x / np.sqrt((x**2).mean() + 1e-6) * (1 + self.w["scale"])


UNITS = {
    cls.__name__: cls for cls in (RGLRU, CGLRU, CausalConv1D, RecurrentBlock, GatedMLP, RMSNorm)
}


def below(weights, name):
    return {
        path.removeprefix(f"{name}/"): w for path, w in weights.items() if path.startswith(name)
    }


def linear(weights, name, x):
    return x @ weights[f"{name}/kernel"] + weights[f"{name}/bias"]


def gate(weights, name, x):
    kernel, bias = weights[f"{name}/kernel"], weights[f"{name}/bias"]
    parts = np.split(x, len(kernel))
    bias = np.reshape(bias, (len(kernel), -1))
    return np.concatenate([p @ k + b for p, k, b in zip(parts, kernel, bias, strict=True)])


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def gelu(z):
    return z / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
