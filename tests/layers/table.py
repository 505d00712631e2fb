"""The layers under test, one row each, and helpers of all tests of layers and models."""

import inspect
import itertools
import math
import re
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest

from keras_recurrent import layers


class Row(NamedTuple):
    cls: type[keras.layers.Layer]
    arguments: dict[str, Any] = {}
    # Shapes of the state's arrays without the batch axis. If None, the layer has no state.
    state: dict | None = None

    def make(self, **kwargs):
        return self.cls(**{**self.arguments, **kwargs})


WIDTH = 8  # width of all inputs; equal shapes share XLA programs
WINDOW = {
    "num_query_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "sliding_window": 4,
    "partial_rotary_factor": 0.5,
}
WINDOW_STATE = {"key": (3, 2, 4), "value": (3, 2, 4), "position": (), "segment": ()}
BLOCK = {"lru_width": 12, "kernel_size": 3}
BLOCK_STATE = {"conv1d": {"inputs": (2, 12)}, "segment": ()}
ROWS = {
    "RGLRU": Row(layers.RGLRU, {"num_blocks": 4}, {"hidden": (8,), "segment": ()}),
    "CGLRU": Row(
        layers.CGLRU,
        {"num_blocks": 2, "scale_first_input": True},
        {"hidden": (8,), "segment": ()},
    ),
    "CausalConv1D": Row(layers.CausalConv1D, {"kernel_size": 4}, {"inputs": (3, 8), "segment": ()}),
    "CausalConv1D with silu": Row(
        layers.CausalConv1D,
        {"kernel_size": 4, "activation": "silu"},
        {"inputs": (3, 8), "segment": ()},
    ),
    "CausalConv1D of one token": Row(
        layers.CausalConv1D,
        {"kernel_size": 1, "use_bias": False},
        {"inputs": (0, 8), "segment": ()},
    ),
    "RecurrentBlock": Row(
        layers.RecurrentBlock,
        {**BLOCK, "num_blocks": 4, "scale_first_input": True},
        {**BLOCK_STATE, "rg_lru": {"hidden": (12,)}},
    ),
    "RecurrentBlock with CGLRU": Row(
        layers.RecurrentBlock,
        {**BLOCK, "num_blocks": 3, "recurrence": "cg_lru"},
        {**BLOCK_STATE, "cg_lru": {"hidden": (12,)}},
    ),
    "LocalAttention": Row(layers.LocalAttention, WINDOW, WINDOW_STATE),
    "LocalAttention to all": Row(
        layers.LocalAttention,
        {"num_query_heads": 2, "head_dim": 4, "max_length": 12},
        {"key": (12, 1, 4), "value": (12, 1, 4), "position": (), "segment": ()},
    ),
    "LocalAttention with all options": Row(
        layers.LocalAttention,
        {
            **WINDOW,
            "use_qkv_bias": True,
            "use_output_bias": False,
            "use_qk_norm": True,
            "use_output_gate": True,
            "query_scale": 0.3,
            "logit_scaling": 2.5,
            "layer_norm_epsilon": 1e-2,
        },
        WINDOW_STATE,
    ),
    "HGRN2": Row(layers.HGRN2, {"expand_ratio": 4}, {"memory": (2, 4, 4), "segment": ()}),
    "HGRN2 of the paper, with convolutions": Row(
        layers.HGRN2,
        {
            "expand_ratio": 2,
            "gate_activation": "sigmoid",
            "input_activation": "silu",
            "conv_size": 3,
            "f_bias_initializer": "ones",
        },
        {
            "memory": (4, 2, 2),
            "segment": (),
            **{f"{name}_conv1d": {"inputs": (2, 8)} for name in "qfi"},
        },
    ),
    "HGRN": Row(layers.HGRN, {}, {"hidden": (8,), "segment": ()}),
    "LightningAttention": Row(
        layers.LightningAttention,
        # With positions and activations that the models do not have.
        {
            **{"num_heads": 4, "head_dim": 2, "layer_index": 1, "num_layers": 3, "use_lrpe": True},
            **{"value_activation": "silu", "query_key_activation": "sigmoid"},
        },
        {"memory": (4, 4, 2), "segment": (), "position": ()},
    ),
    "LightningAttention of HypeNet": Row(
        layers.LightningAttention,
        {
            "num_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 2,
            "decay_schedule": "alibi",
            "rope_max_wavelength": 100,
            "query_scale": 0.5,
            "use_qk_norm": True,
            "use_norm_weight": True,
            "layer_norm_epsilon": 1e-2,
            "query_key_activation": "linear",
            "gate_activation": "sigmoid",
        },
        {"memory": (4, 2, 2), "segment": (), "position": ()},
    ),
    "GatedShortConv": Row(
        layers.GatedShortConv,
        {"kernel_size": 4, "use_bias": True},
        {"conv1d": {"inputs": (3, 8)}, "segment": ()},
    ),
    "Mamba2": Row(
        layers.Mamba2,
        {"num_heads": 4, "head_dim": 3, "state_dim": 2, "num_groups": 2, "conv_size": 3},
        {
            "memory": (4, 2, 3),
            "x_conv1d": {"inputs": (2, 12)},
            "bc_conv1d": {"inputs": (2, 8)},
            "segment": (),
        },
    ),
    "Mamba2 with a norm before the gate": Row(
        layers.Mamba2,
        {
            **{"num_heads": 2, "head_dim": 4, "state_dim": 3, "norm_position": "before_gate"},
            **{"use_conv_bias": False, "projection_scales": (0.5, 1.5, 2.0, 0.8, 3.0)},
        },
        {
            "memory": (2, 3, 4),
            "x_conv1d": {"inputs": (3, 8)},
            "bc_conv1d": {"inputs": (3, 6)},
            "segment": (),
        },
    ),
    "GatedMLP": Row(layers.GatedMLP, {"intermediate_dim": 12}),
    "SwiGLU": Row(layers.SwiGLU, {"intermediate_dim": 12, "gate_scale": 0.6}),
    "SGLU": Row(layers.SGLU, {"intermediate_dim": 12}),
    "SquaredReLUMLP": Row(layers.SquaredReLUMLP, {"intermediate_dim": 12}),
    "SimpleRMSNorm": Row(layers.SimpleRMSNorm),
    "RMSNorm": Row(layers.RMSNorm),
    "RMSNorm around 0": Row(layers.RMSNorm, {"zero_centered": False}),
    "RMSNorm of groups": Row(layers.RMSNorm, {"num_groups": 2}),
}
# With the layers that need more than one input, or none.
ALL_ROWS = {
    **ROWS,
    "BidirectionalHGRN2": Row(layers.BidirectionalHGRN2, {"expand_ratio": 4}),
    "LowerBounds": Row(layers.LowerBounds, {"num_layers": 3}),
}
STREAMING = [name for name, row in ROWS.items() if row.state]
STATELESS = ROWS.keys() - STREAMING
ATTENTION = [
    *("LocalAttention", "LocalAttention to all", "LocalAttention with all options"),
    "LightningAttention",
    "LightningAttention of HypeNet",
]
WITH_SUBLAYERS = [
    *("RGLRU", "CGLRU", "RecurrentBlock", "RecurrentBlock with CGLRU", "LocalAttention"),
    *("HGRN2", "HGRN", "GatedShortConv", "GatedMLP", "SwiGLU"),
    *("LightningAttention", "SGLU", "SquaredReLUMLP", "LocalAttention with all options", "Mamba2"),
]

# Three layers represent all others in tests of the base class: one with sublayers, one with a
# circular buffer, one with a matrix state. The others are nightly.
SHARED = ["RecurrentBlock", "LocalAttention", "HGRN2"]
# On torch, which compiles nothing, tests of computations run on every layer.
COMPUTED = STREAMING if keras.config.backend() == "torch" else SHARED

# Compilers other than JAX's take longer than the training of these tests.
JIT = "auto" if keras.config.backend() == "jax" else False


def parametrize_names(names, always):
    """Parametrizes a test over layers, of which those that are not in `always` are nightly."""
    nightly = {name: pytest.param(name, marks=pytest.mark.nightly) for name in names}
    return pytest.mark.parametrize("name", [n if n in always else nightly[n] for n in names])


any_layer = pytest.mark.parametrize("name", ROWS)
streaming_layer = pytest.mark.parametrize("name", STREAMING)
shared_by_layers = parametrize_names(STREAMING, SHARED)


def parametrize_layers(names, default=COMPUTED, **axes):
    """Parametrizes a test over layers and named values, each axis given as {id: value}.

    Each layer runs every fourth combination, or a single one if there are fewer than four; the next
    layer runs the combinations that follow. All others are nightly, as are layers that are not in
    `default`.
    """
    parameters, period = [], min(4, math.prod(map(len, axes.values())))
    for i, name in enumerate(names):
        for cell in itertools.product(*(enumerate(axis.items()) for axis in axes.values())):
            indices, items = zip(*cell, strict=True)
            ids, values = zip(*items, strict=True)
            always = (i + sum(indices)) % period == 0 and name in default
            marks = () if always else pytest.mark.nightly
            parameters.append(
                pytest.param(name, *values, id="-".join([name, *map(str, ids)]), marks=marks)
            )
    return pytest.mark.parametrize(("name", *axes), parameters)


def built(name, **kwargs):
    """Returns the built layer of a row with random weights, biases included."""
    layer = ROWS[name].make(**kwargs)
    layer.build((None, None, WIDTH))
    rng = np.random.default_rng(0)
    for weight in layer.weights:
        weight.assign(
            keras.ops.convert_to_numpy(weight.value) + 0.3 * rng.normal(size=weight.shape)
        )
    return layer


def inputs(batch=3, length=8, seed=1):
    return np.random.default_rng(seed).normal(size=(batch, length, WIDTH)).astype("float32")


def numpy(x):
    """Returns tensors, nested or not, as arrays."""
    return keras.tree.map_structure(keras.ops.convert_to_numpy, x)


def arguments_of(cls, kind):
    """Returns the names of the arguments of a constructor that are "size", "number" or "boolean".

    Defaults decide for numbers and booleans; names for sizes, whose default may be None.
    """
    names = []
    for name, parameter in inspect.signature(cls).parameters.items():
        default = parameter.default
        kinds = {
            "size": re.fullmatch(r"num_\w+|(\w+_)?(dim|width|ratio|size|window|length)", name),
            "number": isinstance(default, float)
            or (name, default) == ("rope_max_wavelength", 10000),
            "boolean": isinstance(default, bool) and name != "trainable",
        }
        names += [name] if kinds[kind] else []
    return names


def assert_rejects(match, function, *args, **kwargs):
    """Asserts that a call raises a ValueError whose message matches."""
    with pytest.raises(ValueError, match=match):
        function(*args, **kwargs)


def assert_close(found, expected, where=None, rtol=1e-5, atol=3e-6):
    """Asserts that nested tensors are equal up to rounding; `where` selects `[B, T]`."""
    found, expected = numpy(found), numpy(expected)
    keras.tree.assert_same_structure(found, expected)
    for f, e in zip(keras.tree.flatten(found), keras.tree.flatten(expected), strict=True):
        if where is not None:
            f, e = f[where], e[where]
        np.testing.assert_allclose(f, e, rtol=rtol, atol=atol)
