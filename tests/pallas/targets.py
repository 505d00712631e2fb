"""Compiles every Pallas kernel for TPUs, which the machine need not have. Prints JSON.

    python -m tests.pallas.targets v5e:2x2 1

It runs in a separate process: the compiler needs its environment before JAX starts.
"""

import functools
import json
import os
import re
import sys
from typing import NamedTuple

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "KERAS_BACKEND": "jax",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

from keras_recurrent import dispatch
from keras_recurrent.backends.jax import _shards

B, T = 4, 2048
HAWK, TAPS = 2560, 4  # hawk_1.3b
HEADS, SIZE = 16, 128  # hgrn2_1b and tnl_1b

BTD, BTHK = (B, T, HAWK), (B, T, HEADS, SIZE)
# {operation: the shapes of its tensors, and of its state}
SHAPES: dict[str, tuple[list[tuple], tuple]] = {
    "linear_scan": ([BTD, BTD], (B, HAWK)),
    "rg_lru": ([BTD, BTD, BTD, (HAWK,)], (B, HAWK)),
    "causal_conv1d": ([BTD, (TAPS, HAWK), (HAWK,)], (B, TAPS - 1, HAWK)),
    "gated_linear_attention": ([BTHK, BTHK, BTHK, BTHK], (B, HEADS, SIZE, SIZE)),
    "lightning_attention": ([BTHK, BTHK, BTHK, (HEADS,)], (B, HEADS, SIZE, SIZE)),
}


class Attention(NamedTuple):
    batch: int
    length: int
    heads: int  # of queries, which share one key
    size: int
    window: int


ATTENTION = {
    "sliding_window_attention/griffin_1.3b": Attention(4, 2048, 16, 128, 1024),
    "sliding_window_attention/recurrentgemma_2b": Attention(2, 4096, 10, 256, 2049),
}
# {dimensions of a tensor or a state: its split over a mesh of batch and model}
TENSORS = {1: jax.P("model"), 2: jax.P(None, "model"), 3: jax.P("batch", None, "model")}
STATES = {2: jax.P("batch", "model"), 3: jax.P("batch", None, "model"), 4: jax.P("batch", "model")}


def make_mesh(topology, devices):
    """A mesh of one device, or of two along `batch` and the rest along `model`."""
    described = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    shape = (1, 1) if devices == 1 else (2, devices // 2)
    return jax.sharding.Mesh(np.array(described[:devices]).reshape(shape), ("batch", "model"))


def arguments(operation, mesh, dtype):
    """The shapes of the arguments of forward and backward, with heads and channels in one axis."""

    def array(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec))

    if operation in ATTENTION:
        batch, length, heads, size, _ = ATTENTION[operation]
        q = array((batch, length, heads * size), dtype, TENSORS[3])
        k = v = array((batch, length, size), dtype, jax.P("batch"))
        documents = array((batch, length), "int32", jax.P("batch"))
        sums = array((batch, heads, length), "float32", jax.P("batch", "model"))
        forward = [q, k, v, documents, documents]
        return forward, [*forward, sums, sums, q]
    module = dispatch.IMPLEMENTATIONS[operation]["pallas"]
    tensors, state_shape = SHAPES[operation]

    def tensor(shape, dtype):
        shape = (*shape[:2], HEADS * SIZE) if shape == BTHK else shape
        return array(shape, dtype, TENSORS[len(shape)])

    state = array(state_shape, "float32", STATES[len(state_shape)])
    kinds = array((B, T), "int8", jax.P("batch"))
    shapes = [jax.ShapeDtypeStruct(s, dtype) for s in tensors]
    output, *_ = jax.tree.leaves(jax.eval_shape(module.forward, *shapes, state, kinds))
    output = tensor(output.shape, output.dtype)
    forward = [*(tensor(shape, dtype) for shape in tensors), state, kinds]
    return forward, [*forward, output, output, state]


def kernel(operation, direction, implementation, **options):
    """Forward or backward, as a function of tensors with heads and channels in one axis."""
    if operation in ATTENTION:
        module = dispatch.IMPLEMENTATIONS["sliding_window_attention"][implementation]
        return attention_kernel(ATTENTION[operation], direction, module)
    function = getattr(dispatch.IMPLEMENTATIONS[operation][implementation], direction)
    function = functools.partial(function, **options)
    flat = (B, T, HEADS * SIZE)

    def reshape(tensors, shape, new_shape):
        if BTHK not in SHAPES[operation][0]:
            return tensors
        return [t.reshape(new_shape) if t is not None and t.shape == shape else t for t in tensors]

    def call(*tensors):
        results = jax.tree.leaves(function(*reshape(tensors, flat, BTHK)))
        return reshape(results, BTHK, flat)

    return call


def attention_kernel(case, direction, module):
    _, _, heads, size, window = case
    options = {"window": window, "dtype": jnp.float32}

    def split(q, k, v, *documents):
        q = q.reshape(*q.shape[:2], 1, heads, size)
        return q, k[:, :, None], v[:, :, None], *documents

    def flatten(x):
        return x.reshape(*x.shape[:2], -1)

    def forward(*tensors):
        output, sums = module.forward(*split(*tensors), **options)
        return flatten(output), *(jnp.swapaxes(x[:, :, 0], 1, 2) for x in sums)

    def backward(*tensors):
        *inputs, largest, sum_at_largest, d_output = tensors
        sums = tuple(jnp.swapaxes(x, 1, 2)[:, :, None] for x in (largest, sum_at_largest))
        d_output = d_output.reshape(*d_output.shape[:2], 1, heads, size)
        gradients = module.backward(*split(*inputs), sums, d_output, **options)
        return [flatten(d).astype(d_output.dtype) for d in gradients]

    return {"forward": forward, "backward": backward}[direction]


def program(operation, direction, mesh, **options):
    """One Pallas kernel on a mesh."""

    def call(*tensors):
        with _shards.over(mesh):
            return kernel(operation, direction, "pallas", **options)(*tensors)

    return call


def compile_program(operation, direction, mesh, dtype, **options):
    forward, backward = arguments(operation, mesh, dtype)
    shapes = forward if direction == "forward" else backward
    return jax.jit(program(operation, direction, mesh, **options)).lower(*shapes).compile()


def report(executable):
    """Numbers of kernels and of collective operations, and bytes, of a compiled program."""
    memory, text = executable.memory_analysis(), executable.as_text()
    collectives = ("all-gather", "all-to-all", "collective-permute")
    return {
        "kernels": text.count('custom_call_target="tpu_custom_call"'),
        "arguments": memory.argument_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "peak": memory.peak_memory_in_bytes,
        "moved": memory.argument_size_in_bytes + memory.output_size_in_bytes,
        "collectives": sum(len(re.findall(rf" {name}(?:-start)?\(", text)) for name in collectives),
    }


def main(topology, devices):
    mesh, devices = make_mesh(topology, int(devices)), int(devices)
    operations = [o for o in SHAPES if not isinstance(dispatch.IMPLEMENTATIONS[o]["pallas"], str)]
    operations += [o for o, a in ATTENTION.items() if a.heads % mesh.shape["model"] == 0]
    variants = [(operation, operation, {}) for operation in operations]
    variants.append(("causal_conv1d, silu", "causal_conv1d", {"activation": "silu"}))
    reports = {
        f"{name} {direction} {dtype}": report(
            compile_program(operation, direction, mesh, dtype, **options)
        )
        for name, operation, options in variants
        for direction in ("forward", "backward")
        for dtype in (("bfloat16",) if devices > 1 else ("bfloat16", "float32"))
    }
    assert jnp.zeros(()).devices().pop().platform == "cpu"
    print(json.dumps(reports))


if __name__ == "__main__":
    main(*sys.argv[1:])
