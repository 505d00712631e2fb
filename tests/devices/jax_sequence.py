"""Asserts that operations match one device if eight devices share the tokens of a sequence."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

from keras_recurrent import ops
from tests.devices.meshes import device_mesh, model_parallel
from tests.devices.programs import collectives
from tests.ops import cases

B, T = 2, 64
# {name: operation, further options}; the second window has more tokens than a device.
FUNCTIONS: dict = {operation: (operation, {}) for operation in cases.DRAW}
FUNCTIONS["wide window"] = ("sliding_window_attention", {"sliding_window": 23})
REVERSED: dict = {"reversed scan": ("linear_scan", {"reverse": True})}


def draw(operation):
    """Tensors in float32, and the options of the operation."""
    drawn = cases.draw(operation, cases.Case(B, T, 4, heads=(2, 1)))
    return {name: t.astype("float32") for name, t in drawn.tensors.items()}, drawn.options


def packed_documents(rng):
    """A mask and segments: padding anywhere, also over all tokens of a device."""
    mask = rng.random((B, T)) < 0.7
    mask[0, 20:41] = False
    segments = np.cumsum(rng.random((B, T)) < 0.08, axis=1).astype("int32")
    segments[1, :] = 0
    return {"mask": mask, "segment_ids": segments}


def sequence_parallel(sizes, batch_dim_name="batch"):
    layout_map = keras.distribution.LayoutMap(device_mesh(*sizes))
    return model_parallel(layout_map, batch_dim_name=batch_dim_name)


def sharding(sizes, array):
    """The sharding of sequences; parameters are on all devices."""
    spec = jax.P("batch", "sequence") if array.ndim >= 3 else jax.P()
    return jax.NamedSharding(device_mesh(*sizes).backend_mesh, spec)


def program(operation, options, with_state):
    """A program of the output, the state after it, and the gradients of both."""

    def loss(tensors, state):
        initial = {"initial_state": state} if with_state else {}
        output, final = getattr(ops, operation)(**tensors, **options, **initial)
        weight = jnp.cos(jnp.arange(output.size)).reshape(output.shape)
        if "mask" in options:
            weight *= options["mask"].reshape(B, T, *[1] * (output.ndim - 2))
        floats = [a for a in jax.tree.leaves(final) if jnp.issubdtype(a.dtype, jnp.floating)]
        return (output * weight).sum() + sum(jnp.sin(a).sum() for a in floats), (output, final)

    with_gradients = jax.value_and_grad(loss, (0, 1), has_aux=True, allow_int=True)

    def outputs(*arguments):
        # The loss is left out: it has more rounding than these.
        (_, output_and_state), gradients = with_gradients(*arguments)
        return output_and_state, gradients

    return jax.jit(outputs)


def assert_close(actual, expected):
    if actual.dtype != jax.dtypes.float0:
        scale = max(np.abs(expected).max(initial=0), 1)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6 * scale)


def compare(operation, further_options, sizes, is_packed):
    """Packed documents continue an initial state; plain sequences have none."""
    tensors, options = draw(operation)
    options |= further_options
    _, state = getattr(ops, operation)(**tensors, **options)
    if is_packed:
        options |= packed_documents(np.random.default_rng(0))
        padding = ~options["mask"]
        for tensor in tensors.values():
            if tensor.ndim >= 3:
                tensor[padding] = -3.0  # which must not change anything
    expected = program(operation, options, is_packed)(tensors, state)
    with sequence_parallel(sizes):
        shards = {n: jax.device_put(t, sharding(sizes, t)) for n, t in tensors.items()}
        compiled = program(operation, options, is_packed).lower(shards, state).compile()
        actual = compiled(shards, state)
    jax.tree.map(assert_close, actual, expected)
    assert not any(message.in_loop for message in collectives(compiled.as_text()))


def assert_errors():
    """Attention to all tokens, a length that devices do not divide, and equal axes raise errors."""
    x = np.ones((B, T, 2, 4), "float32")
    message = "`sliding_window_attention`.*Give a `sliding_window`"
    with sequence_parallel((1, 8, 1)), pytest.raises(NotImplementedError, match=message):
        ops.sliding_window_attention(x, x, x)
    x = x[:, :, 0]
    message = "Sequences of 63 tokens.*such as 64 tokens"
    with sequence_parallel((1, 8, 1)), pytest.raises(ValueError, match=message):
        ops.linear_scan(x[:, : T - 1], -x[:, : T - 1])
    message = "cannot split the batch: give the distribution another `batch_dim_name`"
    scope = sequence_parallel((1, 2, 4), batch_dim_name="sequence")
    with scope, pytest.raises(ValueError, match=message):
        ops.linear_scan(x, -x)


def bytes_sent(operation, further_options, length):
    """Bytes that a program for sequences of this length sends; it is compiled but not run."""
    sizes = (1, 8, 1)
    tensors, options = draw(operation)
    shapes = {n: (B, length, *t.shape[2:]) if t.ndim >= 3 else t.shape for n, t in tensors.items()}
    arrays = {
        n: jax.ShapeDtypeStruct(shapes[n], t.dtype, sharding=sharding(sizes, t))
        for n, t in tensors.items()
    }
    with sequence_parallel(sizes):
        compiled = program(operation, options | further_options, False).lower(arrays, None)
    return sum(message.nbytes for message in collectives(compiled.compile().as_text()))


def main():
    for name, function in (FUNCTIONS | REVERSED).items():
        for sizes in ((1, 8, 1), (2, 2, 2)):
            for is_packed in (True, False):
                print(name, sizes, "packed" if is_packed else "plain")
                compare(*function, sizes, is_packed)
    for name, function in FUNCTIONS.items():
        # Sequences of 8,192 tokens have 262,144 bytes or more in each tensor.
        assert 0 < bytes_sent(*function, 8192) == bytes_sent(*function, 32_768) < 32_768, name
    assert_errors()


if __name__ == "__main__":
    main()
