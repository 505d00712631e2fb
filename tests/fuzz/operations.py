"""Random inputs of operations, and a check of what an implementation computes from them.

A `Sample` is small and plain: a counterexample fits on a few lines and can be run again with
`check(sample, implementation)`. Numbers come from a seed; tensors may be scaled, and runs of
neighboring elements may have one value, as extreme as the operation allows.
"""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import strategies as st

from tests.ops import cases, judge, small, token_wise
from tests.ops.cases import DRAW, flatten, nest, round_to

OVER_TIME = list(DRAW)
TOKEN_WISE = list(token_wise.DRAW)
# Smaller numbers lose digits in bfloat16 and float32, and processors may replace them by 0.
SMALLEST_NORMAL = 2.0**-126
FLUSHED = {
    "log_forget_gate": 2 * SMALLEST_NORMAL,  # in Triton, a closed gate ends at exp(-87)
}


class Run(NamedTuple):
    """Elements `start` to `stop` of a tensor, in memory order, that have one value."""

    tensor: str
    start: int
    stop: int
    value: float


class Sample(NamedTuple):
    operation: str
    form: cases.Case | token_wise.Case
    seed: int
    scales: dict  # exponents of 2 by which tensors are scaled
    runs: tuple
    compiled: bool = False  # by JAX or TensorFlow, together with other samples of the form

    def drawn(self):
        """The inputs for `judge`."""
        drawn = small.draw_case(self.operation, self.form, self.seed)

        def change(name, value):
            """Scales a tensor or the parts of a state, and writes runs."""
            flat = flatten({name: value})
            flat = {n: self._change(n, array, dtype_of(drawn, n)) for n, array in flat.items()}
            return nest(flat).get(name, value)

        tensors = {name: change(name, t) for name, t in drawn.tensors.items()}
        others = {"d_output": drawn.d_output}
        if drawn.has_state:
            names = ("token_kind", "initial_state", "d_final_state")
            others |= {name: getattr(drawn, name) for name in names}
        others = {name: change(name, value) for name, value in others.items()}
        return drawn._replace(tensors=tensors, **others)

    def _change(self, name, array, dtype):
        """Changes an array of a flat name, of a dtype or None."""
        runs = [run for run in self.runs if run.tensor == name]
        if dtype == "int32" or (dtype is None and not runs):
            return array
        array = array * 2.0 ** self.scales.get(name.partition(" ")[0], 0) if dtype else array.copy()
        for _, start, stop, value in runs:
            array.reshape(-1)[start:stop] = value
        if dtype is None:
            return array
        array = round_to(dtype, array)
        smallest = SMALLEST_NORMAL if dtype != "float64" else 2.0**-1022
        return np.where(np.abs(array) < smallest, 0.0, array)


def dtype_of(drawn, name):
    """The dtype of an array of floats in `Drawn`, "int32", or None for token kinds."""
    if name == "token_kind":
        return None
    return drawn.dtype_of(name.replace("d_output", "output").replace("d_final", "initial"))


# Values of runs. A decay is given by its logarithm, a gate by the argument of its sigmoid.
ANY = (0.0, 1.0, -1.0, 1e-6, -3e-3, 1e3, -1e5)
LOGITS = (0.0, 1e-6, -1e-3, 5.0, -5.0, 17.0, -17.0, 60.0, -60.0, 90.0, -90.0, 1e4, -1e4)
LOGITS += (1e30, -1e30)
LOG_DECAYS = (0.0, -1e-30, -1e-7, -1e-3, -0.1, -10.0, -17.0, -44.0, -88.0, -104.0, -1e4, -1e30)
VALUES = {
    "log_a": (*LOG_DECAYS, -np.inf),
    "log_f": (*LOG_DECAYS, -np.inf),
    "log_decay": LOG_DECAYS,
    "phase": (0.0, 1e-6, np.pi / 2, np.pi, -np.pi, 100.0),
    "gate_a": LOGITS,
    "gate_x": LOGITS,
    "a_logit": LOGITS,
    "gate": (*ANY, 9.0, -9.0, 17.0, -17.0, 90.0, -90.0),
    "logits": LOGITS,
    "token_kind": (0, 1, 2),
}
SCALES = (0, 0, 0, 0, -30, -12, 5, 12, 30)
LOGARITHMS = {name for name in VALUES if name not in ("gate", "token_kind")} | {"lower_bound"}
# The two logarithms of a lower bound depend on each other, and a token is an index.
UNCHANGED = ("lower_bound", "tokens")
DECAYS = ("mixed", "near zero", "near one", "extreme")


@st.composite
def samples(draw, operation, forms, compiled):
    """compiled: strategy of booleans; if true, samples of a form share a compiled program."""
    compiled = draw(compiled)
    form = draw(st.sampled_from(forms))
    seed = draw(st.integers(0, 2**32 - 1))
    over_time = operation in OVER_TIME
    if over_time:
        form = form._replace(decays=draw(st.sampled_from(DECAYS)))
    else:
        form = form._replace(scale=draw(st.sampled_from(["normal", "large", "extreme"])))
    plain = Sample(operation, form, seed, {}, ()).drawn()
    sizes = {n: t.size for n, t in plain.tensors.items() if t is not None and n not in UNCHANGED}
    sizes["d_output"] = plain.d_output.size
    if over_time:
        sizes["d_final_state"] = sizes["initial_state"] = 1
        if plain.token_kind is not None:
            sizes["token_kind"] = plain.token_kind.size
    scales = {}
    for name in sizes:
        if name not in VALUES or name == "gate":
            exponent = draw(st.sampled_from(SCALES))
            scales |= {name: exponent} if exponent else {}
    runs = []
    for _ in range(draw(st.integers(0, 4))):
        name = draw(st.sampled_from([n for n in sizes if "state" not in n]))
        start = draw(st.integers(0, sizes[name] - 1))
        stop = start + draw(st.integers(1, sizes[name] - start))
        runs.append(Run(name, start, stop, draw(st.sampled_from(VALUES.get(name, ANY)))))
    return Sample(operation, form, seed, scales, tuple(runs), compiled)


def overflows_in_bfloat16(operation, drawn):
    """Returns True if gradients overflow in the kernels for bfloat16, as docs/numerics.md says."""
    if operation != "gated_linear_attention" or drawn.dtypes["q"] != "bfloat16":
        return False
    largest = {name: np.abs(t).max(initial=0) for name, t in drawn.tensors.items() if t is not None}
    weight = largest["v"] * np.abs(drawn.d_output).max(initial=0) * drawn.d_output.shape[-1]
    return weight * max(largest["q"], largest.get("k", 1.0)) > 5e10


def check(sample, implementation):
    """Raises an AssertionError if an implementation is too wrong.

    Returns False if the sample says nothing: results overflow, or the call is unsupported.
    """
    drawn = sample.drawn()
    if implementation == "triton" and overflows_in_bfloat16(sample.operation, drawn):
        return False
    defined = judge.definition(sample.operation, drawn)
    with np.errstate(all="ignore"):
        results = [defined(p) for p in (drawn.precision, judge.exact(drawn))]
    largest = 2.0**127 if drawn.precision == "float32" else 2.0**1023
    if not all(np.abs(array).max(initial=0) < largest for r in results for array in r.values()):
        return False

    with np.errstate(all="ignore"):
        try:
            results = judge.run(sample.operation, implementation, drawn, sample.compiled)
        except pytest.skip.Exception:  # The call is unsupported.
            return False
        options = {"neighbors": 32, "floor": flushed(sample.operation, drawn)}
        judge.compare(sample.operation, implementation, drawn, results, defined=defined, **options)
    return True


def flushed(operation, drawn):
    """The error of results if small numbers on the way to them are replaced by 0."""
    arrays = [t for n, t in drawn.tensors.items() if t is not None and n not in LOGARITHMS]
    states = flatten({"initial": drawn.initial_state, "d_final": drawn.d_final_state})
    arrays += [part for name, part in states.items() if "position" not in name]
    largest = [max(1.0, float(np.abs(t).max(initial=0))) for t in (*arrays, drawn.d_output)]
    smallest = FLUSHED.get(operation, SMALLEST_NORMAL)
    if operation == "rg_lru":  # The root is taken of log a = -8 softplus(-a_logit) r.
        lost = SMALLEST_NORMAL
        if drawn.tensors["gate_a"].min() < np.log(SMALLEST_NORMAL):  # r is smaller, too.
            lost *= max(1.0, 8 * np.logaddexp(0, -drawn.tensors["a_logit"]).max())
        smallest = (2 * lost) ** 0.5
    return smallest * float(np.prod(largest))


NUMBER_OF_FORMS = 40
LENGTHS = (1, 2, 3, 7, 16, 17, 31, 40, 64, 65, 130)
TOKEN_WISE_SHAPES = ((1,), (7,), (5, 1), (3, 11, 97), (2, 3, 5, 16), (130, 3), (2, 520), (4, 40))


def forms(operation):
    """The shapes, dtypes and options of samples; JAX compiles programs for each of them.

    On JAX, the suite draws from the first one, with documents, padding and a state.
    """
    rng = np.random.default_rng([*operation.encode()])
    dtypes = [("float32", None), ("bfloat16", None), ("float32", None), ("bfloat16", "float32")]
    dtypes += [("float32", None), ("bfloat16", None), ("float64", None), ("float32", None)]
    found = []
    for number in range(NUMBER_OF_FORMS):
        dtype, other = dtypes[number % len(dtypes)]
        if operation in TOKEN_WISE:
            shape = TOKEN_WISE_SHAPES[rng.integers(len(TOKEN_WISE_SHAPES))]
            form = token_wise.Case(shape, dtype, other, parameter=bool(rng.random() < 0.7))
            form = form._replace(activation=str(rng.choice(["silu", "gelu"])))
        else:
            form = cases.Case(
                batch=int(rng.integers(1, 4)),
                length=int(rng.choice(LENGTHS)),
                channels=int(rng.choice([1, 2, 3, 5, 8, 17])),
                dtype=dtype,
                decay_dtype=other,
                kinds=bool(rng.random() < 0.8),
                state=bool(rng.random() < 0.7),
                tied=bool(rng.random() < 0.3),
                heads=[(4, 2), (2, 2), (3, 1)][rng.integers(3)],
                window=[None, 1, 2, 6, 20][rng.integers(5)],
                activation=[None, "silu"][rng.integers(2)],
            )
            if number == 0:
                form = form._replace(batch=2, length=17, channels=3, kinds=True, state=True)
        found.append(form)
    return found


def size(form):
    """The number of elements, by which forms are sorted."""
    if isinstance(form, cases.Case):
        return form.batch * form.length * form.channels
    return int(np.prod(form.shape))
