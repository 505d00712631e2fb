"""Compile every Pallas kernel for TPUs, which need not be there. Prints JSON.

A process of its own, `python -m tests.pallas.targets v5e:2x2`: the compiler wants its environment
before JAX starts.
"""

import functools
import json
import os
import re
import sys

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
from tests.pallas import attention

TOPOLOGIES = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
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
# How a mesh of batch and model splits tensors of so many dimensions.
TENSORS = {1: jax.P("model"), 2: jax.P(None, "model"), 3: jax.P("batch", None, "model")}
STATES = {2: jax.P("batch", "model"), 3: jax.P("batch", None, "model"), 4: jax.P("batch", "model")}


def mesh(topology, devices):
    """Of `batch` and `model`, two by the rest, or one device."""
    found = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    shape = (1, 1) if devices == 1 else (2, devices // 2)
    return jax.sharding.Mesh(np.array(found[:devices]).reshape(shape), ("batch", "model"))


def arguments(operation, mesh, dtype):
    """What forward takes, and what backward takes: shapes of tensors, flat as models make them."""
    if operation in attention.ROWS:
        return attention.arguments(operation, mesh, dtype)
    module = dispatch.IMPLEMENTATIONS[operation]["pallas"]
    tensors, state_shape = SHAPES[operation]

    def array(shape, dtype, specs):
        shape = (*shape[:2], HEADS * SIZE) if shape == BTHK else shape
        sharding = jax.NamedSharding(mesh, specs[len(shape)])
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    given = [array(shape, dtype, TENSORS) for shape in tensors]
    state = array(state_shape, "float32", STATES)
    given += [state, array((B, T), "int8", {2: jax.P("batch")})]
    shapes = [jax.ShapeDtypeStruct(s, dtype) for s in tensors]
    output, _ = jax.eval_shape(module.forward, *shapes, *given[-2:])
    output = array(output.shape, output.dtype, TENSORS)
    return given, [*given, output, output, state]


def kernel(operation, direction, implementation, **options):
    """A function of tensors as models make them, with heads and their channels in one."""
    if operation in attention.ROWS:
        module = dispatch.IMPLEMENTATIONS["sliding_window_attention"][implementation]
        return attention.function(operation, direction, module)
    function = getattr(dispatch.IMPLEMENTATIONS[operation][implementation], direction)
    function = functools.partial(function, **options)
    flat = (B, T, HEADS * SIZE)

    def reshape(tensors, shape, into):
        if BTHK not in SHAPES[operation][0]:
            return tensors
        return [t.reshape(into) if t is not None and t.shape == shape else t for t in tensors]

    return lambda *tensors: reshape(function(*reshape(tensors, flat, BTHK)), BTHK, flat)


def program(operation, direction, mesh, **options):
    """One kernel alone, on a mesh."""

    def call(*tensors):
        with _shards.over(mesh):
            return kernel(operation, direction, "pallas", **options)(*tensors)

    return call


def compiled(operation, direction, mesh, dtype, **options):
    forward, backward = arguments(operation, mesh, dtype)
    shapes = forward if direction == "forward" else backward
    return jax.jit(program(operation, direction, mesh, **options)).lower(*shapes).compile()


def report(executable):
    memory = executable.memory_analysis()
    text = executable.as_text()
    count = {
        name: len(re.findall(rf" {name}(?:-start)?\(", text))
        for name in ("all-gather", "all-to-all", "collective-permute")
    }
    return {
        "kernels": text.count('custom_call_target="tpu_custom_call"'),
        "arguments": memory.argument_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "peak": memory.peak_memory_in_bytes,
        "moved": memory.argument_size_in_bytes + memory.output_size_in_bytes,
        **count,
    }


def main(topology, devices):
    found = mesh(topology, int(devices))
    operations = [o for o in SHAPES if not isinstance(dispatch.IMPLEMENTATIONS[o]["pallas"], str)]
    operations += [name for name in attention.ROWS if attention.splits(name, found.shape["model"])]
    variants = [(operation, operation, {}) for operation in operations]
    variants.append(("causal_conv1d, silu", "causal_conv1d", {"activation": "silu"}))
    reports = {
        f"{name} {direction} {dtype}": report(
            compiled(operation, direction, found, dtype, **options)
        )
        for name, operation, options in variants
        for direction in ("forward", "backward")
        for dtype in (("bfloat16",) if int(devices) > 1 else ("bfloat16", "float32"))
    }
    assert jnp.zeros(()).devices().pop().platform == "cpu"
    print(json.dumps(reports))


if __name__ == "__main__":
    main(*sys.argv[1:])
