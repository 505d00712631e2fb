"""Draw inputs of the operations freely, and judge what an implementation makes of them.

A `Sample` is small and plain, so that a counterexample fits on a few lines and can be run again:
`check(sample, implementation)`. Numbers come from a seed; on top of them whole tensors may be
scaled, and runs of neighboring numbers may all be the same one, as extreme as the operation allows.
"""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import strategies as st

from tests.ops import cases, judge, native, token_wise
from tests.ops.cases import DRAW, beside, named, round_to, unit, unnamed

OVER_TIME = list(DRAW)
TOKEN_WISE = list(token_wise.DRAW)
# Below them, in bfloat16 as in float32, numbers lose digits, and processors may take them for 0.
SMALLEST_NORMAL = 2.0**-126
FLUSHED = {
    "log_forget_gate": 2 * SMALLEST_NORMAL,  # in Triton, a shut gate ends at exp(-87)
}


class Run(NamedTuple):
    """The numbers of a tensor, in their order in memory, from one to before another."""

    tensor: str
    start: int
    stop: int
    value: float


class Sample(NamedTuple):
    operation: str
    form: cases.Case | token_wise.Case
    seed: int
    scales: dict  # of tensors: exponents of 2
    runs: tuple
    cut: int | None = None  # the sequence is also computed in two parts, cut before this token
    poisoned: bool = False  # padding holds what is not finite
    compiled: bool = False  # by JAX or TensorFlow, together with other samples of the form

    def drawn(self):
        """What `judge` takes, made of the sample."""
        over_time = self.operation in OVER_TIME
        draw = cases.draw if over_time else token_wise.draw
        drawn = draw(self.operation, self.form, self.seed)
        tensors = {name: self._changed(name, t, drawn.dtypes) for name, t in drawn.tensors.items()}
        drawn = drawn._replace(tensors=tensors)
        if not over_time:
            dtypes = {"d_output": drawn.output_dtype}
            return drawn._replace(d_output=self._changed("d_output", drawn.d_output, dtypes))
        dtypes = {**drawn.dtypes, "d_output": drawn.dtypes[drawn.output], "token_kind": None}
        for name in ("d_output", "token_kind"):
            drawn = drawn._replace(**{name: self._changed(name, getattr(drawn, name), dtypes)})
        for name in ("initial_state", "d_final_state"):
            state = getattr(drawn, name)
            parts = {
                part: self._changed(name, array, dtypes, part)
                for part, array in named("state", state).items()
            }
            if parts:
                drawn = drawn._replace(**{name: unnamed("state", parts)})
        return drawn

    def _changed(self, name, array, dtypes, dtype_name=None):
        dtype = dtypes.get(dtype_name or name)
        changes = [run for run in self.runs if run.tensor == name]
        if array is None or (dtype is None and not changes) or dtype == "int32":
            return array
        array = array * 2.0 ** self.scales.get(name, 0) if dtype else array.copy()
        for _, start, stop, value in changes:
            array.reshape(-1)[start:stop] = value
        if dtype is None:
            return array
        array = round_to(dtype, array)
        smallest = SMALLEST_NORMAL if dtype != "float64" else 2.0**-1022
        return np.where(np.abs(array) < smallest, 0.0, array)


# What a run may hold. A decay is given by its logarithm, a gate by what comes before its sigmoid.
ANY = (0.0, 1.0, -1.0, 1e-6, -3e-3, 1e3, -1e5)
LOGITS = (
    0.0,
    1e-6,
    -1e-3,
    5.0,
    -5.0,
    17.0,
    -17.0,
    60.0,
    -60.0,
    90.0,
    -90.0,
    1e4,
    -1e4,
    1e30,
    -1e30,
)
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
# A lower bound is a pair of logarithms that belong together, and a token is a number by itself.
AS_DRAWN = ("lower_bound", "tokens")


@st.composite
def samples(draw, operation, forms, compiled):
    """compiled: a strategy for whether JAX or TensorFlow make a program for all samples of a form.

    Programs are as many as lengths: those samples are cut in the middle, the others anywhere.
    """
    compiled = draw(compiled)
    form = draw(st.sampled_from(forms))
    seed = draw(st.integers(0, 2**32 - 1))
    if operation in OVER_TIME:
        form = form._replace(decays=draw(st.sampled_from(DECAY_CHOICES)))
    else:
        form = form._replace(scale=draw(st.sampled_from(["normal", "large", "extreme"])))
    plain = Sample(operation, form, seed, {}, ()).drawn()
    sizes = {n: t.size for n, t in plain.tensors.items() if t is not None and n not in AS_DRAWN}
    sizes["d_output"] = plain.d_output.size
    if operation in OVER_TIME:
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
    cut, poisoned = None, False
    # Without a window attention reaches all of a row, but only what a state has room for in parts.
    unbounded = operation == "sliding_window_attention" and form.window is None
    if operation in OVER_TIME and not unbounded and form.length > 1 and draw(st.booleans()):
        cut = (form.length + 1) // 2 if compiled else draw(st.integers(1, form.length - 1))
    if operation in OVER_TIME and form.kinds:
        poisoned = draw(st.booleans())
    return Sample(operation, form, seed, scales, tuple(runs), cut, poisoned, compiled)


DECAY_CHOICES = ("mixed", "near zero", "near one", "extreme")


def beyond_range(operation, drawn):
    """Whether docs/numerics.md says that gradients overflow in the kernels for bfloat16."""
    if operation != "gated_linear_attention" or drawn.dtypes["q"] != "bfloat16":
        return False
    largest = {name: np.abs(t).max(initial=0) for name, t in drawn.tensors.items() if t is not None}
    weight = largest["v"] * np.abs(drawn.d_output).max(initial=0) * drawn.d_output.shape[-1]
    return weight * max(largest["q"], largest.get("k", 1.0)) > 5e10


def check(sample, implementation):
    """Raises an AssertionError where an implementation is too wrong.

    Returns whether the sample says anything: its results fit into its dtypes, and the
    implementation does not refuse it.
    """
    drawn = sample.drawn()
    if implementation == "triton" and beyond_range(sample.operation, drawn):
        return False
    precision = "float64" if "float64" in drawn.dtypes.values() else "float32"
    defined = judge.definition(sample.operation, drawn)
    with np.errstate(all="ignore"):
        fits = [defined(p) for p in (precision, judge.exact(drawn))]
    largest = 2.0**127 if precision == "float32" else 2.0**1023
    if not all(np.abs(result).max(initial=0) < largest for r in fits for result in r.values()):
        return False
    with np.errstate(all="ignore"), native.precision(precision):
        given = poisoned(drawn, sample.seed) if sample.poisoned else drawn
        try:
            results = judge.run(sample.operation, implementation, given, sample.compiled)
        except pytest.skip.Exception:  # the implementation refuses
            return False
        if sample.poisoned:
            real = beside(results["output"], drawn.token_kind) != 2
            results["output"] = np.where(real, results["output"], 0)
        compare(sample.operation, implementation, drawn, results, defined)
        if sample.cut is not None:
            results, extra = in_parts(sample, implementation, drawn)
            compare(sample.operation, implementation, drawn, results, defined, extra)
    return True


def compare(operation, implementation, drawn, results, defined, extra=None):
    judge.compare(
        operation,
        implementation,
        drawn,
        results,
        neighbors=32,
        floor=flushed(operation, drawn),
        extra=extra,
        defined=defined,
    )


def flushed(operation, drawn):
    """How much results may change where numbers on the way to them are taken for 0."""
    given = [t for n, t in drawn.tensors.items() if t is not None and n not in LOGARITHMS]
    given.append(drawn.d_output)
    if operation in OVER_TIME:
        states = named("", drawn.initial_state), named("", drawn.d_final_state)
        given += [
            part for state in states for name, part in state.items() if "position" not in name
        ]
    largest = [max(1.0, float(np.abs(t).max(initial=0))) for t in given]
    smallest = FLUSHED.get(operation, SMALLEST_NORMAL)
    if operation == "rg_lru":  # the root is taken of log a = -8 softplus(-a_logit) r
        lost = SMALLEST_NORMAL
        if drawn.tensors["gate_a"].min() < np.log(SMALLEST_NORMAL):  # r is below it, too
            lost *= max(1.0, 8 * np.logaddexp(0, -drawn.tensors["a_logit"]).max())
        smallest = (2 * lost) ** 0.5
    return smallest * float(np.prod(largest))


def poisoned(drawn, seed):
    """NaN and infinities at padding, in every tensor over time."""
    rng = np.random.default_rng(seed)
    padding = drawn.token_kind == 2

    def poison(tensor):
        if tensor is None or tensor.ndim < 3:
            return tensor
        noise = rng.choice([np.nan, np.inf, -np.inf], tensor.shape)
        return np.where(beside(tensor, padding), noise, tensor)

    return drawn._replace(tensors={name: poison(t) for name, t in drawn.tensors.items()})


def in_parts(sample, implementation, drawn):
    """The results of the sequence in two parts, and what rounding between them may add."""
    cut = sample.cut

    def part(where, **changes):
        def of(array):
            return array if array is None or array.ndim < 3 else array[:, where]

        kind = None if drawn.token_kind is None else drawn.token_kind[:, where]
        part = drawn._replace(
            tensors={name: of(t) for name, t in drawn.tensors.items()},
            token_kind=kind,
            d_output=drawn.d_output[:, where],
            **changes,
        )
        return judge.run(sample.operation, implementation, part, sample.compiled)

    def state_of(results, name):
        return unnamed(name, {n: r for n, r in results.items() if n.startswith(name)})

    left = part(slice(0, cut))
    right = part(slice(cut, None), initial_state=state_of(left, "final_state"))
    d_state = state_of(right, "gradient of initial_state")
    left = part(slice(0, cut), d_final_state=d_state)
    results, extra = {}, {}
    handed = max(np.abs(d).max(initial=0) for d in named("", d_state).values())
    for name in right:
        dtype = judge.dtype_of(drawn, name)
        tensor = drawn.tensors.get(name.removeprefix("gradient of "))
        if name == "output" or (tensor is not None and tensor.ndim >= 3):
            results[name] = np.concatenate([left[name], right[name]], axis=1)
        elif tensor is not None:
            results[name] = left[name] + right[name]
            largest = max(np.abs(p[name]).max(initial=0) for p in (left, right))
            extra[name] = unit(dtype, largest)
        elif name.startswith("final_state"):
            results[name] = right[name]
        elif name in left:
            results[name] = left[name]
        if name.startswith("gradient") and name in results:
            extra[name] = extra.get(name, 0) + unit(judge.dtype_of_last_place(drawn, name), handed)
    return results, extra


def forms(operation):
    """What samples may look like, but for their numbers: JAX compiles programs for each of these.

    The suite draws from the first, with documents, padding and a state, on JAX.
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


NUMBER_OF_FORMS = 40
LENGTHS = (1, 2, 3, 7, 16, 17, 31, 40, 64, 65, 130)
TOKEN_WISE_SHAPES = ((1,), (7,), (5, 1), (3, 11, 97), (2, 3, 5, 16), (130, 3), (2, 520), (4, 40))


def size(form):
    if isinstance(form, cases.Case):
        return form.batch * form.length * form.channels
    return int(np.prod(form.shape))
