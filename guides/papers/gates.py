"""The RG-LRU's gate retains the state where other gates discard it (Griffin, figure 7).

A gated recurrence h = α(r) h + β(r) x weights its state and its input by a gate r between 0 and 1.
De et al. 2024 (arXiv:2402.19427, appendix A) plot the input's share, β / (α + β), for four of them:

    RG-LRU   α = a^r               β = sqrt(1 - α²)     a is the decay at r = 1: σ(Λ)^8
    LRU      α = a                 β = sqrt(1 - a²)     no gate
    GRU      α = 1 - r             β = r
    Mamba    α = (1 - r)^a         β = (1 - α) / a      its A is -a; its step Δ is -log(1 - r)

Here α and β are measured on the operations: α is the new state for a state of 1 and no input, β
that for a state of 0 and an input of 1. The RG-LRU is this package's, the GRU is Keras's, and
Mamba's step is its discretization, exp(Δ A) with Δ = softplus.
"""

import dataclasses

import keras
import numpy as np
from runs import table

from keras_recurrent.ops import rg_lru

SIZES, SEEDS = {}, None
DECAYS = 0.5, 0.9, 0.99
GATES = np.linspace(0.001, 0.999, 999)
OPEN = 40.0  # pre-activation whose sigmoid is 1 in float32
EXPONENT = 8  # the operation computes a^(8 r), so its decay is a^(1/8)
TOLERANCE = 1e-6


# --- 1. The closed forms, in float64 ---


def closed_forms(a, r):
    """`{name: (α, β)}`."""
    mamba = (1 - r) ** a
    return {
        "RG-LRU": (a**r, np.sqrt(1 - a ** (2 * r))),
        "LRU": (np.full_like(r, a), np.full_like(r, np.sqrt(1 - a * a))),
        "GRU": (1 - r, r),
        "Mamba": (mamba, (1 - mamba) / a),
    }


# --- 2. Measurements on the operations, in float32 ---


def logit(p):
    return np.log(p / (1 - p))


def rg_lru_measured(a, r):
    """Measures α and β with one channel per gate value, one token after an initial state."""

    def output(x, state):
        values = np.full_like(r, x), logit(r), np.full_like(r, OPEN)
        x, gate_a, gate_x = (keras.ops.convert_to_tensor(v[None, None], "float32") for v in values)
        decays = keras.ops.convert_to_tensor(np.full_like(r, logit(a ** (1 / EXPONENT))), "float32")
        state = keras.ops.convert_to_tensor(np.full_like(r, state)[None], "float32")
        found, _ = rg_lru(x, gate_a, gate_x, decays, initial_state=state)
        return keras.ops.convert_to_numpy(found)[0, 0].astype("float64")

    return output(0.0, 1.0), output(1.0, 0.0)


def gru_measured(a, r):
    """Measures α and β with one sequence per gate value; Keras's update gate is α."""
    cell = keras.layers.GRUCell(1, activation="linear", reset_after=False)
    cell.build((None, 2))
    # Inputs: the update gate's pre-activation, and the candidate.
    kernel = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    cell.set_weights([kernel, np.zeros((1, 3)), np.zeros(3)])

    def output(x, state):
        inputs = keras.ops.convert_to_tensor(np.stack([logit(1 - r), np.full_like(r, x)], 1))
        state = keras.ops.convert_to_tensor(np.full((len(r), 1), state))
        inputs, state = (keras.ops.cast(v, "float32") for v in (inputs, state))
        return keras.ops.convert_to_numpy(cell(inputs, [state])[0])[:, 0].astype("float64")

    return output(0.0, 1.0), output(1.0, 0.0)


def mamba_measured(a, r):
    """Discretizes h' = A h + x with A = -a by zero-order hold: Δ = softplus(p), r = σ(p)."""
    step = np.asarray(
        keras.ops.convert_to_numpy(keras.ops.softplus(logit(r).astype("float32"))), "float64"
    )
    return np.exp(-step * a), -np.expm1(-step * a) / a


MEASURED = {"RG-LRU": rg_lru_measured, "GRU": gru_measured, "Mamba": mamba_measured}


# --- 3. Shares, figure, table ---


def share(alpha, beta):
    """Returns the input's share of the new state."""
    return beta / (alpha + beta)


def runs(size, results):
    return ({"decay": a} for a in DECAYS)


def measure(key, seeds, size, data):
    a = key["decay"]
    forms = closed_forms(a, GATES)
    errors = {
        name: float(np.max(np.abs(np.subtract(measured(a, GATES), forms[name]))))
        for name, measured in MEASURED.items()
    }
    shares = {name: share(*form) for name, form in forms.items()}
    return [
        {
            "largest_error": errors,
            "share_of_input_at_gate_0.001": {name: float(s[0]) for name, s in shares.items()},
            "share_of_input_at_gate_0.999": {name: float(s[-1]) for name, s in shares.items()},
            "mamba_less_gru_at_most": float(np.max(np.abs(shares["Mamba"] - shares["GRU"]))),
        }
    ]


@dataclasses.dataclass
class Shares:
    """A plot of the input's share for one decay, and its errors."""

    line: dict

    def draw(self, axes):
        a, points = self.line["decay"], GATES[49::150]
        for name, form in closed_forms(a, GATES).items():
            axes.plot(GATES, share(*form), "--" if name == "LRU" else "-", label=name)
        for measured in MEASURED.values():
            axes.plot(points, share(*measured(a, points)), "k.", markersize=4)
        axes.set(title=f"a = {a}", xlabel="gate r", ylabel="share of the input, β / (α + β)")
        axes.legend()

    def table(self):
        errors, ends = self.line["largest_error"], self.line["share_of_input_at_gate_0.999"]
        header = f"a = {self.line['decay']}", "largest error of α and β", "share at gate .999"
        rows = [(name, f"{errors.get(name, 0):.0e}", f"{ends[name]:.4f}") for name in ends]
        verdict = "agree" if max(errors.values()) <= TOLERANCE else "DO NOT AGREE"
        return (
            f"{table(header, rows)}\n\nMamba and GRU differ by at most "
            f"{self.line['mamba_less_gru_at_most']:.3f}. Measured gates and closed forms {verdict} "
            f"to {TOLERANCE:.0e}."
        )


def panels(results, size):
    return list(map(Shares, results.lines))
