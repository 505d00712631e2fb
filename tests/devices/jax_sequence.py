"""Operations over time whose tokens are on eight simulated devices, beside one. Prints JSON.

A process of its own, for it has eight devices. Its arguments: none, or "quick" and the
names of operations, for one mesh and one case of each.
"""

import json
import sys

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_recurrent import ops
from tests.devices.programs import collectives

B, T, H, K = 2, 64, 2, 4
D = H * K


def heads(x):
    return x.reshape(*x.shape[:2], H, K)


def linear_scan(x, y, z, **given):
    return ops.linear_scan(x, -jnp.abs(y), **given)


def complex_linear_scan(x, y, z, **given):
    return ops.complex_linear_scan(x, -jnp.abs(y[:, :, : D // 2]), z[:, :, : D // 2], **given)


def rg_lru(x, y, z, **given):
    return ops.rg_lru(x, y, z, jnp.linspace(0.0, 3.0, D) + 0.1 * x.sum(), **given)


def causal_conv1d(x, y, z, **given):
    return ops.causal_conv1d(x, y[0, :4], z[0, 0], activation="silu", **given)


def gated_linear_attention(x, y, z, **given):
    q, f, v = map(heads, (x, y, z))
    return ops.gated_linear_attention(q, None, v, -jnp.abs(f), **given)


def lightning_attention(x, y, z, **given):
    q, k, v = map(heads, (x, y, z))
    return ops.lightning_attention(q, k, v, jnp.array([-0.5, -0.01]), **given)


def window(x, y, z, size=6, **given):
    """Of two heads that share a key and a value."""
    q, k, v = heads(x), heads(y)[:, :, :1], heads(z)[:, :, :1]
    return ops.sliding_window_attention(q, k, v, sliding_window=size, **given)


def wide_window(x, y, z, **given):
    """Of more tokens than a device has."""
    return window(x, y, z, size=23, **given)


def reversed_scan(x, y, z, **given):
    return linear_scan(x, y, z, reverse=True, **given)


FUNCTIONS = (
    *(linear_scan, complex_linear_scan, rg_lru, causal_conv1d),
    *(gated_linear_attention, lightning_attention, window, wide_window),
)


def tokens(rng, case):
    """Masks and segments: none, or packed rows with padding everywhere, over whole devices too."""
    if case == "plain":
        return {}
    mask = rng.random((B, T)) < 0.7
    mask[0, 20:41] = False
    segments = np.cumsum(rng.random((B, T)) < 0.08, axis=1).astype("int32")
    segments[1, :] = 0
    return {"mask": mask, "segment_ids": segments}


def distribution(sizes, batch_dim_name="batch"):
    mesh = keras.distribution.DeviceMesh(
        sizes, ("batch", "sequence", "model"), keras.distribution.list_devices()
    )
    layout_map = keras.distribution.LayoutMap(mesh)
    return keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name=batch_dim_name)


def program(function, given, with_state):
    def loss(x, y, z, before):
        state = {"initial_state": before} if with_state else {}
        output, after = function(x, y, z, **given, **state)
        weight = jnp.cos(jnp.arange(output.size)).reshape(output.shape)
        if "mask" in given:
            weight *= given["mask"].reshape(B, T, *[1] * (output.ndim - 2))
        total = (output * weight).sum()
        floats = [a for a in jax.tree.leaves(after) if jnp.issubdtype(a.dtype, jnp.floating)]
        return total + sum(jnp.sin(a).sum() for a in floats), (output, after)

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True, allow_int=True))


def results(found):
    """The output, the state after it and the gradients; the loss has more rounding than these."""
    (_, of_operation), gradients = found
    return of_operation, gradients


def error(found, expected):
    if found.dtype == jax.dtypes.float0:
        return 0.0
    found, expected = np.asarray(found, "float64"), np.asarray(expected, "float64")
    return float(np.abs(found - expected).max(initial=0) / max(np.abs(expected).max(initial=0), 1))


def compare(function, sizes, case, with_state):
    rng = np.random.default_rng(0)
    x, y, z = (rng.normal(size=(B, T, D)).astype("float32") for _ in range(3))
    given = tokens(rng, case)
    if given:  # what padding holds reaches nothing
        x, y, z = (np.where(given["mask"][:, :, None], a, 3.0).astype("float32") for a in (x, y, z))
    _, before = function(x, y, z)  # of other tokens
    arguments = (x[:, ::-1], y, z, before)
    expected = program(function, given, with_state)(*arguments)
    of_sequence = distribution(sizes)
    mesh = of_sequence.device_mesh.backend_mesh
    with of_sequence.scope():
        shards = [
            jax.device_put(a, jax.NamedSharding(mesh, jax.P("batch", "sequence")))
            for a in arguments[:3]
        ]
        compiled = program(function, given, with_state).lower(*shards, before).compile()
        found = compiled(*shards, before)
    sent = collectives(compiled.as_text())
    return {
        "error": max(
            map(error, jax.tree.leaves(results(found)), jax.tree.leaves(results(expected)))
        ),
        "largest": max(c.nbytes for c in sent),
        "in loops": sum(c.in_loop for c in sent),
    }


def refusals():
    """What is said of attention to all tokens, a length that devices do not divide, two axes."""
    x = np.ones((B, T, H, K), "float32")
    for call, sizes, batch in (
        (lambda: ops.sliding_window_attention(x, x, x), (1, 8, 1), "batch"),
        (lambda: ops.linear_scan(x[:, : T - 1, 0], -x[:, : T - 1, 0]), (1, 8, 1), "batch"),
        (lambda: ops.linear_scan(x[:, :, 0], -x[:, :, 0]), (1, 2, 4), "sequence"),
    ):
        try:
            with distribution(sizes, batch_dim_name=batch).scope():
                call()
        except (NotImplementedError, ValueError) as error:
            yield f"{type(error).__name__}: {error}"


def bytes_sent(function, length):
    """Of a program for rows of so many tokens and its gradients, which is compiled but not run."""
    of_sequence = distribution((1, 8, 1))
    where = jax.NamedSharding(of_sequence.device_mesh.backend_mesh, jax.P("batch", "sequence"))
    x = jax.ShapeDtypeStruct((B, length, D), "float32", sharding=where)
    with of_sequence.scope():
        compiled = program(function, {}, False).lower(x, x, x, None).compile()
    return sum(c.nbytes for c in collectives(compiled.as_text()))


def main(*names):
    quick = names[:1] == ("quick",)
    meshes = [(1, 4, 2)] if quick else [(1, 8, 1), (2, 2, 2)]
    found = {}
    for function in (*FUNCTIONS, reversed_scan):
        if quick and function.__name__ not in names:
            continue
        for sizes in meshes:
            for case, with_state in (("packed", True), *([] if quick else [("plain", False)])):
                name = f"{function.__name__} {sizes} {case}"
                found[name] = compare(function, sizes, case, with_state)
    measured = (linear_scan,) if quick else FUNCTIONS
    sent = {f.__name__: [bytes_sent(f, length) for length in (8192, 32768)] for f in measured}
    print(json.dumps({"found": found, "refused": list(refusals()), "sent": sent}))


if __name__ == "__main__":
    main(*sys.argv[1:])
