"""Attention's own features: grouped-query heads, any window, ring buffers of any capacity."""

import keras
import numpy as np
import pytest

from keras_recurrent import ops
from tests.ops.cases import Case, beside, draw
from tests.ops.judge import PLAIN, check
from tests.ops.test_kernels import every_implementation
from tests.ops.test_ops import close

CASES = {
    "every query has keys of its own": Case(2, 19, 3, heads=(3, 3), kinds=True, state=True),
    "one key for all, a window of one": Case(2, 19, 3, heads=(4, 1), window=1, state=True),
    "a window longer than the row": Case(2, 11, 3, heads=(6, 2), window=50, state=True),
    "no window": Case(2, 19, 3, window=None, kinds=True, state=True),
    "no window, several blocks": Case(1, 300, 2, heads=(2, 1), window=None, kinds=True),
    "a window of several blocks": Case(1, 300, 2, heads=(2, 1), window=150, kinds=True, state=True),
    "one token, no window": Case(3, 1, 3, window=None, kinds=True, state=True),
    "one token, bfloat16": Case(3, 1, 16, "bfloat16", heads=(4, 1), kinds=True, state=True),
    "bfloat16, no window": Case(2, 40, 16, "bfloat16", window=None, state=True),
    "bfloat16, whole blocks": Case(2, 128, 16, "bfloat16", kinds=True, window=40),
    "bfloat16, heads of whole vectors": Case(1, 40, 126, "bfloat16", heads=(2, 1), kinds=True),
    "bfloat16, a long row in a window": Case(
        1, 520, 64, "bfloat16", heads=(2, 1), window=520, values=64
    ),
    "float16, a long row of odd length": Case(
        1, 517, 40, "float16", heads=(4, 2), window=None, values=40
    ),
}


# These cases are about tiles of Triton and cuDNN.
KERNELS_ONLY = [
    "bfloat16, whole blocks",
    "bfloat16, heads of whole vectors",
    "bfloat16, a long row in a window",
    "float16, a long row of odd length",
]


@every_implementation("sliding_window_attention")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=name,
            marks=pytest.mark.nightly if PLAIN != "torch" and name in KERNELS_ONLY else (),
        )
        for name, case in CASES.items()
    ],
)
def test_forward_and_gradients(implementation, case):
    check("sliding_window_attention", implementation, draw("sliding_window_attention", case))


@every_implementation("sliding_window_attention")
def test_padding_behind_the_tokens(implementation):
    """Where it may be left, it may hold anything, too."""
    case = draw("sliding_window_attention", Case(3, 40, 3, kinds=True, state=True))
    padding = np.arange(40) >= np.array([[40], [17], [0]])
    case = case._replace(
        tensors={n: np.where(beside(t, padding), np.nan, t) for n, t in case.tensors.items()},
        token_kind=np.where(padding, 2, case.token_kind == 1).astype("int8"),
    )
    check("sliding_window_attention", implementation, case)


def on_a_grid(case, **scales):
    """Queries and keys that are multiples of 1/16: logits are exact, as far as float32 has them."""
    tensors = {
        name: np.round(16 * t) / 16 * scales.get(name, 1) for name, t in case.tensors.items()
    }
    return case._replace(tensors=tensors)


@every_implementation("sliding_window_attention")
def test_logits_far_from_zero(implementation):
    """A softmax depends on differences: with logits about 1024 it keeps all of its digits."""
    case = draw("sliding_window_attention", Case(1, 40, 6, kinds=True, window=20))
    for name in ("q", "k"):
        case.tensors[name][..., 0] = 32
    check("sliding_window_attention", implementation, on_a_grid(case))


@every_implementation("sliding_window_attention")
@pytest.mark.parametrize(
    ("dtype", "large"), [("bfloat16", "q"), ("bfloat16", "k"), ("float16", "k")]
)
def test_queries_that_attend_to_one_key(implementation, dtype, large):
    """The gradient of a logit is all but 0 there; a large query or key multiplies its error."""
    case = draw("sliding_window_attention", Case(1, 40, 6, dtype, kinds=True, window=20))
    check("sliding_window_attention", implementation, on_a_grid(case, **{large: 256}))


# Triton takes `delta` from a rounded output: see `triton/_attention/attention_kernels.py`.
@pytest.mark.parametrize("implementation", [PLAIN, *(["pallas"] if PLAIN == "jax" else [])])
def test_logits_of_a_million(implementation):
    """A weight must not depend on whether its logit is rounded in the same way twice."""
    form = {"kinds": True, "state": True, "heads": (3, 1), "window": None}
    case = draw("sliding_window_attention", Case(3, 31, 1, **form), seed=348)
    case.tensors["q"] *= 2e5
    check("sliding_window_attention", implementation, case)


@pytest.mark.parametrize("large", ["q", "k"])
def test_gradients_of_logits_add_up_to_zero(large):
    """To the last place of a gradient, not of a weight's share: large keys multiply the sum."""
    form = {"kinds": True, "state": True, "heads": (3, 1), "window": None}
    case = draw("sliding_window_attention", Case(3, 31, 1, **form), seed=5226)
    case.tensors[large] *= 4096
    check("sliding_window_attention", PLAIN, case)


def drawn(length, batch=2):
    tensors = draw("sliding_window_attention", Case(batch, length, 3)).tensors
    return {name: t.astype("float32") for name, t in tensors.items()}


def at(tensors, where):
    return {name: t[:, where] for name, t in tensors.items()}


@pytest.mark.parametrize("room", [3, 5, 9])
def test_a_ring_of_any_room(room):
    """What fits into it is seen later, and no more; one larger than the window costs nothing."""
    tensors, window = drawn(20), 6
    state = {
        "key": np.zeros((2, room, 2, 3), "float32"),
        "value": np.zeros((2, room, 2, 5), "float32"),
        "position": np.zeros(2, "int32"),
    }
    whole, _ = ops.sliding_window_attention(**tensors, sliding_window=min(window, room + 1))
    outputs = []
    for t in range(20):
        output, state = ops.sliding_window_attention(
            **at(tensors, slice(t, t + 1)), sliding_window=window, initial_state=state
        )
        outputs.append(keras.ops.convert_to_numpy(output))
    close(np.concatenate(outputs, axis=1), keras.ops.convert_to_numpy(whole))
    assert state["key"].shape[1] == room


def test_where_each_token_lies():
    tensors = drawn(10, batch=1)
    _, state = ops.sliding_window_attention(**tensors, max_length=4)
    state = keras.tree.map_structure(keras.ops.convert_to_numpy, state)
    np.testing.assert_array_equal(state["key"], tensors["k"][:, [8, 9, 6, 7]])
    np.testing.assert_array_equal(state["value"], tensors["v"][:, [8, 9, 6, 7]])
    np.testing.assert_array_equal(state["position"], [10])
    segments = np.array([[0] * 8 + [1] * 2])
    _, state = ops.sliding_window_attention(**tensors, max_length=4, segment_ids=segments)
    state = keras.tree.map_structure(keras.ops.convert_to_numpy, state)
    np.testing.assert_array_equal(state["key"][:, :2], tensors["k"][:, 8:])
    np.testing.assert_array_equal(state["key"][:, 2:], 0)
    np.testing.assert_array_equal(state["position"], [2])


def test_room_of_a_new_state():
    q, k, v = (keras.Input((None, heads, 3)) for heads in (4, 2, 2))

    def room(**options):
        _, state = ops.sliding_window_attention(q, k, v, **options)
        return state["key"].shape[1]

    assert room(sliding_window=6) == 5
    assert room(sliding_window=6, max_length=3) == 3
    assert room(sliding_window=6, max_length=100) == 5
    assert room(max_length=100) == 100
    assert room(sliding_window=1) == 0
    assert ops.sliding_window_attention(q, k, v)[1] == {}
    assert ops.sliding_window_attention(**drawn(4))[1] == {}


def test_a_state_keeps_its_dtypes():
    tensors = drawn(4)
    k, v = (keras.ops.cast(tensors[name], "bfloat16") for name in ("k", "v"))
    _, state = ops.sliding_window_attention(tensors["q"], k, v, sliding_window=3)
    dtypes = {n: keras.backend.standardize_dtype(t.dtype) for n, t in state.items()}
    assert dtypes == {"key": "bfloat16", "value": "bfloat16", "position": "int32"}
    _, again = ops.sliding_window_attention(**tensors, sliding_window=3, initial_state=state)
    assert keras.backend.standardize_dtype(again["key"].dtype) == "float32"


BAD = {
    "heads": (
        {"q": np.zeros((2, 4, 3, 3), "float32")},
        "heads of `k` and `v`, 2, must divide .* 3",
    ),
    "window": ({"sliding_window": 0}, "`sliding_window` must be an integer, at least 1"),
    "window dtype": ({"sliding_window": 4.0}, "`sliding_window` must be an integer"),
    "length": ({"max_length": -1}, "`max_length` must be an integer, at least 1"),
    "state": ({"initial_state": np.zeros(2, "float32")}, "must be a dict of .*got"),
    "parts": ({"initial_state": {}}, r"must be a dict of \['key', 'position', 'value'\]"),
    "room": (
        {
            "initial_state": {
                "key": np.zeros((2, 5, 2, 3), "float32"),
                "value": np.zeros((2, 4, 2, 5), "float32"),
                "position": np.zeros(2, "int32"),
            }
        },
        r"initial_state\['value'\]. must have the shape .*C should be 5, not 4",
    ),
    "position": (
        {
            "initial_state": {
                "key": np.zeros((2, 5, 2, 3), "float32"),
                "value": np.zeros((2, 5, 2, 5), "float32"),
                "position": np.zeros(2, "float32"),
            }
        },
        r"initial_state\['position'\]. must be integers",
    ),
}


@pytest.mark.once
@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD.keys())
def test_bad_arguments_name_themselves(arguments, message):
    with pytest.raises(ValueError, match=message):
        ops.sliding_window_attention(**(drawn(4) | arguments))


@pytest.mark.skipif(keras.config.backend() != "tensorflow", reason="shapes in a graph")
@pytest.mark.parametrize(
    ("jit_compile", "window"),
    [
        (False, None),
        (True, 40),
        pytest.param(False, 40, marks=pytest.mark.nightly),
        pytest.param(True, None, marks=pytest.mark.nightly),
    ],
)
def test_several_blocks_in_a_graph(window, jit_compile):
    import tensorflow as tf

    tensors = tf.nest.map_structure(tf.constant, drawn(300, batch=1))

    def gradients(tensors):
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            output, _ = ops.sliding_window_attention(**tensors, sliding_window=window)
            value = tf.reduce_sum(tf.sin(output))
        return tape.gradient(value, tensors)

    expected = gradients(tensors)
    unknown = {n: tf.TensorSpec([None, None, *t.shape[2:]]) for n, t in tensors.items()}
    for signature in (None, [unknown]):
        function = tf.function(gradients, jit_compile=jit_compile, input_signature=signature)
        close(tf.nest.map_structure(np.array, function(tensors)), expected)


@pytest.mark.skipif(keras.config.backend() != "jax", reason="JAX tells what a program needs")
def test_cost_grows_with_the_window_not_with_the_square():
    import jax

    def cost(length, window):
        tensors = drawn(length, batch=1)
        function = jax.grad(
            lambda t: ops.sliding_window_attention(**t, sliding_window=window)[0].sum()
        )
        return jax.jit(function).lower(tensors).compile().memory_analysis().temp_size_in_bytes

    assert cost(16384, 256) < 2.5 * cost(8192, 256)
    # Without a window only a block of queries meets all keys at a time.
    assert cost(16384, None) < 2.5 * cost(8192, None)
