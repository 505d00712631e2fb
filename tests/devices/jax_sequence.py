"""Asserts that operations match one device if eight devices share the tokens of a sequence."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

from keras_recurrent import ops
from tests.devices.meshes import device_mesh, model_parallel
from tests.devices.programs import collectives

B, T, H, K = 2, 64, 2, 4
D = H * K


def split_heads(x):
    return x.reshape(*x.shape[:2], H, K)


def linear_scan(x, y, z, **options):
    return ops.linear_scan(x, -jnp.abs(y), **options)


def complex_linear_scan(x, y, z, **options):
    log_decay, angle = -jnp.abs(y[:, :, : D // 2]), z[:, :, : D // 2]
    return ops.complex_linear_scan(x, log_decay, angle, **options)


def rg_lru(x, y, z, **options):
    return ops.rg_lru(x, y, z, jnp.linspace(0.0, 3.0, D) + 0.1 * x.sum(), **options)


def causal_conv1d(x, y, z, **options):
    return ops.causal_conv1d(x, y[0, :4], z[0, 0], activation="silu", **options)


def gated_linear_attention(x, y, z, **options):
    q, f, v = map(split_heads, (x, y, z))
    return ops.gated_linear_attention(q, None, v, -jnp.abs(f), **options)


def lightning_attention(x, y, z, **options):
    q, k, v = map(split_heads, (x, y, z))
    return ops.lightning_attention(q, k, v, jnp.array([-0.5, -0.01]), **options)


def narrow_window(x, y, z, size=6, **options):
    """Attention of two heads that share a key and a value."""
    q, k, v = split_heads(x), split_heads(y)[:, :, :1], split_heads(z)[:, :, :1]
    return ops.sliding_window_attention(q, k, v, sliding_window=size, **options)


def wide_window(x, y, z, **options):
    """Attention to more tokens than a device has."""
    return narrow_window(x, y, z, size=23, **options)


def reversed_scan(x, y, z, **options):
    return linear_scan(x, y, z, reverse=True, **options)


FUNCTIONS = (
    *(linear_scan, complex_linear_scan, rg_lru, causal_conv1d),
    *(gated_linear_attention, lightning_attention, narrow_window, wide_window),
)


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


def sequence_sharding(sizes):
    mesh = device_mesh(*sizes).backend_mesh
    return jax.NamedSharding(mesh, jax.P("batch", "sequence"))


def program(function, options, with_state):
    """A program of the output, the state after it, and the gradients of both."""

    def loss(x, y, z, state):
        initial = {"initial_state": state} if with_state else {}
        output, final = function(x, y, z, **options, **initial)
        weight = jnp.cos(jnp.arange(output.size)).reshape(output.shape)
        if "mask" in options:
            weight *= options["mask"].reshape(B, T, *[1] * (output.ndim - 2))
        floats = [a for a in jax.tree.leaves(final) if jnp.issubdtype(a.dtype, jnp.floating)]
        return (output * weight).sum() + sum(jnp.sin(a).sum() for a in floats), (output, final)

    with_gradients = jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True, allow_int=True)

    def outputs(*arguments):
        # The loss is left out: it has more rounding than these.
        (_, output_and_state), gradients = with_gradients(*arguments)
        return output_and_state, gradients

    return jax.jit(outputs)


def assert_close(actual, expected):
    if actual.dtype != jax.dtypes.float0:
        scale = max(np.abs(expected).max(initial=0), 1)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6 * scale)


def compare(function, sizes, is_packed):
    """Packed documents continue an initial state; plain sequences have none."""
    rng = np.random.default_rng(0)
    x, y, z = (rng.normal(size=(B, T, D)).astype("float32") for _ in range(3))
    options = packed_documents(rng) if is_packed else {}
    if is_packed:  # values at padding must not change anything
        real = options["mask"][:, :, None]
        x, y, z = (np.where(real, a, 3.0).astype("float32") for a in (x, y, z))
    _, state = function(x, y, z)
    inputs = x[:, ::-1], y, z
    expected = program(function, options, is_packed)(*inputs, state)
    with sequence_parallel(sizes):
        shards = [jax.device_put(a, sequence_sharding(sizes)) for a in inputs]
        compiled = program(function, options, is_packed).lower(*shards, state).compile()
        actual = compiled(*shards, state)
    jax.tree.map(assert_close, actual, expected)
    assert not any(message.in_loop for message in collectives(compiled.as_text()))


def assert_errors():
    """Attention to all tokens, a length that devices do not divide, and equal axes raise errors."""
    x = np.ones((B, T, H, K), "float32")
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


def bytes_sent(function, length):
    """Bytes that a program for sequences of this length sends; it is compiled but not run."""
    sizes = (1, 8, 1)
    x = jax.ShapeDtypeStruct((B, length, D), "float32", sharding=sequence_sharding(sizes))
    with sequence_parallel(sizes):
        compiled = program(function, {}, False).lower(x, x, x, None).compile()
    return sum(message.nbytes for message in collectives(compiled.as_text()))


def main():
    for function in (*FUNCTIONS, reversed_scan):
        for sizes in ((1, 8, 1), (2, 2, 2)):
            for is_packed in (True, False):
                print(function.__name__, sizes, "packed" if is_packed else "plain")
                compare(function, sizes, is_packed)
    for function in FUNCTIONS:
        # Sequences of 8,192 tokens have 524,288 bytes each of x, y and z.
        assert 0 < bytes_sent(function, 8192) == bytes_sent(function, 32_768) < 32_768, function
    assert_errors()


if __name__ == "__main__":
    main()
