"""Random inputs of operations on each token: `CASES` has situations, `draw` makes the inputs."""

from typing import NamedTuple

import numpy as np

from tests.ops.cases import Drawn, round_to


class Case(NamedTuple):
    shape: tuple
    dtype: str = "float32"
    parameter_dtype: str | None = None  # If None, `dtype`.
    scale: str = "normal"  # of the numbers; "large", or "extreme", from tiny to large
    parameter: bool = True  # with the optional scale or lower bound
    activation: str = "silu"  # of the gated linear unit


CASES = {
    "a vector": Case((7,)),
    "one channel": Case((5, 1), activation="gelu"),
    "prime sizes": Case((3, 11, 97), scale="extreme", activation="gelu"),
    "four axes": Case((2, 3, 5, 16), parameter=False),
    "1031 tokens": Case((1031, 3), activation="gelu"),
    "2100 channels": Case((2, 2100), parameter=False, scale="large"),
    "large": Case((4, 40), scale="large", activation="gelu"),
    "bfloat16": Case((2, 13, 33), "bfloat16", activation="gelu"),
    "bfloat16, float32": Case((2, 13, 64), "bfloat16", "float32", scale="extreme"),
    "bfloat16, no parameter": Case((2, 13, 64), "bfloat16", parameter=False, scale="large"),
    "float16": Case((6, 24), "float16", scale="extreme"),
    "float32, bfloat16": Case((60, 24), "float32", "bfloat16"),
    "float64": Case((6, 24), "float64", scale="extreme", activation="gelu"),
    "float32, float64": Case((6, 24), "float32", "float64"),
}


def scaled_normal(rng, shape, scale):
    drawn = rng.normal(size=shape)
    if scale == "large":
        drawn *= 1e4
    if scale == "extreme":
        drawn *= rng.choice([1e-3, 1, 10, 100], size=shape)
    return drawn


def rms_norm(rng, case):
    x = scaled_normal(rng, case.shape, case.scale)
    if case.scale == "extreme":
        x.reshape(-1, case.shape[-1])[0] *= 1e-3  # so small that ε counts
    scale = rng.normal(size=case.shape[-1]) if case.parameter else None
    return {"x": x, "scale": scale}, {"epsilon": 1e-5}


def gated_linear_unit(rng, case):
    gate = scaled_normal(rng, case.shape, case.scale)
    return {"gate": gate, "x": rng.normal(size=case.shape)}, {"activation": case.activation}


def log_bounds(rng, width, scale):
    """log β and log(1 - β), [2, width]."""
    beta = rng.uniform(size=width)
    if scale == "extreme":
        beta = rng.choice([0, 1e-20, 1e-3, 0.5, 1 - 1e-9], size=width)
    with np.errstate(divide="ignore"):
        return np.log(np.stack([beta, 1 - beta]))


def log_forget_gate(rng, case):
    bound = log_bounds(rng, case.shape[-1], case.scale) if case.parameter else None
    return {"logits": scaled_normal(rng, case.shape, case.scale), "lower_bound": bound}, {}


def token_crossentropy(rng, case):
    """Extreme numbers include logits of -inf, of tokens other than the labels."""
    logits = scaled_normal(rng, case.shape, case.scale)
    tokens = rng.integers(0, case.shape[-1], case.shape[:-1])
    if case.scale == "extreme":
        banned = rng.random(case.shape) < 0.2
        np.put_along_axis(banned, tokens[..., None], False, -1)
        logits[banned] = -np.inf
    return {"logits": logits, "tokens": tokens}, {}


OPERATIONS = (rms_norm, gated_linear_unit, log_forget_gate, token_crossentropy)
DRAW = {operation.__name__: operation for operation in OPERATIONS}
PARAMETERS = ("scale", "lower_bound", "gate")  # tensors of `parameter_dtype`
INTEGERS = ("tokens",)


def draw(operation, case, seed=0):
    rng = np.random.default_rng([seed, *operation.encode()])
    tensors, options = DRAW[operation](rng, case)
    dtypes = {
        name: (case.parameter_dtype or case.dtype) if name in PARAMETERS else case.dtype
        for name, tensor in tensors.items()
        if tensor is not None
    }
    dtypes |= {name: "int32" for name in dtypes if name in INTEGERS}
    tensors = {n: t if t is None else round_to(dtypes[n], t) for n, t in tensors.items()}
    output_dtype, output_shape = case.dtype, case.shape
    if operation in ("log_forget_gate", "token_crossentropy"):
        output_dtype = "float64" if "float64" in dtypes.values() else "float32"
    if operation == "token_crossentropy":
        output_shape = case.shape[:-1]
    d_output = round_to(output_dtype, rng.normal(size=output_shape))
    return Drawn(tensors, options, dtypes, {"output": output_dtype}, name_output, d_output)


def name_output(output):
    return {"output": output}
