"""y = activation(gate) * x.  Shazeer 2020, arXiv:2002.05202.

    silu(z) = z σ(z)
    gelu(z) = z σ(2 u),  u = sqrt(2 / π) (z + 0.044715 z^3)

The second is z (1 + tanh(u)) / 2, the approximation of Hendrycks and Gimpel 2016, arXiv:1606.08415.
"""

import numpy as np

from keras_recurrent.backends.reference._common import prepare, sigmoid


def gated_linear_unit(gate, x, activation="silu", dtype=np.float64):
    """gate, x: the same shape, which the result has, too."""
    gate, x = prepare(dtype, gate, x)
    z, _ = _exponent(gate, activation)
    return gate * sigmoid(z) * x


def gated_linear_unit_gradient(d_output, gate, x, activation="silu", dtype=np.float64):
    """Returns the gradients of gate and x."""
    gate, x, d_output = prepare(dtype, gate, x, d_output)
    z, slope = _exponent(gate, activation)
    d_gate = d_output * x * sigmoid(z) * (1 + gate * slope * sigmoid(-z))
    return d_gate, d_output * gate * sigmoid(z)


def _exponent(gate, activation):
    """What the sigmoid is taken of, and its derivative."""
    if activation == "silu":
        return gate, np.ones_like(gate)
    c = gate.dtype.type(2 * np.sqrt(2 / np.pi))
    return c * (gate + 0.044715 * gate**3), c * (1 + 3 * 0.044715 * gate**2)
