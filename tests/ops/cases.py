"""Inputs for tests of operations: `DRAW` has a function per operation, `CASES` the situations."""

from typing import NamedTuple

import numpy as np


class Case(NamedTuple):
    batch: int
    length: int
    channels: int  # of a head, where there are heads
    dtype: str = "float32"
    decay_dtype: str | None = None  # None: as dtype
    kinds: bool = False  # token kinds of all three sorts
    state: bool = False  # an initial state
    decays: str = "mixed"
    tied: bool = False  # keys made of decays, where there are keys
    heads: tuple = (4, 2)  # of queries and of keys, where they may differ
    window: int | None = 6  # where there is one
    activation: str | None = "silu"  # where there may be one
    values: int | None = None  # channels of values, where there are heads; None: two more

    @property
    def value_size(self):
        return self.channels + 2 if self.values is None else self.values


CASES = {
    "one token": Case(2, 1, 5, activation=None),
    "one document a row": Case(2, 45, 5),
    "one token, state": Case(3, 1, 5, kinds=True, state=True),
    "prime sizes": Case(2, 97, 5, kinds=True, state=True, decays="extreme"),
    "even sizes": Case(1, 128, 128, state=True, activation=None),
    "near one": Case(2, 1031, 3, kinds=True, decays="near one", activation=None),
    "all but forgotten": Case(1, 67, 3, kinds=True, state=True, decays="near zero", tied=True),
    "bfloat16": Case(2, 97, 5, "bfloat16", kinds=True, state=True, tied=True),
    "bfloat16, decays in float32": Case(
        2, 61, 1, "bfloat16", "float32", state=True, activation=None
    ),
    "float16": Case(2, 33, 4, "float16", kinds=True),
    "float64": Case(2, 33, 4, "float64", kinds=True, state=True, decays="extreme", tied=True),
}


def log_decays(rng, shape, decays):
    """Logarithms of decays: around 0.5; within 1e-6 of 1 or 0; or including exactly 0 and 1."""
    log_a = -np.abs(rng.normal(size=shape))
    if decays == "near zero":
        log_a -= 14
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


def gated_linear_attention(rng, case):
    heads, value_size = 2, case.value_size
    keys = (case.batch, case.length, heads, case.channels)
    tensors = {
        "q": rng.normal(size=keys),
        "k": None if case.tied else rng.normal(size=keys),
        "v": rng.normal(size=(*keys[:3], value_size)),
        "log_f": log_decays(rng, keys, case.decays),
    }
    return tensors, (case.batch, heads, case.channels, value_size)


def lightning_attention(rng, case):
    heads, value_size = 3, case.value_size
    keys = (case.batch, case.length, heads, case.channels)
    tensors = {
        "q": rng.normal(size=keys),
        "k": rng.normal(size=keys),
        "v": rng.normal(size=(*keys[:3], value_size)),
        "log_decay": np.array([0, -0.1, -1e4])
        if case.decays == "extreme"
        else log_decays(rng, heads, case.decays),
    }
    return tensors, (case.batch, heads, case.channels, value_size)


def sliding_window_attention(rng, case):
    heads, groups = case.heads
    room = 7 if case.window is None else case.window - 1
    tensors = {
        "q": rng.normal(size=(case.batch, case.length, heads, case.channels)) * case.channels**-0.5,
        "k": rng.normal(size=(case.batch, case.length, groups, case.channels)),
        "v": rng.normal(size=(case.batch, case.length, groups, case.value_size)),
    }
    return tensors, {
        "key": (case.batch, room, groups, case.channels),
        "value": (case.batch, room, groups, case.value_size),
    }


OPERATIONS = (
    linear_scan,
    complex_linear_scan,
    rg_lru,
    causal_conv1d,
    gated_linear_attention,
    lightning_attention,
    sliding_window_attention,
)
DRAW = {operation.__name__: operation for operation in OPERATIONS}
DECAYS = ("log_a", "gate_a", "a_logit", "phase", "log_f", "log_decay")
CONSTANTS = ("log_decay",)  # what has no gradient, or one of zeros
OUTPUT = {  # the tensor whose dtype the output has, and whose shape but for the heads
    "gated_linear_attention": "v",
    "lightning_attention": "v",
    "sliding_window_attention": "v",
}
PARTS = {"key": "k", "value": "v"}  # of a state of several arrays: the tensors they are like


class Drawn(NamedTuple):
    tensors: dict  # float64 arrays that hold numbers of the case's dtypes
    initial_state: np.ndarray | dict | None
    token_kind: np.ndarray | None
    d_output: np.ndarray
    d_final_state: np.ndarray | dict
    dtypes: dict  # of the tensors, and of the state or its parts, by their names
    output: str  # the tensor that the output is like
    options: dict


def draw(operation, case, seed=0):
    rng = np.random.default_rng([seed, *operation.encode()])
    tensors, state_shape = DRAW[operation](rng, case)
    dtypes = {
        name: (case.decay_dtype or case.dtype) if name in DECAYS else case.dtype
        for name, t in tensors.items()
        if t is not None
    }
    tensors = {n: t if t is None else round_to(dtypes[n], t) for n, t in tensors.items()}
    kind = None
    if case.kinds:
        kind = rng.choice([0, 1, 2], p=[0.7, 0.1, 0.2], size=(case.batch, case.length))
        kind = kind.astype("int8")
    accumulation = "float64" if "float64" in dtypes.values() else "float32"
    output, options = OUTPUT.get(operation, "x"), {}
    if operation == "causal_conv1d":
        options = {"activation": case.activation}
    output_shape = tensors[output].shape
    if isinstance(state_shape, dict):
        dtypes |= {f"state {part}": dtypes[PARTS[part]] for part in state_shape}
        options = {"sliding_window": case.window}
        if case.window is None:
            options["capacity"] = state_shape["key"][1]
        output_shape = (*tensors["q"].shape[:3], output_shape[3])
    else:
        dtypes["state"] = accumulation

    def draw_state():
        drawn = {n: rng.normal(size=shape) for n, shape in named("state", state_shape).items()}
        return {name: round_to(dtypes[name], array) for name, array in drawn.items()}

    state = None
    if case.state:
        state = unnamed("state", draw_state())
        if isinstance(state, dict):
            fill_ring(rng, state)
    d_output = round_to(case.dtype, rng.normal(size=output_shape))
    return Drawn(
        tensors, state, kind, d_output, unnamed("state", draw_state()), dtypes, output, options
    )


def fill_ring(rng, state):
    """The first row of a ring is full, the others perhaps not, and empty slots are zero."""
    batch, room = state["key"].shape[:2]
    position = rng.integers(0, 2 * room + 1, batch)
    position[0] = room + 3
    empty = np.arange(room) >= position[:, None]
    for part in state.values():
        part[empty] = 0
    state["position"] = position


def named(name, state):
    """A state, or the parts of one, by their names."""
    if isinstance(state, dict):
        return {f"{name} {part}": value for part, value in state.items()}
    return {} if state is None else {name: state}


def unnamed(name, parts):
    """The inverse of `named`."""
    if name in parts:
        return parts[name]
    return {part.removeprefix(f"{name} "): value for part, value in parts.items()}


def beside(tensor, kind):
    """`[B, T]` with axes of length 1 appended, to broadcast against the tensor."""
    return kind.reshape(*kind.shape, *[1] * (tensor.ndim - 2))


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
EPSILON["int32"] = 0.0


def unit(dtype, magnitude):
    """One unit in the last place of a number of this magnitude."""
    return EPSILON[dtype] * 2.0 ** np.floor(np.log2(magnitude)) if magnitude else 0.0
