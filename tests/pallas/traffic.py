"""Counts the bytes that the TPU kernels move, relative to the floor. Compiled, not run.

    python -m tests.pallas.traffic

The floor is each tensor read once and each result written once. Bytes of a kernel are counted by
walking its grid through its index maps: a block that stays is not fetched again. Bytes that XLA
moves around the call are read from the compiled program. For comparison, XLA's count of other
programs for the same operation is printed.
"""

import math
import re

from tests.pallas import targets, training  # isort: skip  (sets the compiler's environment)

import jax
import jax.extend
import jax.numpy as jnp

from keras_recurrent import dispatch
from tests.pallas import attention

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


def walked(equation):
    """Counts bytes between memory and VMEM along the grid."""
    mapping = equation.params["grid_mapping"]
    steps = [axis.ravel() for axis in jnp.meshgrid(*map(jnp.arange, mapping.grid), indexing="ij")]
    total = 0
    for block in mapping.block_mappings:
        places = jax.vmap(jax.extend.core.jaxpr_as_fun(block.index_map_jaxpr))(*steps)
        places = list(zip(*(p.tolist() for p in places), strict=True))
        array = block.array_aval
        sizes = [getattr(size, "block_size", 1) for size in block.block_shape]
        for before, place in zip([None, *places], places, strict=False):
            if place != before:
                ends = zip(place, sizes, array.shape, strict=True)
                numbers = math.prod(min(size, whole - at * size) for at, size, whole in ends)
                total += numbers * array.dtype.itemsize
    return total


def around(text):
    """Counts bytes that a compiled program reads and writes outside its kernels."""
    sizes, total = {}, 0
    for line in text[text.index("\nENTRY") :].splitlines():
        found = re.match(r"\s+(?:ROOT )?%(\S+) = (.*?) ([\w-]+)\((.*?)\)", line)
        if not found:
            continue
        name, shapes, kind, operands = found.groups()
        sizes[name] = sum(
            BYTES[dtype] * math.prod(map(int, filter(None, dims.split(","))))
            for dtype, dims in re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", shapes)
        )
        if kind not in FREE and not kind.endswith("-done"):
            total += sizes[name] + sum(sizes.get(o, 0) for o in re.findall(r"%([\w.-]+)", operands))
    return total


def row(operation, direction, dtype, mesh):
    shapes = targets.arguments(operation, mesh, dtype)[direction == "backward"]
    traced = jax.jit(targets.program(operation, direction, mesh)).trace(*shapes)
    executable = traced.lower().compile()
    memory = executable.memory_analysis()
    floor = memory.argument_size_in_bytes + memory.output_size_in_bytes
    inside = sum(map(walked, kernels(traced.jaxpr.jaxpr)))
    outside = around(executable.as_text())
    plain = targets.kernel(operation, direction, "jax")
    other = accessed(jax.jit(plain).lower(*shapes).compile())
    return floor, inside, outside, other


def accessed(compiled):
    """Returns the bytes that a program reads and writes, by XLA's cost analysis."""
    return (compiled.cost_analysis() or {})["bytes accessed"]


def others(mesh):
    """Counts the bytes of JAX's own scans for the recurrence, in float32."""

    def associative(x, log_a):
        def join(left, right):
            return left[0] * right[0], left[1] * right[0] + right[1]

        return jax.lax.associative_scan(join, (jnp.exp(log_a), x), axis=1)[1]

    def sequential(x, log_a):
        def step(h, token):
            h = jnp.exp(token[1]) * h + token[0]
            return h, h

        timed = jnp.swapaxes(x, 0, 1), jnp.swapaxes(log_a, 0, 1)
        return jnp.swapaxes(jax.lax.scan(step, jnp.zeros_like(x[:, 0]), timed)[1], 0, 1)

    shapes = targets.arguments("linear_scan", mesh, "float32")[0][:2]
    floor = 3 * math.prod(shapes[0].shape) * 4
    for name, function in (("associative_scan", associative), ("scan", sequential)):
        compiled = jax.jit(function).lower(*shapes).compile()
        yield name, accessed(compiled) / floor


def one_token(mesh):
    """Counts the bytes of a decoding step of linear attention, which is left to XLA."""
    everywhere = jax.NamedSharding(mesh, jax.P())
    token, decay, state = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)
        for shape, dtype in (
            ((targets.B, 1, targets.HEADS, targets.SIZE), "bfloat16"),
            ((targets.HEADS,), "float32"),
            ((targets.B, targets.HEADS, targets.SIZE, targets.SIZE), "float32"),
        )
    )
    for operation, log_decay in (("gated_linear_attention", token), ("lightning_attention", decay)):
        forward = dispatch.IMPLEMENTATIONS[operation]["jax"].forward
        compiled = jax.jit(forward).lower(token, token, token, log_decay, state, None).compile()
        yield operation, accessed(compiled) / targets.report(compiled)["moved"]


def main():
    mesh = targets.mesh(TOPOLOGY, 1)
    print("# Bytes moved on TPU\n")
    print(f"Compiled for {TOPOLOGY}, not run: no TPU was at hand. B, T = {targets.B}, {targets.T};")
    print("hawk_1.3b's width, the heads of hgrn2_1b and tnl_1b; made by tests/pallas/traffic.py.")
    print("As many tokens for attention, of two presets, all in front of the padding: rows with")
    print("padding between them cost more, for XLA moves their tokens together first.\n")
    print("Times the floor, which is every tensor read once and every result written once. The")
    print("kernel's bytes are counted along its grid; those around it, and the plain version's,")
    print("are XLA's.\n")
    print("| operation | pass | dtype | floor, MiB | kernel | around it | sum | plain |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for operation in (*targets.SHAPES, *attention.ROWS):
        for direction in ("forward", "backward"):
            for dtype in DTYPES:
                floor, *moved = row(operation, direction, dtype, mesh)
                inside, outside, plain = (bytes_ / floor for bytes_ in moved)
                numbers = (inside, outside, inside + outside, plain)
                cells = " | ".join(f"{n:.3f}" for n in numbers)
                line = f"| `{operation}` | {direction} | {dtype} | {floor / 2**20:.0f} | {cells} |"
                print(line, flush=True)
    print("\nJAX's own ways to write `linear_scan`'s forward, in float32, as XLA counts them:\n")
    for name, times in others(mesh):
        print(f"- `jax.lax.{name}`: {times:.1f} times the floor")
    print("\nOne token of linear attention, in bfloat16, which the kernels leave to XLA: the plain")
    print("version reads and writes the state once, and that is most of the floor.\n")
    for operation, times in one_token(mesh):
        print(f"- `{operation}`: {times:.2f} times the floor")
    report = training.report()
    variables, peak = (report[name] / 2**30 for name in ("arguments", "peak"))
    print(f"\nA whole training step of hawk_1.3b, {training.B}×{training.T} tokens, compiled for")
    print(f"{training.TOPOLOGY}, not run: Adam, weights in float32, computed in bfloat16, blocks")
    print(f"recompute. {report['kernels']} kernels are inside. Of a chip's 16 GiB, weights and")
    print(f"moments take {variables:.2f}, and {peak:.2f} are the peak.")


if __name__ == "__main__":
    main()
