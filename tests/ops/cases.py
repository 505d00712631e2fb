"""What operations are tried on: a row of `DRAW` for each, a row of `CASES` for each situation."""

from typing import NamedTuple

import numpy as np


class Case(NamedTuple):
    batch: int
    length: int
    channels: int
    dtype: str = "float32"
    decay_dtype: str | None = None  # None: as dtype
    kinds: bool = False  # token kinds of all three sorts
    state: bool = False  # an initial state
    decays: str = "mixed"


CASES = {
    "one token": Case(2, 1, 5),
    "one token, state": Case(3, 1, 5, kinds=True, state=True),
    "prime sizes": Case(2, 97, 5, kinds=True, state=True, decays="extreme"),
    "even sizes": Case(1, 64, 128, state=True),
    "near one": Case(2, 1031, 3, kinds=True, decays="near one"),
    "bfloat16": Case(2, 97, 5, "bfloat16", kinds=True, state=True),
    "bfloat16, decays in float32": Case(2, 61, 1, "bfloat16", "float32", state=True),
    "float16": Case(2, 33, 4, "float16", kinds=True),
    "float64": Case(2, 33, 4, "float64", kinds=True, state=True, decays="extreme"),
}


def log_decays(rng, shape, decays):
    """Logarithms of decays: around a half; within 1e-6 of 1; or from 0 exactly to 1 exactly."""
    log_a = -np.abs(rng.normal(size=shape))
    if decays == "near one":
        log_a *= 1e-6
    if decays == "extreme":
        scale = rng.choice([0, 1e-7, 1e-3, 1, 30, 1000], size=shape)
        log_a = np.where(rng.random(shape) < 0.1, -np.inf, log_a * scale)
    return log_a


def gates(rng, shape, decays):
    """Pre-activations, far out on both sides when the decays are to be extreme."""
    scale = 1 if decays == "mixed" else rng.choice([1, 10, 100], size=shape)
    return rng.normal(size=shape) * scale - (10 if decays == "near one" else 0)


def linear_scan(rng, case):
    shape = (case.batch, case.length, case.channels)
    tensors = {"x": rng.normal(size=shape), "log_a": log_decays(rng, shape, case.decays)}
    return tensors, (case.batch, case.channels)


def complex_linear_scan(rng, case):
    *shape, channels = (case.batch, case.length, case.channels)
    tensors = {
        "x": rng.normal(size=(*shape, 2 * channels)),
        "log_a": log_decays(rng, (*shape, channels), case.decays),
        "phase": rng.uniform(-np.pi, np.pi, (*shape, channels)),
    }
    return tensors, (case.batch, 2 * channels)


def rg_lru(rng, case):
    shape = (case.batch, case.length, case.channels)
    tensors = {
        "x": rng.normal(size=shape),
        "gate_a": gates(rng, shape, case.decays),
        "gate_x": gates(rng, shape, case.decays),
        "a_logit": rng.normal(size=case.channels) * 3 + 3,
    }
    return tensors, (case.batch, case.channels)


def causal_conv1d(rng, case):
    tensors = {
        "x": rng.normal(size=(case.batch, case.length, case.channels)),
        "kernel": rng.normal(size=(4, case.channels)),
        "bias": rng.normal(size=case.channels),
    }
    return tensors, (case.batch, 3, case.channels)


DRAW = {f.__name__: f for f in (linear_scan, complex_linear_scan, rg_lru, causal_conv1d)}
DECAYS = ("log_a", "gate_a", "a_logit", "phase")


class Drawn(NamedTuple):
    tensors: dict  # float64 arrays that hold numbers of the case's dtypes
    initial_state: np.ndarray | None
    token_kind: np.ndarray | None
    d_output: np.ndarray
    d_final_state: np.ndarray
    dtypes: dict  # of the tensors


def draw(operation, case, seed=0):
    rng = np.random.default_rng([seed, *operation.encode()])
    tensors, state_shape = DRAW[operation](rng, case)
    dtypes = {
        name: (case.decay_dtype or case.dtype) if name in DECAYS else case.dtype for name in tensors
    }
    tensors = {name: round_to(dtypes[name], t) for name, t in tensors.items()}
    kind = None
    if case.kinds:
        kind = rng.choice([0, 1, 2], p=[0.7, 0.1, 0.2], size=(case.batch, case.length))
        kind = kind.astype("int8")
    accumulation = "float64" if "float64" in dtypes.values() else "float32"
    state = rng.normal(size=state_shape) if case.state else None
    d_output = round_to(case.dtype, rng.normal(size=tensors["x"].shape))
    if kind is not None:  # the output at padding does not matter
        d_output = np.where(kind[:, :, None] == 2, 0, d_output)
    return Drawn(
        tensors,
        None if state is None else round_to(accumulation, state),
        kind,
        d_output,
        round_to(accumulation, rng.normal(size=state_shape)),
        dtypes,
    )


def round_to(dtype, array):
    """The nearest numbers of a dtype, as float64."""
    array = np.asarray(array, "float64")
    if dtype == "bfloat16":
        # Keep 8 of 24 bits; round half to even.
        bits = array.astype("float32").view("uint32")
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
        return bits.view("float32").astype("float64")
    return array.astype(dtype).astype("float64")


EPSILON = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23, "float64": 2.0**-52}


def unit(dtype, magnitude):
    """One unit in the last place of a number of this magnitude."""
    return EPSILON[dtype] * 2.0 ** np.floor(np.log2(magnitude)) if magnitude else 0.0
