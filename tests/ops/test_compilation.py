"""The operations inside what a backend compiles, with lengths known and unknown."""

import functools

import keras
import numpy as np
import pytest

import keras_recurrent
from keras_recurrent import dispatch, ops
from tests.gpu import has_gpu
from tests.ops import token_wise
from tests.ops.cases import DRAW, Case, draw, unit
from tests.ops.test_ops import OPTIONS

BACKEND = keras.config.backend()
every_operation = pytest.mark.parametrize("operation", DRAW)
every_operation_without_a_state = pytest.mark.parametrize("operation", token_wise.DRAW)


def arguments(operation, length):
    drawn = draw(operation, Case(2, length, 3))
    mask = np.random.default_rng(length).random((2, length)) < 0.8
    segments = np.arange(length) // 5 * np.ones((2, 1), "int32")
    context = {"mask": mask, "segment_ids": segments.astype("int32")}
    return {n: t.astype("float32") for n, t in drawn.tensors.items()}, context


def apply(operation, tensors, **context):
    return getattr(ops, operation)(**tensors, **OPTIONS.get(operation, {}), **context)


def loss(operation, tensors, context):
    output, state = apply(operation, tensors, **context)
    mask = context["mask"][(..., *[None] * (len(output.shape) - 2))]
    keep = keras.ops.cast(mask, output.dtype)
    parts = [part for part in keras.tree.flatten(state) if "float" in str(part.dtype)]
    ends = sum(keras.ops.sum(keras.ops.sin(part)) for part in parts)
    return keras.ops.sum(keras.ops.square(output * keep)) + ends


def without_a_state(operation, length):
    """An operation's tensors, integer ones included, and a scalar loss of its outputs."""
    drawn = token_wise.draw(operation, token_wise.Case((2, length, 8)))
    function = getattr(ops, operation)

    def loss(tensors, integers):
        return keras.ops.sum(keras.ops.sin(function(**tensors, **integers, **drawn.options)))

    arrays = {n: t.astype(drawn.dtypes[n]) for n, t in drawn.tensors.items()}
    tensors = {n: arrays.pop(n) for n in drawn.differentiated}
    return tensors, arrays, loss


def close(results, expected):
    for name in expected:
        e = keras.ops.convert_to_numpy(expected[name])
        r = keras.ops.convert_to_numpy(results[name])
        np.testing.assert_allclose(r, e, rtol=0, atol=32 * unit("float32", np.abs(e).max()))


if BACKEND == "jax":
    import jax

    @every_operation
    def test_jit(operation):
        tensors, context = arguments(operation, 23)
        gradients = jax.grad(lambda t: loss(operation, t, context))
        close(jax.jit(gradients)(tensors), gradients(tensors))

    @every_operation_without_a_state
    def test_jit_without_a_state(operation):
        *arrays, loss = without_a_state(operation, 23)
        close(jax.jit(jax.grad(loss))(*arrays), jax.grad(loss)(*arrays))

    @pytest.mark.parametrize("operation", ["linear_scan", "rg_lru", "sliding_window_attention"])
    def test_second_derivatives_are_those_of_plain_jax(operation):
        tensors, context = arguments(operation, 7)

        def of_gradients(tensors):
            gradients = jax.grad(lambda t: loss(operation, t, context))(tensors)
            return sum(keras.ops.sum(keras.ops.square(g)) for g in gradients.values())

        second = jax.jit(jax.grad(of_gradients))(tensors)
        with keras_recurrent.implementation("jax"):
            close(second, jax.jit(jax.grad(of_gradients))(tensors))

    @pytest.mark.nightly
    @every_operation
    def test_memory_is_linear_in_time(operation):
        def temporary_bytes(length):
            tensors, _ = arguments(operation, length)
            gradients = jax.jit(jax.grad(lambda t: sum(map(keras.ops.sum, call(t)))))
            return gradients.lower(tensors).compile().memory_analysis().temp_size_in_bytes

        def call(tensors):
            return keras.tree.flatten(apply(operation, tensors))

        assert temporary_bytes(16384) < 5 * temporary_bytes(4096)

    def test_crossentropy_makes_nothing_of_the_logits_size_but_their_gradient():
        logits, tokens = np.ones((256, 4096), "float32"), np.zeros(256, "int32")
        gradient = jax.jit(jax.grad(lambda *t: keras.ops.sum(ops.token_crossentropy(*t))))
        memory = gradient.lower(logits, tokens).compile().memory_analysis()
        assert memory.temp_size_in_bytes < logits.nbytes / 64

elif BACKEND == "torch":
    import torch
    from torch._subclasses import FakeTensorMode

    from tests.ops.native import tensor

    def leaves(tensors):
        return {n: tensor(t, "float32").requires_grad_() for n, t in tensors.items()}

    def gradients(operation, tensors, context):
        tensors = leaves(tensors)
        loss(operation, tensors, context).backward()
        return {n: t.grad for n, t in tensors.items()}

    @every_operation
    def test_compile_without_graph_breaks(operation):
        """The kernels, forward and backward: one graph, and one graph for every length."""
        kernel = functools.partial(
            dispatch.IMPLEMENTATIONS[operation]["torch"].function,
            **OPTIONS.get(operation, {}),
        )
        graphs = []

        def count(graph, example_inputs):
            graphs.append(graph)
            return graph.forward

        torch.compiler.reset()  # of other kernels in the same code, at most eight
        compiled = torch.compile(kernel, fullgraph=True, dynamic=True, backend=count)
        for length in (11, 23, 40):
            tensors, _ = arguments(operation, length)
            tensors = {n: tensor(t, "float32") for n, t in tensors.items()}
            for result, expected in zip(compiled(**tensors), kernel(**tensors), strict=True):
                torch.testing.assert_close(result, expected, rtol=0, atol=0)
        assert len(graphs) == 1

    @every_operation
    def test_compile_what_users_call_without_graph_breaks(operation):
        """With masks and segments, an implementation chosen around it, and any length."""

        def call(tensors, context):
            return keras.tree.flatten(apply(operation, tensors, **context))

        torch.compiler.reset()  # of other operations in the same code, at most eight
        compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="eager")
        for length in (11, 23):
            tensors, context = arguments(operation, length)
            tensors = {n: tensor(t, "float32") for n, t in tensors.items()}
            context = {n: torch.from_numpy(c) for n, c in context.items()}
            with keras_recurrent.implementation("torch"):
                results, wanted = compiled(tensors, context), call(tensors, context)
            for result, expected in zip(results, wanted, strict=True):
                torch.testing.assert_close(result, expected, rtol=0, atol=0)

    @every_operation
    @pytest.mark.parametrize("implementation", ["torch", "triton"])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_compilers_are_told_the_shapes_and_dtypes_of_results(operation, implementation, dtype):
        kernel = dispatch.IMPLEMENTATIONS[operation][implementation]
        if isinstance(kernel, str):
            pytest.skip(kernel)
        kernel = functools.partial(kernel.function, **OPTIONS.get(operation, {}))
        drawn = draw(operation, Case(2, 5, 3, dtype))
        tensors = {n: tensor(t, drawn.dtypes[n]) for n, t in drawn.tensors.items()}
        with FakeTensorMode() as mode:
            told = kernel(**{n: mode.from_tensor(t) for n, t in tensors.items()})
        found = kernel(**tensors)
        for fake, result in zip(keras.tree.flatten(told), keras.tree.flatten(found), strict=True):
            assert (fake.shape, fake.dtype) == (result.shape, result.dtype)

    @every_operation_without_a_state
    def test_compile_without_a_state(operation):
        """Forward and backward: one graph for every length."""
        torch.compiler.reset()
        graphs = []

        def count(graph, example_inputs):
            graphs.append(graph)
            return graph.forward

        compiled = None
        for length in (11, 23, 40):
            tensors, integers, loss = without_a_state(operation, length)
            integers = {n: tensor(t, "int32") for n, t in integers.items()}
            compiled = compiled or torch.compile(loss, fullgraph=True, dynamic=True, backend=count)
            results, expected = leaves(tensors), leaves(tensors)
            compiled(results, integers).backward()
            loss(expected, integers).backward()
            close(*({n: t.grad for n, t in which.items()} for which in (results, expected)))
        assert len(graphs) == 1

    def test_compile_forward_and_backward_with_inductor():
        compiled = torch.compile(ops.linear_scan, dynamic=True)
        for length in (11, 23):
            tensors, _ = arguments("linear_scan", length)
            results, expected = leaves(tensors), leaves(tensors)
            ops.linear_scan(**expected)[0].square().sum().backward()
            compiled(**results)[0].square().sum().backward()
            close(*({n: t.grad for n, t in which.items()} for which in (results, expected)))

    @every_operation
    def test_only_arguments_and_output_are_kept(operation):
        tensors, _ = arguments(operation, 64)
        tensors = leaves(tensors)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            output, state = apply(operation, tensors)
        states = keras.tree.flatten(state)
        own = [*tensors.values(), output, *states]
        storages = {t.untyped_storage().data_ptr() for t in own}
        extra = [t for t in kept if t.untyped_storage().data_ptr() not in storages]
        # Besides what depends on the state, a number per head and token; of kernels on a GPU two.
        heads = output.numel() // output.shape[-1] * (1 + has_gpu())
        assert sum(t.numel() for t in extra) <= sum(s.numel() for s in states) + heads

else:
    import tensorflow as tf

    def gradients(operation, tensors, context):
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            value = loss(operation, tensors, context)
        return tape.gradient(value, tensors)

    @every_operation
    @pytest.mark.parametrize("jit_compile", [False, True])
    def test_function(operation, jit_compile):
        def signature(array, timed):
            shape = [None if axis < 2 and timed else n for axis, n in enumerate(array.shape)]
            return tf.TensorSpec(shape, array.dtype)

        traces = []

        def traced(tensors, context):
            traces.append(1)
            return gradients(operation, tensors, context)

        tensors, context = arguments(operation, 11)
        timed = {n: t.ndim >= 3 for n, t in tensors.items()}
        function = tf.function(
            traced,
            jit_compile=jit_compile,
            input_signature=(
                {n: signature(t, timed[n]) for n, t in tensors.items()},
                {n: signature(c, True) for n, c in context.items()},
            ),
        )
        # XLA compiles each length anew. 600: several groups of chunks.
        for length in (23,) if jit_compile else (1, 23, 600):
            tensors, context = arguments(operation, length)
            feed = tf.nest.map_structure(tf.constant, (tensors, context))
            close(function(*feed), gradients(operation, *feed))
        assert len(traces) == 1  # one graph serves every length

    @every_operation_without_a_state
    @pytest.mark.parametrize("jit_compile", [False, True])
    def test_function_without_a_state(operation, jit_compile):
        def gradients(tensors, integers):
            with tf.GradientTape() as tape:
                tape.watch(tensors)
                value = loss(tensors, integers)
            return tape.gradient(value, tensors)

        def unknown(array):
            shape = [None, None, *array.shape[2:]] if array.shape[:2] == (2, 11) else array.shape
            return tf.TensorSpec(shape, array.dtype)

        *arrays, loss = without_a_state(operation, 11)
        signature = tf.nest.map_structure(unknown, arrays)
        function = tf.function(gradients, jit_compile=jit_compile, input_signature=signature)
        for length in (1, 23):
            *arrays, _ = without_a_state(operation, length)
            arrays = tf.nest.map_structure(tf.constant, arrays)
            close(function(*arrays), gradients(*arrays))
