"""Times linear attention of this package and of jax-linear-attention on JAX, in one run.

    pip install jax-linear-attention==0.1.0
    python -m benchmarks.jax_linear_attention    # NVIDIA Hopper, JAX 0.11.2, two minutes

Prints a line of JSON for each shape: milliseconds of GPU time, forward alone and forward with
gradients, as the median, first and third quartile of five profiles with five calls each. The two
packages are measured in turns. `difference` is the largest difference between their outputs and
gradients, relative to the largest value.
"""

import functools
import json
import os
from collections.abc import Callable

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
from jla import ops as peer_ops

from benchmarks.gpu_on_jax import device_ms
from keras_recurrent import ops

SHAPES = ((8, 2048), (4, 8192), (1, 65536))
HEADS, SIZE, DTYPE = 16, 128, "bfloat16"


def ours_gated(q, k, v, log_f):
    return ops.gated_linear_attention(q, k, v, log_f)[0]


def peer_gated(q, k, v, log_f):
    return peer_ops.linear_attention("gla", q, k, v, g=log_f, scale=1.0, impl="mosaic_gpu")[0]


def ours_lightning(q, k, v, log_decay):
    return ops.lightning_attention(q, k, v, log_decay)[0]


def peer_lightning(q, k, v, log_decay):
    log_decay = jnp.broadcast_to(log_decay, q.shape[:3])
    options = {"g": log_decay, "scale": 1.0, "impl": "mosaic_gpu"}
    return peer_ops.linear_attention("simple_gla", q, k, v, **options)[0]


def gates(key, shape, lower_bound):
    """Logarithms of decays between a lower bound and 1, as the forget gates of HGRN2."""
    uniform = jax.nn.sigmoid(jax.random.normal(key, shape))
    return jnp.log(lower_bound + (1 - lower_bound) * uniform)


def decays(key, shape):
    """Logarithms of decays from near 1 down to e^-10, log-uniform."""
    return -jnp.exp(jax.random.uniform(key, shape, minval=-7.0, maxval=jnp.log(10.0)))


def slopes(key, shape):
    """Decays of Lightning Attention: e to the power of -8 h / H for head h."""
    return -jnp.exp2(-8 * jnp.arange(1, HEADS + 1) / HEADS)


WORK: dict[str, tuple[Callable, Callable, Callable]] = {
    "gated, decays above 0.97": (
        ours_gated,
        peer_gated,
        functools.partial(gates, lower_bound=0.97),
    ),
    "gated, decays down to e^-10": (ours_gated, peer_gated, decays),
    "lightning": (ours_lightning, peer_lightning, slopes),
}


def add_gradients(function, num_inputs):
    """Returns a function of d_output and the arguments that also returns gradients of inputs."""

    def both(d_output, *arrays):
        inputs, constants = arrays[:num_inputs], arrays[num_inputs:]
        output, pull_back = jax.vjp(lambda *inputs: function(*inputs, *constants), *inputs)
        return output, *pull_back(d_output)

    return both


def difference(found, expected):
    pairs = [
        (f.astype("float32"), e.astype("float32")) for f, e in zip(found, expected, strict=True)
    ]
    return [float(jnp.abs(f - e).max() / jnp.abs(e).max()) for f, e in pairs]


def main():
    device = jax.devices()[0].device_kind
    for name, (ours, peer, draw) in WORK.items():
        for batch, time in SHAPES:
            shape = batch, time, HEADS, SIZE
            keys = jax.random.split(jax.random.key(0), 5)
            q, k, v, d_output = (jax.random.normal(key, shape, DTYPE) for key in keys[:4])
            arrays = q, k * SIZE**-0.5, v, draw(keys[4], shape)
            programs = {"ours": ours, "jax-linear-attention": peer}
            results, line = {}, {"work": name, "shape": shape, "device": device}
            for package, function in programs.items():
                both = jax.jit(add_gradients(function, num_inputs=3 if name == "lightning" else 4))
                results[package] = both(d_output, *arrays)
                line[package] = {
                    "forward ms": device_ms(jax.jit(function), arrays),
                    "forward + backward ms": device_ms(both, [d_output, *arrays]),
                }
            line["difference"] = difference(*results.values())
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
