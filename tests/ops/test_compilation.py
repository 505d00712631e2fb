"""The operations in programs that a backend compiles, with static and dynamic lengths."""

import functools

import keras
import numpy as np
import pytest

import keras_recurrent
from keras_recurrent import dispatch, ops
from tests.gpu import has_gpu
from tests.ops import cases, small, token_wise
from tests.ops.cases import unit
from tests.ops.judge import function_of, kernels, parametrize_kernels

BACKEND = keras.config.backend()
OPTIONS = {operation: small.draw(operation).options for operation in small.OPERATIONS}
every_operation = pytest.mark.parametrize("operation", [*cases.DRAW, *token_wise.DRAW])
every_operation_over_time = pytest.mark.parametrize("operation", cases.DRAW)


def draw(operation, length, masked=True, **options):
    """Two dicts of arrays, floats and integers or masks, and a loss of them."""
    drawn = small.draw(operation, length, **options)
    arrays = {n: t.astype(drawn.dtypes[n]) for n, t in drawn.tensors.items() if t is not None}
    floats = {name: arrays.pop(name) for name in drawn.differentiated}
    if masked and drawn.has_state:
        arrays["mask"] = np.random.default_rng(length).random((2, length)) < 0.8
        arrays["segment_ids"] = (np.arange(length) // 5 * np.ones((2, 1))).astype("int32")

    def loss(floats, others):
        output, *states = call(operation, floats, **others)
        if "mask" in others:
            mask = others["mask"][(..., *[None] * (len(output.shape) - 2))]
            output = output * keras.ops.cast(mask, output.dtype)
        results = [r for r in (output, *states) if "float" in str(r.dtype)]
        return sum(keras.ops.sum(keras.ops.sin(result)) for result in results)

    return floats, arrays, loss


def call(operation, tensors, **context):
    """The output and the arrays of the state, in a list."""
    return keras.tree.flatten(getattr(ops, operation)(**tensors, **OPTIONS[operation], **context))


def assert_close(results, expected):
    for name in expected:
        array = keras.ops.convert_to_numpy(expected[name])
        result = keras.ops.convert_to_numpy(results[name])
        bound = 32 * unit("float32", np.abs(array).max())
        np.testing.assert_allclose(result, array, rtol=0, atol=bound, err_msg=name)


if BACKEND == "jax":
    import jax

    @every_operation
    def test_jit_gradients_equal_eager_gradients(operation):
        """An operation fails or differs inside `jax.jit`."""
        floats, others, loss = draw(operation, 23)
        assert_close(jax.jit(jax.grad(loss))(floats, others), jax.grad(loss)(floats, others))

    @pytest.mark.parametrize("operation", ["linear_scan", "rg_lru"])
    def test_second_derivatives_equal_those_of_plain_jax(operation):
        """A kernel gives wrong second derivatives."""
        floats, others, loss = draw(operation, 7)

        def squared_gradients(floats):
            gradients = jax.grad(loss)(floats, others)
            return sum(keras.ops.sum(keras.ops.square(g)) for g in gradients.values())

        second = jax.jit(jax.grad(squared_gradients))(floats)
        with keras_recurrent.implementation("jax"):
            assert_close(second, jax.jit(jax.grad(squared_gradients))(floats))

    @pytest.mark.nightly
    @every_operation_over_time
    def test_memory_of_gradients_is_linear_in_length(operation):
        """A program stores pairs of tokens, or states of all tokens."""

        def temporary_bytes(length):
            floats, _, _ = draw(operation, length, masked=False)
            gradients = jax.jit(jax.grad(lambda t: sum(map(keras.ops.sum, call(operation, t)))))
            return gradients.lower(floats).compile().memory_analysis().temp_size_in_bytes

        assert temporary_bytes(16384) < 5 * temporary_bytes(4096)

    def test_crossentropy_stores_no_array_of_the_size_of_logits():
        """The gradient needs a second array of the size of the logits."""
        logits, tokens = np.ones((256, 4096), "float32"), np.zeros(256, "int32")
        gradient = jax.jit(jax.grad(lambda *t: keras.ops.sum(ops.token_crossentropy(*t))))
        memory = gradient.lower(logits, tokens).compile().memory_analysis()
        assert memory.temp_size_in_bytes < logits.nbytes / 64

elif BACKEND == "torch":
    import torch
    from torch._subclasses import FakeTensorMode

    from tests.ops.native import tensor

    def to_tensors(arrays, requires_grad=False):
        tensors = {name: tensor(array, str(array.dtype)) for name, array in arrays.items()}
        return {n: t.requires_grad_() if requires_grad else t for n, t in tensors.items()}

    def backward(loss, floats, *others):
        """The gradients of a loss."""
        leaves = to_tensors(floats, requires_grad=True)
        loss(leaves, *others).backward()
        return {name: t.grad for name, t in leaves.items()}

    @pytest.fixture
    def graphs():
        """The graphs that `torch.compile` with `backend=graphs.count` has made."""
        torch.compiler.reset()  # Each code object may be compiled eight times.

        class Graphs(list):
            def count(self, graph, example_inputs):
                self.append(graph)
                return graph.forward

        return Graphs()

    # cuDNN needs longer sequences; Triton's interpreter takes most of the time.
    @parametrize_kernels(
        [k for k in kernels([*cases.DRAW, *token_wise.DRAW]) if k[1] != "cudnn"],
        nightly=lambda kernel: kernel[1] == "triton",
    )
    def test_compiled_kernel_is_one_graph_for_all_lengths(operation, implementation, graphs):
        """A kernel breaks the graph of `torch.compile`, or is compiled again for each length."""
        has_parameter = operation in ("rms_norm", "log_forget_gate")
        for number, options in enumerate([{}, *[{"parameter": False}] * has_parameter], 1):
            kernel = functools.partial(function_of(operation, implementation), **OPTIONS[operation])
            compiled = torch.compile(kernel, fullgraph=True, dynamic=True, backend=graphs.count)
            for length in (11, 40):
                floats, others, _ = draw(operation, length, masked=False, **options)
                results = []
                for function in (compiled, kernel):
                    leaves = to_tensors(floats, requires_grad=True)
                    found = keras.tree.flatten(function(**leaves, **to_tensors(others)))
                    loss = sum(x.sin().sum() for x in found if x.requires_grad)
                    results.append((*found, *torch.autograd.grad(loss, list(leaves.values()))))
                for result, expected in zip(*results, strict=True):
                    torch.testing.assert_close(result, expected, rtol=0, atol=0)
            assert len(graphs) == number

    # The other operations over time share this code; the test above compiles their kernels.
    @pytest.mark.parametrize("operation", ["rg_lru", "sliding_window_attention", *token_wise.DRAW])
    def test_compiled_operation_with_masks_and_segments_is_one_graph(operation):
        """A public operation breaks the graph, or a chosen implementation does."""

        def function(floats, others):
            return call(operation, floats, **others)

        torch.compiler.reset()
        compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="eager")
        for length in (11, 23):
            floats, others, _ = draw(operation, length)
            tensors = to_tensors(floats), to_tensors(others)
            with keras_recurrent.implementation("torch"):
                results, expected = compiled(*tensors), function(*tensors)
            for result, wanted in zip(results, expected, strict=True):
                torch.testing.assert_close(result, wanted, rtol=0, atol=0)

    def test_inductor_gradients_equal_eager_gradients():
        """Inductor, which compiles for CPUs and GPUs, cannot differentiate an operation."""
        compiled = torch.compile(ops.linear_scan, dynamic=True)
        for length in (11, 23):
            floats, _, _ = draw("linear_scan", length)
            gradients, expected = (
                backward(lambda tensors, scan=scan: scan(**tensors)[0].square().sum(), floats)
                for scan in (compiled, ops.linear_scan)
            )
            assert_close(gradients, expected)

    @every_operation_over_time
    @pytest.mark.parametrize("implementation", ["torch", "triton"])
    def test_fake_results_have_shapes_and_dtypes_of_real_results(operation, implementation):
        """A custom operator tells the compiler other shapes or dtypes than it returns."""
        if isinstance(reason := dispatch.IMPLEMENTATIONS[operation][implementation], str):
            pytest.skip(reason)
        drawn = small.draw(operation, dtype="bfloat16", heads=(2, 1))
        kernel = functools.partial(function_of(operation, implementation), **drawn.options)
        tensors = {n: tensor(t, drawn.dtypes[n]) for n, t in drawn.tensors.items()}
        with FakeTensorMode() as mode:
            fakes = kernel(**{n: mode.from_tensor(t) for n, t in tensors.items()})
        results = kernel(**tensors)
        for fake, real in zip(*map(keras.tree.flatten, (fakes, results)), strict=True):
            assert (fake.shape, fake.dtype) == (real.shape, real.dtype)

    @pytest.mark.parametrize(
        ("operation", "implementation"),
        [*((o, None) for o in cases.DRAW), *((o, "triton") for o in token_wise.DRAW)],
    )
    def test_backward_saves_only_arguments_and_results(operation, implementation):
        """Autograd keeps intermediate tensors, which cost memory in training."""
        floats, others, _ = draw(operation, 64 if operation in cases.DRAW else 4, masked=False)
        leaves, saved = to_tensors(floats, requires_grad=True), []
        tensors = leaves | to_tensors(others)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            output, *states = call(operation, tensors, implementation=implementation)
        known = {t.untyped_storage().data_ptr() for t in (*tensors.values(), output, *states)}
        extra = [t for t in saved if t.untyped_storage().data_ptr() not in known]
        # In addition to tensors of the size of a state: a number for each head and token, two in
        # kernels.
        first = next(iter(leaves.values()))
        numbers = first.numel() // first.shape[-1] * (1 + (has_gpu() or implementation == "triton"))
        assert sum(t.numel() for t in extra) <= sum(s.numel() for s in states) + numbers

else:
    import tensorflow as tf

    @every_operation
    @pytest.mark.parametrize("jit_compile", [False, True])
    def test_function_of_unknown_length_is_one_graph_with_eager_gradients(operation, jit_compile):
        """An operation needs a static length, is traced again for each length, or differs."""
        *arrays, loss = draw(operation, 11)

        def gradients(floats, others):
            with tf.GradientTape() as tape:
                tape.watch(floats)
                value = loss(floats, others)
            return tape.gradient(value, floats)

        def signature(array):
            shape = [None, None, *array.shape[2:]] if array.shape[:2] == (2, 11) else array.shape
            return tf.TensorSpec(shape, array.dtype)

        signatures = tf.nest.map_structure(signature, arrays)
        function = tf.function(gradients, jit_compile=jit_compile, input_signature=signatures)
        # XLA compiles each length again. 200 tokens are two groups of chunks.
        for length in (23,) if jit_compile else (1, 23, 200):
            *arrays, _ = draw(operation, length)
            arrays = tf.nest.map_structure(tf.constant, arrays)
            assert_close(function(*arrays), gradients(*arrays))
        assert function.experimental_get_tracing_count() == 1

    @pytest.mark.nightly
    @every_operation
    def test_tangents_equal_those_of_reverse_mode(operation):
        """Forward mode fails, because the tape of a gradient records nothing, or is wrong."""
        floats, others, loss = draw(operation, 7)
        floats, others = (tf.nest.map_structure(tf.constant, arrays) for arrays in (floats, others))
        with tf.GradientTape() as tape:
            tape.watch(floats)
            value = loss(floats, others)
        gradients = tape.gradient(value, floats, unconnected_gradients="zero")
        constants = cases.CONSTANTS.get(operation, ())  # reverse mode takes their gradients as 0
        tangents = {n: tf.fill(x.shape, 0.0 if n in constants else 1.0) for n, x in floats.items()}
        with tf.autodiff.ForwardAccumulator(floats, tangents) as accumulator:
            value = loss(floats, others)
        expected = sum(tf.reduce_sum(g) for g in tf.nest.flatten(gradients))
        np.testing.assert_allclose(accumulator.jvp(value), expected, rtol=1e-4, atol=1e-5)
