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

import keras
import numpy as np
from keras.ops import convert_to_numpy, convert_to_tensor
from runs import Panel, table

from keras_recurrent.ops import rg_lru

SIZES, SEEDS = {}, None
DECAYS = 0.5, 0.9, 0.99
GATES = np.linspace(0.001, 0.999, 999)
OPEN = 40.0  # pre-activation whose sigmoid is 1 in float32
EXPONENT = 8  # the operation computes a^(8 r), so its decay is a^(1/8)
TOLERANCE = 1e-6


def closed_forms(a, r):
    """Returns `{name: (α, β)}` in float64."""
    mamba = (1 - r) ** a
    return {
        "RG-LRU": (a**r, np.sqrt(1 - a ** (2 * r))),
        "LRU": (np.full_like(r, a), np.full_like(r, np.sqrt(1 - a * a))),
        "GRU": (1 - r, r),
        "Mamba": (mamba, (1 - mamba) / a),
    }


def logit(p):
    return np.log(p / (1 - p))


def next_rg_lru(a, r, x, h):
    """One channel per gate, one token after an initial state."""
    numbers = x, logit(r), OPEN, logit(a ** (1 / EXPONENT)), h
    x, gate_a, gate_x, decays, h = (
        convert_to_tensor(np.broadcast_to(n, (1, 1, len(r))), "float32") for n in numbers
    )
    found, _ = rg_lru(x, gate_a, gate_x, decays[0, 0], initial_state=h[0])
    return found[0, 0]


def next_gru(a, r, x, h):
    """One sequence per gate; Keras's update gate is α."""
    cell = keras.layers.GRUCell(1, activation="linear", reset_after=False)
    cell.build((None, 2))
    # Inputs: the update gate's pre-activation, and the candidate.
    kernel = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    cell.set_weights([kernel, np.zeros((1, 3)), np.zeros(3)])
    inputs = np.stack([logit(1 - r), np.full_like(r, x)], axis=1)
    inputs, h = (convert_to_tensor(v, "float32") for v in (inputs, np.full((len(r), 1), h)))
    return cell(inputs, [h])[0][:, 0]


def next_mamba(a, r, x, h):
    """Discretizes h' = A h + x with A = -a by zero-order hold: Δ = softplus(p), r = σ(p)."""
    step = convert_to_numpy(keras.ops.softplus(logit(r).astype("float32"))).astype("float64")
    return np.exp(-step * a) * h - np.expm1(-step * a) / a * x


MEASURED = {"RG-LRU": next_rg_lru, "GRU": next_gru, "Mamba": next_mamba}


def measured(name, a, r):
    """Returns α and β of an operation."""
    states = (MEASURED[name](a, r, x, h) for x, h in ((0.0, 1.0), (1.0, 0.0)))
    return tuple(convert_to_numpy(state).astype("float64") for state in states)


def share(alpha, beta):
    """Returns the input's share of the new state."""
    return beta / (alpha + beta)


def runs(size, results):
    return ({"decay": a} for a in DECAYS)


def measure(key, seeds, size, data):
    forms = closed_forms(key["decay"], GATES)
    errors = {
        name: float(np.max(np.abs(np.subtract(measured(name, key["decay"], GATES), forms[name]))))
        for name in MEASURED
    }
    shares = {name: share(*form) for name, form in forms.items()}
    yield {
        "largest_error": errors,
        "share_of_input_at_gate_0.001": {name: float(s[0]) for name, s in shares.items()},
        "share_of_input_at_gate_0.999": {name: float(s[-1]) for name, s in shares.items()},
        "mamba_less_gru_at_most": float(np.max(np.abs(shares["Mamba"] - shares["GRU"]))),
    }


def panels(results, size):
    return list(map(panel_of, results.lines))


def panel_of(line):
    """Returns the panel of the closed forms' shares for one decay, with a table of errors."""
    a, points = line["decay"], np.linspace(GATES[0], GATES[-1], 25)
    curves = {
        name: dict(zip(points, share(*form)[:, None], strict=True))
        for name, form in closed_forms(a, points).items()
    }
    errors, ends = line["largest_error"], line["share_of_input_at_gate_0.999"]
    header = f"a = {a}", "largest error of α and β", "share at gate .999"
    rows = [(name, f"{errors.get(name, 0):.0e}", f"{ends[name]:.4f}") for name in ends]
    verdict = "agree" if max(errors.values()) <= TOLERANCE else "DO NOT AGREE"
    text = (
        f"{table(header, rows)}\n\nMamba and GRU differ by at most "
        f"{line['mamba_less_gru_at_most']:.3f}. Measured gates and closed forms {verdict} "
        f"to {TOLERANCE:.0e}."
    )
    labels = f"a = {a}", "gate r", "share of the input, β / (α + β)"
    return Panel(*labels, curves, scale="linear", text=text)
