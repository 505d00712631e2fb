"""y = activation(gate) * x.  Shazeer 2020, arXiv:2002.05202."""

from torch.nn import functional as F

from keras_recurrent.backends.torch._common import accumulation_dtype


def gated_linear_unit(gate, x, activation="silu"):
    """gate, x: of one shape; activation: "silu" or "gelu". Returns that shape in x's dtype."""
    dtype = accumulation_dtype(gate, x)
    gate = gate.to(dtype)
    gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return (gate * x.to(dtype)).to(x.dtype)
