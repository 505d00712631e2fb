"""What Keras expects of a layer, tested on every layer."""

import inspect
import json

import keras
import numpy as np
import pytest

from keras_recurrent import layers
from tests.layers import loops
from tests.layers.gradients import call_with, gradients
from tests.layers.table import (
    ATTENTION,
    ROWS,
    WIDTH,
    any_layer,
    assert_close,
    built,
    inputs,
    numpy,
    parametrize_layers,
)
from tests.ops.native import precision

# Keras takes float64 through float32: in matrix products on torch, in gelu on TensorFlow.
THROUGH_FLOAT32 = [
    *("RecurrentBlock", "RecurrentBlock with CGLRU", "GatedMLP", "SwiGLU", "HGRN", "HGRN2"),
    *("HGRN2 of the paper, with convolutions", "SGLU", *ATTENTION),
]
# Not float32, in which all else here is compared.
POLICIES = {policy: policy for policy in ("mixed_bfloat16", "float64")}


@pytest.mark.once
@any_layer
def test_shapes(name):
    layer = ROWS[name].make()
    symbolic = layer(keras.Input((None, WIDTH)))
    assert symbolic.shape == (None, None, WIDTH)
    assert symbolic.dtype == "float32"
    assert layer.compute_output_shape((2, None, WIDTH)) == (2, None, WIDTH)
    assert tuple(layer(inputs()).shape) == (3, 8, WIDTH)
    assert tuple(layer(inputs(length=1)).shape) == (3, 1, WIDTH)


@any_layer
def test_equals_a_loop(name):
    layer, x = built(name), inputs()
    assert_close(layer(x), loops.run(loops.unit(layer), x))


@pytest.mark.once
@any_layer
def test_config(name):
    layer = ROWS[name].make(name="one", dtype="mixed_bfloat16", trainable=False)
    config = layer.get_config()
    json.dumps(config)
    parameters = inspect.signature(type(layer)).parameters.values()
    assert {p.name for p in parameters if p.kind != p.VAR_KEYWORD} <= set(config)
    again = type(layer).from_config(config)
    assert again.get_config() == config
    assert (
        keras.saving.deserialize_keras_object(
            keras.saving.serialize_keras_object(layer)
        ).get_config()
        == config
    )


@pytest.mark.once
@any_layer
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_saved_model(name, policy, tmp_path):
    sequence = keras.Input((None, WIDTH))
    model = keras.Model(sequence, built(name, dtype=policy)(sequence))
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    x = inputs(length=2)
    np.testing.assert_array_equal(numpy(model(x)), numpy(again(x)))


@any_layer
def test_in_a_sequential_model_and_in_a_subclassed_one(name):
    layer, x = built(name), inputs()

    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = layer

        def call(self, x):
            return self.inner(x)

    assert_close(keras.Sequential([layer])(x), layer(x))
    assert_close(Subclassed()(x), layer(x))


@any_layer
def test_passes_the_mask_on(name):
    class Next(keras.layers.Layer):
        def call(self, x, mask=None):
            self.seen = mask
            return x

    tokens = np.array([[3, 1, 2, 0, 0, 0, 0, 0], [0, 1, 2, 0, 4, 4, 4, 4], [1] * 8])
    embedding, after = keras.layers.Embedding(5, WIDTH, mask_zero=True), Next()
    after.supports_masking = True
    after(built(name)(embedding(tokens)))
    np.testing.assert_array_equal(numpy(after.seen), tokens != 0)


@parametrize_layers(ROWS, default=ROWS, policy=POLICIES)
def test_policies(name, policy):
    with precision(policy):
        check_policy(name, policy)


@pytest.mark.once
@any_layer
@pytest.mark.parametrize("policy", ["bfloat16", "mixed_float16"])
def test_more_policies(name, policy):
    with precision(policy):
        check_policy(name, policy)


MORE_LAYERS = {
    "BidirectionalHGRN2": lambda **kwargs: layers.BidirectionalHGRN2(expand_ratio=4, **kwargs),
    "LowerBounds": lambda **kwargs: layers.LowerBounds(3, **kwargs),
}


@pytest.mark.once
@pytest.mark.parametrize("name", [*ROWS, *MORE_LAYERS])
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float64"])
def test_policies_reach_all_sublayers(name, policy):
    """That of the layer and not the global one, which is float32."""
    make = MORE_LAYERS.get(name) or ROWS[name].make
    first = make(dtype=policy)
    for layer in (first, type(first).from_config(first.get_config())):
        layer.build((None, None, WIDTH))
        for inner in layer._flatten_layers():
            assert inner.dtype_policy.name == policy, inner.path
        dtypes = {weight.dtype for weight in layer.weights}
        assert dtypes <= {"float64" if policy == "float64" else "float32"}


def check_policy(name, policy):
    layer, x = built(name, dtype=policy), inputs(length=2)
    compute_dtype = policy.removeprefix("mixed_")
    y = layer(x)
    assert keras.backend.standardize_dtype(y.dtype) == compute_dtype
    assert layer(keras.Input((None, WIDTH))).dtype == compute_dtype
    wanted = loops.run(loops.unit(layer), x)
    if policy == "float64" and name in THROUGH_FLOAT32:
        np.testing.assert_allclose(numpy(y), wanted, rtol=1e-5, atol=1e-6)
    elif policy == "float64":
        np.testing.assert_allclose(numpy(y), wanted, rtol=1e-12, atol=1e-12)
    else:
        # Roundings of inputs, weights and the steps between linear maps.
        roundings = {"float16": 2**-11, "bfloat16": 2**-8}[compute_dtype]
        error = np.abs(numpy(y).astype("float64") - wanted)
        # HGRN2's norm magnifies what rounding inputs and weights does, where its heads cancel.
        *values, rounded = numpy([keras.ops.cast(v, compute_dtype) for v in [*layer.weights, x]])
        inevitable = np.abs(loops.run(loops.unit(layer, values), rounded) - wanted)
        assert error.max() < max(8 * roundings * np.abs(wanted).max(), 2 * inevitable.max())


@any_layer
def test_gradients(name):
    """They reach every weight, and are those of the loop by finite differences in float64."""
    layer, x = built(name), inputs(length=4)
    values = [*numpy([weight.value for weight in layer.trainable_variables]), x]

    def loss(tensors):
        *weights, x = tensors
        return keras.ops.sum(keras.ops.sin(call_with(layer, weights, x)))

    def loss_of_loop(values):
        return np.sin(loops.run(loops.unit(layer, values[:-1]), values[-1])).sum()

    assert len(values) > 1 or name == "SimpleRMSNorm"
    rng = np.random.default_rng(0)
    paths = [*(weight.path for weight in layer.trainable_variables), "inputs"]
    for place, (path, got) in enumerate(zip(paths, gradients(loss, values), strict=True)):
        assert (got != 0).all(), path
        for _ in range(3):
            index = tuple(rng.integers(got.shape))
            sides = []
            for step in (1e-5, -1e-5):
                moved = [value.astype("float64") for value in values]
                moved[place][index] += step
                sides.append(loss_of_loop(moved))
            wanted = (sides[0] - sides[1]) / 2e-5
            np.testing.assert_allclose(got[index], wanted, rtol=2e-5, atol=1e-5, err_msg=path)


@pytest.mark.parametrize("run_eagerly", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "name", ["RecurrentBlock", pytest.param("GatedMLP", marks=pytest.mark.nightly)]
)
def test_recomputing_changes_no_gradient(name, run_eagerly):
    """`keras.RematScope`, which upstream serves calls with one positional tensor alone."""
    x, ids = inputs(length=2), np.zeros((3, 2), "int32")
    start = numpy([weight.value for weight in built(name).weights])
    trained = []
    for mode in (None, "full"):
        with keras.RematScope(mode=mode):
            layer = built(name)
        # TensorFlow trains in the very memory that it is given.
        layer.set_weights([weight.copy() for weight in start])
        sequence, segment_ids = keras.Input((None, WIDTH)), keras.Input((None,), dtype="int32")
        others = {"segment_ids": segment_ids} if ROWS[name].state else {}
        model = keras.Model([sequence, segment_ids], layer(sequence, **others))
        jit = "auto" if keras.config.backend() == "jax" else False
        model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=run_eagerly, jit_compile=jit)
        model.train_on_batch([x, ids], x)
        trained.append(numpy([weight.value for weight in layer.weights]))
    assert_close(*trained)


@pytest.mark.nightly
@pytest.mark.skipif(keras.config.backend() != "tensorflow", reason="no graph of reads and updates")
@pytest.mark.parametrize("name", ["RecurrentBlock", "LocalAttention", "GatedMLP", "RMSNorm"])
def test_recomputing_reads_no_trained_weight(name):
    """By the graph that runs: of steps whose order is left open most go well, or all."""
    from tensorflow.python.eager import context  # no public module tells what Grappler made

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


@pytest.mark.once
def test_fit_lowers_the_loss():
    tokens = np.random.default_rng(0).integers(1, 7, (8, 8))
    sequence = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(7, WIDTH, mask_zero=True)(sequence)
    x = keras.layers.average([row.make()(x) for row in ROWS.values()])
    model = keras.Model(sequence, keras.layers.Dense(7)(x))
    # XLA and torch.compile take their time; the operations' own tests compile.
    jit = "auto" if keras.config.backend() == "jax" else False
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.1), loss, jit_compile=jit)
    # TensorFlow traces a step twice where the first one makes the optimizer's variables.
    model.optimizer.build(model.trainable_variables)
    history = model.fit(tokens, tokens, batch_size=8, epochs=10, verbose=0)
    assert history.history["loss"][-1] < 0.9 * history.history["loss"][0]
