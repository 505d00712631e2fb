"""Layers under test, one row each."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
import pytest

from keras_recurrent import layers


class Row(NamedTuple):
    make: Callable[..., keras.layers.Layer]  # keyword arguments of the layer → the layer
    # The shapes of its state's arrays without their batch dimension; None: it has no state.
    state: dict | None = None


WIDTH = 8  # of all inputs: layers that share their shapes share what XLA compiles
ROWS = {
    "RGLRU": Row(
        lambda **kwargs: layers.RGLRU(num_blocks=4, **kwargs),
        state={"hidden": (8,), "segment": ()},
    ),
    "CGLRU": Row(
        lambda **kwargs: layers.CGLRU(num_blocks=2, **kwargs),
        state={"hidden": (8,), "segment": ()},
    ),
    "CausalConv1D": Row(
        lambda **kwargs: layers.CausalConv1D(kernel_size=4, **kwargs),
        state={"inputs": (3, 8), "segment": ()},
    ),
    "CausalConv1D with silu": Row(
        lambda **kwargs: layers.CausalConv1D(kernel_size=4, activation="silu", **kwargs),
        state={"inputs": (3, 8), "segment": ()},
    ),
    "CausalConv1D of one token": Row(
        lambda **kwargs: layers.CausalConv1D(kernel_size=1, use_bias=False, **kwargs),
        state={"inputs": (0, 8), "segment": ()},
    ),
    "RecurrentBlock": Row(
        lambda **kwargs: layers.RecurrentBlock(12, kernel_size=3, num_blocks=4, **kwargs),
        state={
            "conv1d": {"inputs": (2, 12)},
            "rg_lru": {"hidden": (12,)},
            "segment": (),
        },
    ),
    "RecurrentBlock with CGLRU": Row(
        lambda **kwargs: layers.RecurrentBlock(
            12, kernel_size=3, num_blocks=3, recurrence="cg_lru", **kwargs
        ),
        state={
            "conv1d": {"inputs": (2, 12)},
            "cg_lru": {"hidden": (12,)},
            "segment": (),
        },
    ),
    "LocalAttention": Row(
        lambda **kwargs: layers.LocalAttention(
            4,
            num_key_value_heads=2,
            head_dim=4,
            sliding_window=4,
            partial_rotary_factor=0.5,
            **kwargs,
        ),
        state={"key": (3, 2, 4), "value": (3, 2, 4), "position": (), "segment": ()},
    ),
    "LocalAttention to all": Row(
        lambda **kwargs: layers.LocalAttention(2, head_dim=4, max_length=12, **kwargs),
        state={"key": (12, 1, 4), "value": (12, 1, 4), "position": (), "segment": ()},
    ),
    "LocalAttention with all options": Row(
        lambda **kwargs: layers.LocalAttention(
            4,
            num_key_value_heads=2,
            head_dim=4,
            sliding_window=4,
            partial_rotary_factor=0.5,
            use_qkv_bias=True,
            use_output_bias=False,
            use_qk_norm=True,
            use_output_gate=True,
            logit_scaling=2.5,
            layer_norm_epsilon=1e-2,
            **kwargs,
        ),
        state={"key": (3, 2, 4), "value": (3, 2, 4), "position": (), "segment": ()},
    ),
    "HGRN2": Row(
        lambda **kwargs: layers.HGRN2(expand_ratio=4, **kwargs),
        state={"memory": (2, 4, 4), "segment": ()},
    ),
    "HGRN2 of the paper, with convolutions": Row(
        lambda **kwargs: layers.HGRN2(
            expand_ratio=2,
            gate_activation="sigmoid",
            input_activation="silu",
            conv_size=3,
            f_bias_initializer="ones",
            **kwargs,
        ),
        state={
            "memory": (4, 2, 2),
            "segment": (),
            **{f"{name}_conv1d": {"inputs": (2, 8)} for name in "qfi"},
        },
    ),
    "HGRN": Row(
        lambda **kwargs: layers.HGRN(**kwargs),
        state={"hidden": (8,), "segment": ()},
    ),
    "LightningAttention": Row(
        # With positions; the models have layers without.
        lambda **kwargs: layers.LightningAttention(
            4, head_dim=2, layer_index=1, num_layers=3, use_lrpe=True, **kwargs
        ),
        state={"memory": (4, 4, 2), "segment": (), "position": ()},
    ),
    "LightningAttention of HypeNet": Row(
        lambda **kwargs: layers.LightningAttention(
            4,
            num_key_value_heads=2,
            head_dim=2,
            decay_schedule="alibi",
            rope_max_wavelength=100,
            query_scale=0.5,
            use_qk_norm=True,
            use_norm_weight=True,
            layer_norm_epsilon=1e-2,
            query_key_activation="linear",
            gate_activation="sigmoid",
            **kwargs,
        ),
        state={"memory": (4, 2, 2), "segment": (), "position": ()},
    ),
    "GatedMLP": Row(lambda **kwargs: layers.GatedMLP(12, **kwargs)),
    "SwiGLU": Row(lambda **kwargs: layers.SwiGLU(12, **kwargs)),
    "SGLU": Row(lambda **kwargs: layers.SGLU(12, **kwargs)),
    "SimpleRMSNorm": Row(lambda **kwargs: layers.SimpleRMSNorm(**kwargs)),
    "RMSNorm": Row(lambda **kwargs: layers.RMSNorm(**kwargs)),
    "RMSNorm around 0": Row(lambda **kwargs: layers.RMSNorm(zero_centered=False, **kwargs)),
}
STREAMING = [name for name, row in ROWS.items() if row.state]
ATTENTION = [
    *("LocalAttention", "LocalAttention to all", "LocalAttention with all options"),
    "LightningAttention",
    "LightningAttention of HypeNet",
]
WITH_SUBLAYERS = [
    *("RGLRU", "CGLRU", "RecurrentBlock", "RecurrentBlock with CGLRU", "LocalAttention"),
    *("HGRN2", "HGRN", "GatedMLP", "SwiGLU"),
    *("LightningAttention", "SGLU", "LocalAttention with all options"),
]

# On torch, which compiles nothing, base-class tests run on every layer. On JAX and TensorFlow these
# three represent all of them: one with sublayers, one with a circular buffer, one with a matrix
# state. The others are nightly.
SHARED = STREAMING
if keras.config.backend() != "torch":
    SHARED = ["RecurrentBlock", "LocalAttention", "HGRN2"]

any_layer = pytest.mark.parametrize("name", ROWS)
streaming_layer = pytest.mark.parametrize("name", STREAMING)
shared_by_layers = pytest.mark.parametrize(
    "name",
    [n if n in SHARED else pytest.param(n, marks=pytest.mark.nightly) for n in STREAMING],
)
layer_with_sublayers = pytest.mark.parametrize("name", WITH_SUBLAYERS)


def parametrize_layers(names, default=STREAMING, **axes):
    """Parametrizes a test over layers and named values, each axis given as {id: value}.

    On JAX and TensorFlow every second combination is nightly, in a checkerboard: each layer runs
    half of the combinations, and neighboring layers run opposite halves. Layers that are not in
    `default` are nightly.
    """
    parameters = []
    for i, name in enumerate(names):
        for indices in itertools.product(*(range(len(values)) for values in axes.values())):
            ids = [
                list(values)[index] for values, index in zip(axes.values(), indices, strict=True)
            ]
            values = [values[id] for values, id in zip(axes.values(), ids, strict=True)]
            even = keras.config.backend() == "torch" or (i + sum(indices)) % 2 == 0
            always = even and name in default
            marks = () if always else pytest.mark.nightly
            parameters.append(
                pytest.param(name, *values, id="-".join([name, *map(str, ids)]), marks=marks)
            )
    return pytest.mark.parametrize(("name", *axes), parameters)


def built(name, **kwargs):
    """The built layer of a row, with random weights: zero-initialized biases included."""
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
    """Tensors, nested or not, as arrays."""
    return keras.tree.map_structure(keras.ops.convert_to_numpy, x)


def assert_close(got, wanted, where=None):
    """Equal to float32's last digits, on numbers around 1; `where` selects `[B, T]`."""
    got, wanted = numpy(got), numpy(wanted)
    keras.tree.assert_same_structure(got, wanted)
    for g, w in zip(keras.tree.flatten(got), keras.tree.flatten(wanted), strict=True):
        if where is not None:
            g, w = g[where], w[where]
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=3e-6)
