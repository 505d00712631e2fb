"""Counts the bytes that the TPU kernels move, compiled and not run, relative to a floor.

The floor is each tensor read once and each result written once. The bytes of a kernel are counted
along its grid, by its index maps: a block that does not change is not fetched again. Bytes that XLA
moves around the kernel are read from the compiled program. XLA's counts of other programs for the
same operation are printed, too: of plain JAX, and of single tokens, which have no kernel.
"""

import math
import re

from tests.pallas import targets  # isort: skip  (sets the compiler's environment)

import jax
import jax.extend
import jax.numpy as jnp

from benchmarks.timing import print_results
from keras_recurrent import dispatch

TOPOLOGY = "v5e:2x2"
DTYPES = ("bfloat16", "float32")
FREE = ("parameter", "constant", "bitcast", "get-tuple-element", "tuple", "custom-call")
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}


def kernels(jaxpr):
    """Returns every call of a Pallas kernel in a program."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
            continue
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from kernels(inner)


def bytes_of_kernel(equation):
    """Counts bytes between memory and VMEM along the grid."""
    mapping = equation.params["grid_mapping"]
    steps = [axis.ravel() for axis in jnp.meshgrid(*map(jnp.arange, mapping.grid), indexing="ij")]
    total = 0
    for block in mapping.block_mappings:
        indices = jax.vmap(jax.extend.core.jaxpr_as_fun(block.index_map_jaxpr))(*steps)
        indices = list(zip(*(i.tolist() for i in indices), strict=True))
        array = block.array_aval
        sizes = [getattr(size, "block_size", 1) for size in block.block_shape]
        for previous, index in zip([None, *indices], indices, strict=False):
            if index != previous:
                axes = zip(index, sizes, array.shape, strict=True)
                count = math.prod(min(size, length - i * size) for i, size, length in axes)
                total += count * array.dtype.itemsize
    return total


def bytes_around_kernels(text):
    """Counts bytes that a compiled program reads and writes outside its kernels."""
    sizes, total = {}, 0
    for line in text[text.index("\nENTRY") :].splitlines():
        match = re.match(r"\s+(?:ROOT )?%(\S+) = (.*?) ([\w-]+)\((.*?)\)", line)
        if not match:
            continue
        name, shapes, kind, operands = match.groups()
        sizes[name] = sum(
            BYTES[dtype] * math.prod(map(int, filter(None, dims.split(","))))
            for dtype, dims in re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", shapes)
        )
        if kind not in FREE and not kind.endswith("-done"):
            total += sizes[name] + sum(sizes.get(o, 0) for o in re.findall(r"%([\w.-]+)", operands))
    return total


def measure(operation, direction, dtype, mesh):
    """Returns the floor, and the bytes of kernel, surroundings and plain JAX relative to it."""
    shapes = targets.arguments(operation, mesh, dtype)[direction == "backward"]
    traced = jax.jit(targets.program(operation, direction, mesh)).trace(*shapes)
    executable = traced.lower().compile()
    memory = executable.memory_analysis()
    floor = memory.argument_size_in_bytes + memory.output_size_in_bytes
    inside = sum(map(bytes_of_kernel, kernels(traced.jaxpr.jaxpr)))
    outside = bytes_around_kernels(executable.as_text())
    plain = jax.jit(targets.kernel(operation, direction, "jax")).lower(*shapes).compile()
    moved = {"kernel": inside, "around it": outside, "sum": inside + outside}
    moved["plain"] = bytes_accessed(plain)
    key = {"operation": operation, "pass": direction, "dtype": dtype}
    ratios = {name: round(number / floor, 3) for name, number in moved.items()}
    return {**key, "floor, MiB": round(floor / 2**20), **ratios}


def bytes_accessed(compiled):
    """Returns the bytes that a program reads and writes, by XLA's cost analysis."""
    return (compiled.cost_analysis() or {})["bytes accessed"]


def measure_single_token(mesh):
    """Yields the bytes of a step of linear attention, which XLA compiles without Pallas."""
    replicated = jax.NamedSharding(mesh, jax.P())
    token, decay, state = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=replicated)
        for shape, dtype in (
            ((targets.B, 1, targets.HEADS, targets.SIZE), "bfloat16"),
            ((targets.HEADS,), "float32"),
            ((targets.B, targets.HEADS, targets.SIZE, targets.SIZE), "float32"),
        )
    )
    for operation, log_decay in (("gated_linear_attention", token), ("lightning_attention", decay)):
        forward = dispatch.IMPLEMENTATIONS[operation]["jax"].forward
        compiled = jax.jit(forward).lower(token, token, token, log_decay, state, None).compile()
        ratio = bytes_accessed(compiled) / targets.report(compiled)["moved"]
        yield {"a single token of": operation, "bytes / floor": round(ratio, 2)}


def measure_all():
    mesh = targets.make_mesh(TOPOLOGY, 1)
    for operation in (*targets.SHAPES, *targets.ATTENTION):
        for direction in ("forward", "backward"):
            for dtype in DTYPES:
                yield measure(operation, direction, dtype, mesh)
    yield from measure_single_token(mesh)


if __name__ == "__main__":
    print(f"Compiled for {TOPOLOGY}. Bytes relative to the floor.")
    print_results(measure_all())
