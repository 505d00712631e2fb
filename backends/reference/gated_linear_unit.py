"""y = activation(gate) * x.  Shazeer 2020, arXiv:2002.05202.

    silu(z) = z σ(z)
    gelu(z) = z σ(2 u),  u = sqrt(2 / π) (z + 0.044715 z^3)

The gelu is that of Hendrycks and Gimpel 2016, arXiv:1606.08415, with tanh: z (1 + tanh(u)) / 2.
"""

import numpy as np

from ._common import cast, sigmoid


def gated_linear_unit(gate, x, activation="silu", dtype=np.float64):
    """gate, x: [..., D]. Returns [..., D]."""
    gate, x = cast(dtype, gate, x)
    z, _ = _sigmoid_argument(gate, activation)
    return gate * sigmoid(z) * x


def gated_linear_unit_gradient(d_output, gate, x, activation="silu", dtype=np.float64):
    """Returns the gradients of gate and x."""
    gate, x, d_output = cast(dtype, gate, x, d_output)
    z, slope = _sigmoid_argument(gate, activation)
    d_gate = d_output * x * sigmoid(z) * (1 + gate * slope * sigmoid(-z))
    return d_gate, d_output * gate * sigmoid(z)


def _sigmoid_argument(gate, activation):
    """The argument of the sigmoid, and its derivative."""
    if activation == "silu":
        return gate, np.ones_like(gate)
    c = gate.dtype.type(2 * np.sqrt(2 / np.pi))
    return c * (gate + 0.044715 * gate**3), c * (1 + 3 * 0.044715 * gate**2)
