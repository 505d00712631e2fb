"""Attention alone: grouped-query heads, any window, circular buffers of any capacity."""

import keras
import numpy as np
import pytest

from keras_recurrent import ops
from tests.ops.cases import Case, align
from tests.ops.cases import draw as draw_operation
from tests.ops.judge import INTERPRETED, PLAIN, check, every_implementation
from tests.ops.test_ops import assert_close

OPERATION = "sliding_window_attention"
CASES = {
    "one query per key": Case(2, 19, 3, heads=(3, 3), kinds=True, state=True),
    "one key for all, a window of one": Case(2, 19, 3, heads=(4, 1), window=1, state=True),
    "a window longer than the sequence": Case(2, 11, 3, heads=(6, 2), window=50, state=True),
    "no window": Case(2, 19, 3, window=None, kinds=True, state=True),
    "no window, several blocks": Case(1, 300, 2, heads=(2, 1), window=None, kinds=True),
    "a window of several blocks": Case(1, 300, 2, heads=(2, 1), window=150, kinds=True, state=True),
    "one token, no window": Case(3, 1, 3, window=None, kinds=True, state=True),
    "one token, bfloat16": Case(3, 1, 16, "bfloat16", heads=(4, 1), kinds=True, state=True),
    "bfloat16, no window": Case(2, 40, 16, "bfloat16", window=None, state=True),
}
# These cases are about the tiles of Triton and cuDNN.
TILES = {
    "bfloat16, whole blocks": Case(2, 128, 16, "bfloat16", kinds=True, window=40),
    "bfloat16, heads of whole vectors": Case(1, 40, 126, "bfloat16", heads=(2, 1), kinds=True),
    "bfloat16, long, window": Case(1, 520, 64, "bfloat16", heads=(2, 1), window=520, values=64),
    "float16, long, odd length": Case(1, 517, 40, "float16", heads=(4, 2), window=None, values=40),
}
each_implementation = every_implementation(OPERATION)
nightly_unless_torch = pytest.mark.nightly if PLAIN != "torch" else ()


def draw(*arguments, seed=0, **options):
    return draw_operation(OPERATION, Case(*arguments, **options), seed)


def draw_tensors(length, batch=2):
    tensors = draw(batch, length, 3).tensors
    return {name: t.astype("float32") for name, t in tensors.items()}


def to_numpy(state):
    return keras.tree.map_structure(keras.ops.convert_to_numpy, state)


@each_implementation
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name) for name, case in CASES.items()]
    + [pytest.param(case, id=name, marks=nightly_unless_torch) for name, case in TILES.items()],
)
def test_attention_matches_definition(implementation, case):
    """Results or gradients are wrong for some window, number of heads, dtype or length."""
    if implementation in INTERPRETED:  # others need longer sequences
        case = case._replace(length=min(case.length, 301))
    check(OPERATION, implementation, draw_operation(OPERATION, case))


@each_implementation
def test_attention_ignores_padding_after_the_tokens(implementation):
    """Kernels skip padding at the end: NaN there reaches a result, or a token is skipped."""
    drawn = draw(3, 40, 3, kinds=True, state=True)
    padding = np.arange(40) >= np.array([[40], [17], [0]])
    drawn = drawn._replace(
        tensors={n: np.where(align(padding, t), np.nan, t) for n, t in drawn.tensors.items()},
        token_kind=np.where(padding, 2, drawn.token_kind == 1).astype("int8"),
    )
    check(OPERATION, implementation, drawn)


def round_to_sixteenths(drawn, **scales):
    """Makes queries and keys multiples of 1/16, times scales: logits are exact in float32."""
    tensors = {
        name: np.round(16 * t) / 16 * scales.get(name, 1) for name, t in drawn.tensors.items()
    }
    return drawn._replace(tensors=tensors)


@each_implementation
def test_attention_with_logits_far_from_zero_keeps_digits(implementation):
    """Logits of about 1024 lose the digits of their differences, on which a softmax depends."""
    drawn = draw(1, 40, 6, kinds=True, window=20)
    for name in ("q", "k"):
        drawn.tensors[name][..., 0] = 32
    check(OPERATION, implementation, round_to_sixteenths(drawn))


@each_implementation
@pytest.mark.parametrize(("dtype", "large"), [("bfloat16", "q"), ("float16", "k")])
def test_attention_to_a_single_key_has_exact_gradients(implementation, dtype, large):
    """A large query or key multiplies the rounding error of a logit's gradient, which is near 0."""
    drawn = draw(1, 40, 6, dtype, kinds=True, window=20)
    check(OPERATION, implementation, round_to_sixteenths(drawn, **{large: 256}))


# Triton is less exact: it computes `delta` from a rounded output (attention_kernels.py).
@pytest.mark.parametrize(
    ("implementation", "tensor", "scale", "seed"),
    [
        (PLAIN, "q", 2e5, 348),
        *([pytest.param("pallas", "q", 2e5, 348, marks=pytest.mark.nightly)] * (PLAIN == "jax")),
        (PLAIN, "q", 4096, 5226),
        (PLAIN, "k", 4096, 5226),
    ],
)
def test_attention_with_huge_logits_matches_definition(implementation, tensor, scale, seed):
    """A logit is rounded differently twice, or gradients of logits do not add up to 0."""
    drawn = draw(3, 31, 1, kinds=True, state=True, heads=(3, 1), window=None, seed=seed)
    drawn.tensors[tensor] *= scale
    check(OPERATION, implementation, drawn)


@pytest.mark.parametrize("capacity", [3, 9])
def test_ring_buffer_with_any_capacity_matches_full_attention(capacity):
    """A token is overwritten too early, is read after it should be, or the capacity changes."""
    tensors, window = draw_tensors(20), 6
    state = {
        "key": np.zeros((2, capacity, 2, 3), "float32"),
        "value": np.zeros((2, capacity, 2, 5), "float32"),
        "position": np.zeros(2, "int32"),
    }
    full, _ = ops.sliding_window_attention(**tensors, sliding_window=min(window, capacity + 1))
    outputs = []
    for t in range(20):
        token = {name: array[:, t : t + 1] for name, array in tensors.items()}
        output, state = ops.sliding_window_attention(
            **token, sliding_window=window, initial_state=state
        )
        outputs.append(keras.ops.convert_to_numpy(output))
    assert_close(np.concatenate(outputs, axis=1), keras.ops.convert_to_numpy(full))
    assert state["key"].shape[1] == capacity


def test_ring_buffer_has_each_token_at_its_position_modulo_capacity():
    """A token is stored in another slot, or tokens of a previous document remain."""
    tensors = draw_tensors(10, batch=1)
    _, state = ops.sliding_window_attention(**tensors, max_length=4)
    state = to_numpy(state)
    for part, tensor in (("key", "k"), ("value", "v")):
        np.testing.assert_array_equal(state[part], tensors[tensor][:, [8, 9, 6, 7]])
    np.testing.assert_array_equal(state["position"], [10])
    segments = np.array([[0] * 8 + [1] * 2])
    _, state = ops.sliding_window_attention(**tensors, max_length=4, segment_ids=segments)
    state = to_numpy(state)
    np.testing.assert_array_equal(state["key"][:, :2], tensors["k"][:, 8:])
    np.testing.assert_array_equal(state["key"][:, 2:], 0)
    np.testing.assert_array_equal(state["position"], [2])


@pytest.mark.parametrize(
    ("sliding_window", "max_length", "capacity"),
    [(6, None, 5), (6, 3, 3), (6, 100, 5), (None, 100, 100), (1, None, 0), (None, None, None)],
)
def test_capacity_of_a_new_state(sliding_window, max_length, capacity):
    """A circular buffer has too many or too few slots. Without a limit, there is no state."""
    q, k, v = (keras.Input((None, heads, 3)) for heads in (4, 2, 2))
    options = {"sliding_window": sliding_window, "max_length": max_length}
    _, state = ops.sliding_window_attention(q, k, v, **options)
    assert (state["key"].shape[1] if state else None) == capacity
    if capacity is None:
        assert ops.sliding_window_attention(**draw_tensors(4))[1] == {}


def test_state_has_dtypes_of_keys_and_values():
    """A state in bfloat16 becomes float32, or stays bfloat16 with tensors of float32."""
    tensors = draw_tensors(4)
    k, v = (keras.ops.cast(tensors[name], "bfloat16") for name in ("k", "v"))
    _, state = ops.sliding_window_attention(tensors["q"], k, v, sliding_window=3)
    dtypes = {n: keras.backend.standardize_dtype(t.dtype) for n, t in state.items()}
    assert dtypes == {"key": "bfloat16", "value": "bfloat16", "position": "int32"}
    _, again = ops.sliding_window_attention(**tensors, sliding_window=3, initial_state=state)
    assert keras.backend.standardize_dtype(again["key"].dtype) == "float32"


@pytest.mark.skipif(PLAIN != "tensorflow", reason="a property of TensorFlow's graphs")
@pytest.mark.parametrize(
    ("jit_compile", "window"),
    [
        (False, None),
        (True, 40),
    ],
)
def test_attention_of_several_blocks_in_a_graph_equals_eager_attention(window, jit_compile):
    """Several blocks in a TensorFlow graph, of static or unknown shapes, have wrong gradients."""
    import tensorflow as tf

    tensors = tf.nest.map_structure(tf.constant, draw_tensors(300, batch=1))

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
        assert_close(tf.nest.map_structure(np.array, function(tensors)), expected)


@pytest.mark.skipif(PLAIN != "jax", reason="JAX reports the memory of a program")
def test_jax_memory_without_a_window_grows_linearly_with_length():
    """All pairs of tokens are stored; only a block of queries meets all keys at a time."""
    import jax

    def temporary_bytes(length):
        tensors = draw_tensors(length, batch=1)
        function = jax.grad(lambda t: ops.sliding_window_attention(**t)[0].sum())
        return jax.jit(function).lower(tensors).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(16384) < 2.5 * temporary_bytes(8192)
