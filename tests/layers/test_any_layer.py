"""Properties that Keras expects of a layer, for every layer."""

import inspect
import json

import keras
import numpy as np
import pytest

from tests.layers import loops
from tests.layers.gradients import call_with, gradients
from tests.layers.table import (
    ALL_ROWS,
    ATTENTION,
    COMPUTED,
    ROWS,
    SHARED,
    STATELESS,
    STREAMING,
    WIDTH,
    any_layer,
    assert_close,
    assert_rejects,
    built,
    inputs,
    numpy,
    parametrize_layers,
    parametrize_names,
)
from tests.ops.native import precision

# Keras computes float64 in float32: matrix products on torch, gelu on TensorFlow.
THROUGH_FLOAT32 = [
    *("RecurrentBlock", "RecurrentBlock with CGLRU", "GatedMLP", "SwiGLU", "HGRN", "HGRN2"),
    *("HGRN2 of the paper, with convolutions", "GatedShortConv", "SGLU", *ATTENTION),
    *("Mamba2", "Mamba2 with a norm before the gate", "SquaredReLUMLP"),
]
POLICIES = ["mixed_bfloat16", "float64"]
if keras.config.backend() == "torch":
    POLICIES += ["bfloat16", "mixed_float16"]


@pytest.mark.once
@pytest.mark.parametrize("name", ALL_ROWS)
def test_config_has_every_argument_and_restores_the_layer(name):
    layer = ALL_ROWS[name].make(name="one", dtype="mixed_bfloat16", trainable=False)
    config = layer.get_config()
    json.dumps(config)
    _, *parameters = inspect.signature(type(layer).__init__).parameters.values()
    assert {p.name for p in parameters if p.kind != p.VAR_KEYWORD} <= set(config)
    again = type(layer).from_config(config)
    assert again.get_config() == config
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    assert again.get_config() == config


@parametrize_layers(ROWS, default=STATELESS | {*COMPUTED}, policy={p: p for p in POLICIES})
def test_outputs_under_a_policy_match_a_loop_in_float64(name, policy):
    compute_dtype = policy.removeprefix("mixed_")
    with precision(policy):
        layer, x = built(name, dtype=policy), inputs(length=2)
        y = layer(x)
        assert layer(keras.Input((None, WIDTH))).dtype == compute_dtype
        *values, rounded = numpy([keras.ops.cast(v, compute_dtype) for v in [*layer.weights, x]])
        found = numpy(y)
    assert keras.backend.standardize_dtype(y.dtype) == compute_dtype
    expected = loops.run(loops.unit(layer), x)
    if policy == "float64":
        rtol, atol = (1e-5, 1e-6) if name in THROUGH_FLOAT32 else (1e-12, 1e-12)
        np.testing.assert_allclose(found, expected, rtol=rtol, atol=atol)
        return
    # Inputs, weights and results of linear layers are rounded.
    roundings = 8 * {"float16": 2**-11, "bfloat16": 2**-8}[compute_dtype]
    error = np.abs(found.astype("float64") - expected)
    # The norm of HGRN2 magnifies the rounding of inputs and weights where its heads cancel.
    inevitable = np.abs(loops.run(loops.unit(layer, values), rounded) - expected)
    assert error.max() < max(roundings * np.abs(expected).max(), 2 * inevitable.max())


@pytest.mark.once
@pytest.mark.parametrize("name", ALL_ROWS)
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float64"])
def test_dtype_policy_of_a_layer_reaches_all_sublayers(name, policy):
    """A sublayer has the global policy, float32."""
    first = ALL_ROWS[name].make(dtype=policy)
    for layer in (first, type(first).from_config(first.get_config())):
        layer.build((None, None, WIDTH))
        for inner in layer._flatten_layers():
            assert inner.dtype_policy.name == policy, inner.path
        dtypes = {weight.dtype for weight in layer.weights}
        assert dtypes <= {"float64" if policy == "float64" else "float32"}


@parametrize_names(ROWS, always=STATELESS | {*SHARED})
def test_outputs_and_gradients_match_a_loop_and_its_finite_differences(name):
    """A weight has no gradient, or another one than the loop in float64."""
    layer, x = built(name), inputs(length=4)
    assert_close(layer(x), loops.run(loops.unit(layer), x))
    values = [*numpy([weight.value for weight in layer.trainable_variables]), x]

    def loss(tensors):
        *weights, x = tensors
        return keras.ops.sum(keras.ops.sin(call_with(layer, weights, x)))

    def loss_of_loop(values):
        return np.sin(loops.run(loops.unit(layer, values[:-1]), values[-1])).sum()

    assert len(values) > 1 or name == "SimpleRMSNorm"
    rng = np.random.default_rng(0)
    paths = [*(weight.path for weight in layer.trainable_variables), "inputs"]
    for i, (path, found) in enumerate(zip(paths, gradients(loss, values), strict=True)):
        assert (found != 0).all(), path
        for _ in range(3):
            index = tuple(rng.integers(found.shape))
            sides = []
            for step in (1e-5, -1e-5):
                moved = [value.astype("float64") for value in values]
                moved[i][index] += step
                sides.append(loss_of_loop(moved))
            slope = (sides[0] - sides[1]) / 2e-5
            np.testing.assert_allclose(found[index], slope, rtol=2e-5, atol=1e-5, err_msg=path)


@pytest.mark.nightly
@pytest.mark.skipif(keras.config.backend() != "tensorflow", reason="no graph of reads and updates")
@pytest.mark.parametrize("name", ["RecurrentBlock", "LocalAttention", "GatedMLP", "RMSNorm"])
def test_remat_scope_reads_weights_before_their_update(name):
    """The optimized graph orders no read before the update, so that a race decides."""
    from tensorflow.python.eager import context  # no public module has the optimized graph

    with keras.RematScope(mode="full"):
        layer = built(name)
    sequence = keras.Input((None, WIDTH))
    model = keras.Model(sequence, layer(keras.layers.Dense(WIDTH)(sequence)))
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    context.enable_graph_collection()
    model.train_on_batch(inputs(), inputs())
    graphs = [f.post_optimization_graph for f in context.export_run_metadata().function_graphs]
    context.disable_graph_collection()
    nodes = {node.name: node for node in max(graphs, key=lambda graph: len(graph.node)).node}

    def before(node):
        found, left = {}, [node]
        while left:
            names = {name.removeprefix("^").split(":")[0] for name in left.pop().input}
            new = {name: nodes[name] for name in names - found.keys()}
            found |= new
            left += new.values()
        return found

    updates = [node for node in nodes.values() if node.op == "AssignSubVariableOp"]
    assert len(updates) == len(model.trainable_weights)
    reads = [node for node in nodes.values() if node.op == "ReadVariableOp"]
    for update in updates:
        weight, earlier = update.input[0], before(update)
        assert all(read.name in earlier for read in reads if read.input[0] == weight), weight


@pytest.mark.skipif(keras.config.backend() != "tensorflow", reason="TensorFlow alone has them")
@any_layer
def test_call_rejects_tensors_of_unknown_rank(name):
    import tensorflow as tf

    def assert_trace_fails(call):
        graph = tf.function(call, autograph=False)
        match = r"must have a known number of dim.*`set_shape`"
        assert_rejects(match, graph.get_concrete_function, tf.TensorSpec(None, "float32"))

    assert_trace_fails(ROWS[name].make())
    if name in STREAMING:
        layer = built(name)
        assert_trace_fails(lambda mask: layer(inputs(), mask=mask))
