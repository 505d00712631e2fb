"""Random inputs of operations over time: `CASES` has situations, `draw` makes the `Drawn` inputs.

`Drawn` and the functions below it are shared by all operations.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from keras_recurrent.backends.constants import PADDING

EPSILON = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23, "float64": 2.0**-52}
EPSILON["int32"] = 0.0
FLOATS = ("bfloat16", "float16", "float32", "float64")  # from coarse to fine


class Drawn(NamedTuple):
    """Arguments of an operation, and gradients of its results.

    Arrays are float64 and hold numbers that their dtypes represent exactly. A state is an array, or
    a dict of arrays; in flat names its parts follow: "initial_state key".
    """

    tensors: dict  # {name: array, list of arrays, or None if an optional tensor is absent}
    options: dict
    dtypes: dict  # of tensors, and of the initial state by its flat names
    result_dtypes: dict  # of the output and of results without a gradient
    name_results: Callable  # turns what the operation returns into {name: result}
    d_output: np.ndarray | None = None  # If None, the operation has no gradients.
    output: str = "x"  # the tensor with the shape and dtype of the output
    initial_state: np.ndarray | dict | None = None
    d_final_state: np.ndarray | dict | None = None  # If None, the operation has no state.
    token_kind: np.ndarray | None = None

    @property
    def has_state(self):
        return self.d_final_state is not None

    @property
    def arguments(self):
        """All arguments that are arrays, by name."""
        if not self.has_state:
            return self.tensors
        state = {"initial_state": self.initial_state, "token_kind": self.token_kind}
        return self.tensors | state

    @property
    def differentiated(self):
        """{flat name: dtype} of the arguments that have gradients."""
        names = flatten(self.arguments) if self.d_output is not None else ()
        return {n: self.dtypes[n] for n in names if self.dtypes[n] in FLOATS}

    @property
    def cotangents(self):
        """{flat name of a result: its gradient}, of results that have one."""
        return flatten({"output": self.d_output, "final_state": self.d_final_state})

    @property
    def padding(self):
        """True at padding tokens, or None if all tokens are real."""
        kind = self.tensors.get("token_kind", self.token_kind)
        return None if kind is None else np.asarray(kind) == PADDING

    @property
    def precision(self):
        """The dtype in which a kernel computes: float64 if an input is, or float32."""
        return "float64" if "float64" in self.dtypes.values() else "float32"

    def dtype_of(self, result):
        """The dtype of a result or a gradient, by its flat name."""
        if (name := result.partition(" ")[0]) in self.result_dtypes:
            return self.result_dtypes[name]
        return self.dtypes[result.removeprefix("gradient of ").replace("final_", "initial_")]


def flatten(arrays):
    """Returns `{"state key": array}` of `{"state": {"key": array}}`, without entries of None."""
    flat = {}
    for name, value in arrays.items():
        if isinstance(value, dict):
            flat |= {f"{name} {part}": array for part, array in value.items()}
        elif value is not None:
            flat[name] = value
    return flat


def nest(flat):
    """The inverse of `flatten`."""
    arrays = {}
    for name, value in flat.items():
        name, _, part = name.partition(" ")
        if part:
            arrays.setdefault(name, {})[part] = value
        else:
            arrays[name] = value
    return arrays


def map_tensors(function, tensors):
    """Applies a function to a tensor, or to each one of a list; None remains None."""
    if isinstance(tensors, list):
        return [map_tensors(function, tensor) for tensor in tensors]
    return None if tensors is None else function(tensors)


def align(tokens, tensor):
    """Appends axes of length 1 to an array of tokens, to broadcast against a tensor of them."""
    return tokens.reshape(*tokens.shape, *[1] * (np.ndim(tensor) - tokens.ndim))


def round_to(dtype, array):
    """The nearest numbers of a dtype, as float64."""
    array = np.asarray(array, "float64")
    if dtype == "bfloat16":
        # Keep 8 of 24 bits; round half to even.
        bits = array.astype("float32").view("uint32")
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
        return bits.view("float32").astype("float64")
    return array.astype(dtype).astype("float64")


def unit(dtype, magnitude):
    """One unit in the last place of a number of this magnitude."""
    return EPSILON[dtype] * 2.0 ** np.floor(np.log2(magnitude)) if magnitude else 0.0


class Case(NamedTuple):
    batch: int
    length: int
    channels: int  # per head, if the operation has heads
    dtype: str = "float32"
    decay_dtype: str | None = None  # If None, `dtype`.
    kinds: bool = False  # with tokens that continue or start a document, and padding
    state: bool = False  # with an initial state
    decays: str = "mixed"  # or "near zero", "near one", "extreme"
    tied: bool = False  # Keys are 1 - decay, in gated linear attention.
    heads: tuple = (4, 2)  # with decays and of keys, or of queries and of keys in softmax attention
    window: int | None = 6  # of softmax attention
    activation: str | None = "silu"  # of the convolution
    values: int | None = None  # value channels per head; if None, two more than `channels`

    @property
    def value_size(self):
        return self.channels + 2 if self.values is None else self.values


CASES = {
    "one token": Case(2, 1, 5, activation=None),
    "one document": Case(2, 45, 5),
    "one token, state": Case(3, 1, 5, kinds=True, state=True),
    "prime sizes": Case(2, 97, 5, kinds=True, state=True, decays="extreme"),
    "even sizes": Case(1, 128, 128, state=True, activation=None),
    "decays near one": Case(2, 1031, 3, kinds=True, decays="near one", activation=None),
    "decays near zero": Case(1, 67, 3, kinds=True, state=True, decays="near zero", tied=True),
    "bfloat16": Case(2, 97, 5, "bfloat16", kinds=True, state=True, tied=True),
    "bfloat16, decays in float32": Case(
        2, 61, 1, "bfloat16", "float32", state=True, activation=None
    ),
    "float16": Case(2, 33, 4, "float16", kinds=True),
    "float64": Case(2, 33, 4, "float64", kinds=True, state=True, decays="extreme", tied=True),
}


def log_decays(rng, shape, decays):
    """Logarithms of decays: about 0.5, within 1e-6 of 1 or 0, or from exactly 0 to exactly 1."""
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
    """Inputs of the gates' sigmoids, of large magnitude unless decays are mixed."""
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
    heads, value_size = case.heads[0], case.value_size
    keys = (case.batch, case.length, heads, case.channels)
    tensors = {
        "q": rng.normal(size=keys),
        "k": rng.normal(size=keys),
        "v": rng.normal(size=(*keys[:3], value_size)),
        "log_decay": np.resize([0, -0.1, -1e4], heads)
        if case.decays == "extreme"
        else log_decays(rng, heads, case.decays),
    }
    return tensors, (case.batch, heads, case.channels, value_size)


def scalar_decay_attention(rng, case):
    heads, groups = case.heads
    values = (case.batch, case.length, heads, case.value_size)
    tensors = {
        "q": rng.normal(size=(*values[:2], groups, case.channels)),
        "k": rng.normal(size=(*values[:2], groups, case.channels)),
        "v": rng.normal(size=values),
        "log_decay": log_decays(rng, values[:3], case.decays),
    }
    return tensors, (case.batch, heads, case.channels, case.value_size)


def sliding_window_attention(rng, case):
    heads, groups = case.heads
    capacity = 7 if case.window is None else case.window - 1
    tensors = {
        "q": rng.normal(size=(case.batch, case.length, heads, case.channels)) * case.channels**-0.5,
        "k": rng.normal(size=(case.batch, case.length, groups, case.channels)),
        "v": rng.normal(size=(case.batch, case.length, groups, case.value_size)),
    }
    return tensors, {
        "key": (case.batch, capacity, groups, case.channels),
        "value": (case.batch, capacity, groups, case.value_size),
    }


DRAW = {
    operation.__name__: operation
    for operation in (
        *(linear_scan, complex_linear_scan, rg_lru, causal_conv1d),
        *(gated_linear_attention, lightning_attention, scalar_decay_attention),
        sliding_window_attention,
    )
}
DECAYS = ("log_a", "gate_a", "a_logit", "phase", "log_f", "log_decay")
# {operation: tensors without a gradient, or with one of zeros}
CONSTANTS = {"lightning_attention": ("log_decay",)}
# {part of a state: the tensor with its dtype}
PARTS = {"key": "k", "value": "v"}


def name_results(results):
    output, final_state = results
    return {"output": output, "final_state": final_state}


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
    output, options = "v" if "v" in tensors else "x", {}
    if operation == "causal_conv1d":
        options = {"activation": case.activation}
    output_shape = tensors[output].shape
    output_dtype = dtypes[output]
    dtypes["token_kind"] = "int8"
    if isinstance(state_shape, dict):
        dtypes |= {f"initial_state {part}": dtypes[PARTS[part]] for part in state_shape}
        dtypes["initial_state position"] = "int32"
        options = {"sliding_window": case.window}
        if case.window is None:
            options["capacity"] = state_shape["key"][1]
        output_shape = (*tensors["q"].shape[:3], output_shape[3])
    else:
        dtypes["initial_state"] = accumulation

    def draw_state():
        shapes = flatten({"initial_state": state_shape})
        drawn = {n: rng.normal(size=shape) for n, shape in shapes.items()}
        return nest({n: round_to(dtypes[n], array) for n, array in drawn.items()})["initial_state"]

    state = draw_state() if case.state else None
    if isinstance(state, dict):
        fill_ring_buffer(rng, state)
    d_output = round_to(case.dtype, rng.normal(size=output_shape))
    return Drawn(
        *(tensors, options, dtypes, {"output": output_dtype}, name_results, d_output, output),
        *(state, draw_state(), kind),
    )


def fill_ring_buffer(rng, state):
    """Fills all slots of the first sequence and random numbers of slots of the others."""
    batch, capacity = state["key"].shape[:2]
    position = rng.integers(0, 2 * capacity + 1, batch)
    position[0] = capacity + 3
    empty = np.arange(capacity) >= position[:, None]
    for part in state.values():
        part[empty] = 0
    state["position"] = position
