"""Invalid arguments of operations: errors name the argument and what it must be."""

import keras
import numpy as np
import pytest

from keras_recurrent import ops

pytestmark = pytest.mark.once


def zeros(*shape, dtype="float32"):
    return np.zeros(shape, dtype)


def integers(*shape):
    return zeros(*shape, dtype="int32")


def symbolic(channels):
    return keras.Input((None, channels))


X, NO_TOKENS, KIND = zeros(2, 4, 3), zeros(2, 0, 3), zeros(2, 4, dtype="int8")
STATE = {"key": zeros(2, 5, 2, 3), "value": zeros(2, 5, 2, 5), "position": integers(2)}
VALID = {
    "linear_scan": {"x": X, "log_a": X},
    "complex_linear_scan": {"log_a": symbolic(5), "phase": symbolic(5)},
    "causal_conv1d": {"x": X, "kernel": zeros(4, 3)},
    "sliding_window_attention": {"q": zeros(2, 4, 4, 3), "k": zeros(2, 4, 2, 3)}
    | {"v": zeros(2, 4, 2, 5)},
    "scalar_decay_attention": {"q": zeros(2, 4, 2, 5), "k": zeros(2, 4, 2, 5)}
    | {"v": zeros(2, 4, 3, 3), "log_decay": X},
    "rms_norm": {"x": X, "epsilon": 0},
    "gated_linear_unit": {"gate": X, "x": X, "activation": "silu"},
    "log_forget_gate": {"logits": X},
    "token_crossentropy": {"logits": X, "tokens": integers(2, 4)},
    "linear_crossentropy": {"x": zeros(3, 5), "embedding": zeros(11, 5), "tokens": integers(3)},
    "token_kind": {"like": X},
}
# {operation: [(arguments that replace valid ones, message)]}
INVALID = {
    "linear_scan": [
        ({"x": zeros(2, 3)}, r"`x` must have 3 dimensions, \[B"),
        ({"log_a": zeros(2, 5, 3)}, "`log_a` must have the shape"),
        ({"x": NO_TOKENS, "log_a": NO_TOKENS}, r"`x` .* one token; .* \(2, 0, 3\) for \[B, T, D\]"),
        ({"x": X[:0], "log_a": X[:0]}, r"`x` must have no empty dimension; .* shape \(0, 4, 3\)"),
        ({"x": integers(2, 4, 3)}, "`x` must be one of float16"),
        ({"log_a": None}, "needs the argument `log_a`"),
        ({"initial_state": zeros(2, 4)}, "`initial_state`"),
        ({"mask": zeros(2, 3, dtype="bool")}, "`mask` must have the shape"),
        (
            {"mask": zeros(2, 4)},
            "`mask` must be boolean, .* integers, 0 at padding; got float32",
        ),
        ({"segment_ids": zeros(2, 4)}, "`segment_ids` must be integers"),
        ({"previous_segment_id": integers(3)}, "`previous_segment_id`"),
        ({"token_kind": KIND[:, :3]}, "`token_kind` must have the shape"),
        ({"token_kind": integers(2, 4)}, "`token_kind` must be int8"),
        ({"token_kind": KIND, "mask": KIND == 0}, "got both `token_kind` and `mask`"),
        ({"token_kind": KIND, "reverse": True}, "got both `token_kind` and `reverse`"),
        ({"reverse": "no"}, "`reverse` must be True or False; got 'no'"),
        ({"implementation": "cuda"}, "`implementation` must be one of"),
        ({"x": symbolic(4), "log_a": symbolic(5)}, "`log_a` must have the shape"),
    ],
    "complex_linear_scan": [({"x": symbolic(8)}, "2D should be 10, not 8")],
    "causal_conv1d": [
        ({"activation": "relu"}, "`activation` must be None or 'silu'; got 'relu'"),
        ({"activation": "relu", "x": symbolic(3)}, "`activation` must be None or 'silu'"),
    ],
    "sliding_window_attention": [
        ({"q": zeros(2, 4, 3, 3)}, "heads of `k` and `v`, 2, must divide .* 3"),
        ({"sliding_window": 0}, "`sliding_window` must be an integer, at least 1"),
        ({"sliding_window": 4.0}, "`sliding_window` must be an integer"),
        ({"max_length": -1}, "`max_length` must be an integer, at least 1"),
        ({"initial_state": zeros(2)}, "must be a dict of .*got"),
        ({"initial_state": {}}, r"must be a dict of \['key', 'position', 'value'\]"),
        (
            {"initial_state": STATE | {"value": zeros(2, 4, 2, 5)}},
            r"initial_state\['value'\]. must have the shape .*C should be 5, not 4",
        ),
        (
            {"initial_state": STATE | {"position": zeros(2)}},
            r"initial_state\['position'\]. must be integers",
        ),
    ],
    "scalar_decay_attention": [({}, "heads of `q` and `k`, 2, must divide .* `v` .* 3")],
    "rms_norm": [
        ({"scale": X[0]}, r"`scale` must have 1 dimension, \[D\]"),
        ({"scale": zeros(2)}, "`scale` .* D should be 3, not 2"),
        ({"x": X[0, 0, 0]}, r"at least 1 dimension, \[..., D\]"),
        ({"x": integers(2, 4, 3)}, "`x` must be one of float16"),
        ({"x": None}, "needs the argument `x`"),
        ({"epsilon": -1.0}, "`epsilon` must be .* at least 0; got -1.0"),
        ({"epsilon": float("nan")}, "`epsilon` must be a finite .*; got nan"),
        ({"epsilon": float("inf")}, "`epsilon` must be a finite .*; got inf"),
        ({"epsilon": True}, "`epsilon` must be a finite .*; got True"),
        ({"epsilon": "0"}, "`epsilon` must be a finite number"),
    ],
    "gated_linear_unit": [
        ({"activation": "relu"}, "`activation` must be 'silu' or 'gelu'; got 'relu'"),
        ({"x": X[:1]}, r"`x` must have the shape \[...\], with ... = \(2, 4, 3\); .* \(1, 4, 3\)"),
        ({"gate": symbolic(4), "x": symbolic(5)}, r"got the shape \(None, None, 5\)"),
    ],
    "log_forget_gate": [
        ({"lower_bound": X[0]}, r"`lower_bound` must .* shape \[2, D\], .*D = 3; .* \(4, 3\)"),
        ({"implementation": "cuda"}, "`implementation` must be one of"),
    ],
    "token_crossentropy": [
        ({"tokens": X[..., 0]}, "`tokens` must be integers; got float32"),
        ({"tokens": integers(2, 4, 1)}, r"`tokens` must .* ... = \(2, 4\).* shape \(2, 4, 1\)"),
        ({"logits": X[..., :0]}, r"vocabulary of at least one token; got the shape \(2, 4, 0\)"),
    ],
    "linear_crossentropy": [
        ({"soft_cap": 0}, "`soft_cap` must be a finite number above 0.*got 0"),
        ({"soft_cap": float("nan")}, "`soft_cap` must be a finite number above 0"),
        ({"reduction": "mean"}, "`reduction` must be 'sum', or None.*got 'mean'"),
        ({"embedding": zeros(0, 5)}, "vocabulary of at least one token"),
        ({"embedding": zeros(11, 4)}, "`embedding` must have the shape"),
        ({"tokens": zeros(3)}, "`tokens` must be integers"),
        ({"sample_weight": zeros(2)}, "`sample_weight` must have the shape"),
    ],
    "token_kind": [
        ({"mask": zeros(2, 3, dtype="bool")}, "`mask` must have the shape"),
        ({"segment_ids": integers(5)}, "`segment_ids` must have the shape"),
        ({"previous_segment_id": integers(3)}, "`previous_segment_id` must have the shape"),
        ({"mask": zeros(2, 4)}, "`mask` must be .*; got float32"),
        ({"segment_ids": zeros(2, 4)}, "`segment_ids` must be .*; got float32"),
        ({"previous_segment_id": zeros(2)}, "`previous_segment_id` must be .*; got float32"),
        ({"like": zeros(5)}, r"`like` must have the shape \[batch, time, ...\]; got"),
        ({"like": "abc"}, "`like` must be a tensor"),
    ],
}
PARAMS = {
    f"{operation}, {' and '.join(changed)}, {i}": (operation, VALID[operation] | changed, message)
    for operation, changes in INVALID.items()
    for i, (changed, message) in enumerate(changes)
}


@pytest.mark.parametrize(("operation", "arguments", "message"), PARAMS.values(), ids=PARAMS)
def test_invalid_argument_is_named(operation, arguments, message):
    """An invalid argument is accepted, or the error says something else."""
    with pytest.raises(ValueError, match=message):
        getattr(ops, operation)(**arguments)


@pytest.mark.parametrize("value", ["abc", object(), [[[1.0], [1.0, 2.0]]], {"a": np.ones(1)}])
@pytest.mark.parametrize(
    ("operation", "name"),
    [("linear_scan", "x"), ("linear_scan", "mask"), ("rms_norm", "x"), ("token_kind", "mask")],
)
def test_argument_that_is_not_a_tensor_is_named(operation, name, value):
    """A value that cannot become a tensor raises an error of NumPy or the backend."""
    with pytest.raises(ValueError, match=f"`{operation}`: `{name}` must be"):
        getattr(ops, operation)(**VALID[operation] | {name: value})
