"""The RG-LRU's gate retains the state where other gates discard it (Griffin, figure 7).

    make paper-gates                          # seconds; or, with the package installed:
    KERAS_BACKEND=jax python guides/papers/gates.py

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

import argparse
import os
import pathlib

# Keras reads this once, at import. "torch" and "tensorflow" also work.
os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import matplotlib.figure
import numpy as np
from runs import Results, machine, table

from keras_recurrent.ops import rg_lru

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


def measure(a):
    """Returns the line of results for one decay."""
    forms = closed_forms(a, GATES)
    errors = {
        name: float(np.max(np.abs(np.subtract(measured(a, GATES), forms[name]))))
        for name, measured in MEASURED.items()
    }
    shares = {name: share(*form) for name, form in forms.items()}
    return {
        "decay": a,
        "largest_error": errors,
        "share_of_input_at_gate_0.001": {name: float(s[0]) for name, s in shares.items()},
        "share_of_input_at_gate_0.999": {name: float(s[-1]) for name, s in shares.items()},
        "mamba_less_gru_at_most": float(np.max(np.abs(shares["Mamba"] - shares["GRU"]))),
    }


def draw(path):
    figure = matplotlib.figure.Figure(figsize=(9, 3.2), layout="constrained")
    for axes, a in zip(figure.subplots(1, 3, sharey=True), DECAYS, strict=True):
        for name, form in closed_forms(a, GATES).items():
            axes.plot(GATES, share(*form), "--" if name == "LRU" else "-", label=name)
        points = GATES[49::150]
        for i, measured in enumerate(MEASURED.values()):
            label = None if i else "measured"
            axes.plot(points, share(*measured(a, points)), "k.", markersize=4, label=label)
        axes.set(title=f"a = {a}", xlabel="gate r")
    figure.axes[0].set_ylabel("share of the input, β / (α + β)")
    figure.axes[0].legend()
    figure.savefig(path, dpi=120)


def tell(lines):
    """Formats the table and the verdict."""
    header = ("a", "RG-LRU", "GRU", "Mamba", "RG-LRU, r → 1", "LRU", "Mamba and GRU differ by")
    rows = []
    for line in lines:
        errors, ends = line["largest_error"], line["share_of_input_at_gate_0.999"]
        rows.append(
            (
                line["decay"],
                *(f"{errors[name]:.0e}" for name in MEASURED),
                f"{ends['RG-LRU']:.4f}",
                f"{ends['LRU']:.4f}",
                f"{line['mamba_less_gru_at_most']:.3f}",
            )
        )
    worst = max(max(line["largest_error"].values()) for line in lines)
    verdict = "agree" if worst <= TOLERANCE else "DO NOT AGREE"
    return (
        f"{table(header, rows)}\n\n"
        "The second to fourth columns are the largest errors of α and β against the closed forms, "
        "the others shares of the input.\n"
        f"Measured gates and closed forms {verdict} to {TOLERANCE:.0e}: {worst:.1e} at most."
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("build/papers"))
    arguments = parser.parse_args()
    results = Results(arguments.output / "gates.jsonl")
    for a in DECAYS:
        if not results.select(decay=a):
            results.append(**measure(a), machine=machine())
    draw(arguments.output / "gates.png")
    print(tell(results.lines))


if __name__ == "__main__":
    main()
