"""Launches in programs of JAX, by the custom call for Triton's kernels that its CUDA plugin brings.

A kernel is compiled by Triton to PTX when a program is lowered, for the GPU at hand, and by JAX's
own assembler when the program first runs. Where Triton's interpreter is on, launches run in NumPy
on the host, called back from programs for the CPU.

JAX's plugin calls the module used here private. `jax-triton` does the same by names that are
public, and needs JAX 0.11.
"""

import functools
import importlib
import zlib

import jax
import jax.numpy as jnp
import triton
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from triton.backends.compiler import GPUTarget

from ...jax import _gpu, _shards
from ...jax._common import size_reason
from .._device.common import INTERPRETED, assembler_error_note
from . import interpreter
from .operation import options_of

zeros_like = jnp.zeros_like
_TYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "int32": "i32",
    "int64": "i64",
    "int8": "i8",
}
# What the oldest assembler understands that JAX takes (CUDA 12.6), and that later GPUs need.
_PTX_VERSION, _PTX_VERSIONS = 86, {103: 88, 110: 90, 120: 87, 121: 88}
_ALIGNED = ("tt.divisibility", 16)  # bytes of an address, or a number's factor


def unsupported_reason(*tensors):
    """Reason why kernels cannot take tensors of these shapes and dtypes, or None."""
    if reason := size_reason(*tensors):
        return reason
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.dtype == jnp.float64:
            return "computes in float32, got a float64 tensor"
        if tensor.dtype.name not in _TYPES:
            return f"takes tensors of {', '.join(_TYPES)}, got {tensor.dtype.name}"
    return None


# Where a decoding step is differentiated, plain JAX replaces the kernel.
step_unsupported_reason = unsupported_reason
token_wise_unsupported_reason = unsupported_reason


def fusible_unsupported_reason(*tensors):
    """Reason for operations that XLA fuses with their neighbors: kernels are not used on JAX."""
    return "XLA fuses this operation with its neighbors"


def cast(x, dtype):
    return x.astype(dtype)


def aligned(*tensors):
    """Whether all begin at a multiple of 16 bytes, as XLA's arrays do."""
    return True


def pdl_options(x):
    """Launch options for programmatic dependent launch (`pdl.py`), which JAX does not offer."""
    return {"PDL": False}


def tuning_unavailable_reason():
    """Reason why kernels cannot be timed: programs are lowered before they can run."""
    return "Keras runs on 'jax', whose programs take the default of each kernel"


def search_sorted_rows(rows, count, right=False):
    """The JAX version of `torch_operators.search_sorted_rows`."""
    find = functools.partial(jnp.searchsorted, v=jnp.arange(count), side=("left", "right")[right])
    return jax.vmap(find)(rows).astype(jnp.int32)


def run(launch):
    """The arrays that a launch writes, in the program that is being traced."""
    given = [x for x in launch.inputs if x is not None]
    static = launch._replace(
        inputs=tuple(x is not None for x in launch.inputs),
        options=tuple(sorted(launch.options.items())),
    )
    found = iter(_launch.bind(*given, launch=static))
    return tuple(None if array is None else next(found) for array in launch.outputs)


NAME = "keras_recurrent_triton"  # of a launch, in a program
_launch = Primitive(NAME)
_launch.multiple_results = True


def _written(launch):
    return [array for array in launch.outputs if array is not None]


@_launch.def_abstract_eval
def _(*_, launch):
    return [jax.core.ShapedArray(a.shape, jnp.dtype(a.dtype)) for a in _written(launch)]


def _one_after_another(arrays, axes, *, launch):
    """A launch for each member of an axis that `jax.vmap` maps."""
    arrays = [x if a is None else jnp.moveaxis(x, a, 0) for x, a in zip(arrays, axes, strict=True)]

    def one(mapped):
        mapped = iter(mapped)
        return _launch.bind(
            *(x if a is None else next(mapped) for x, a in zip(arrays, axes, strict=True)),
            launch=launch,
        )

    mapped = [x for x, a in zip(arrays, axes, strict=True) if a is not None]
    return jax.lax.map(one, mapped), [0] * len(_written(launch))


batching.primitive_batchers[_launch] = _one_after_another


def _no_derivative(primals, tangents, *, launch):
    raise NotImplementedError(
        f"the Triton kernel `{launch.kernel.__name__}` has no derivative here: it is a step of "
        "generation, or itself a gradient. Leave `implementation` to choose by itself, or name "
        "'jax', which has it."
    )


ad.primitive_jvps[_launch] = _no_derivative


def _lower(ctx, *operands, launch):
    compiled, arguments = compile_launch(
        launch, ctx.avals_in, GPUTarget("cuda", _gpu.capability(), 32)
    )
    gpu = _gpu.plugin()
    parameters = []
    for kind, value in arguments:
        if kind == "array":
            parameters.append(gpu.create_array_parameter(value, _ALIGNED[1]))
        else:
            parameters.append(gpu.create_scalar_parameter(value, kind))
    metadata = compiled.metadata
    kernel = gpu.TritonKernel(
        metadata.name,
        metadata.num_warps,
        metadata.num_ctas,
        metadata.shared,
        compiled.asm["ptx"],
        "",
        metadata.target.arch,
    )
    call = gpu.TritonKernelCall(kernel, launch.programs, 1, 1, parameters)
    packed, aliases = zlib.compress(call.to_proto(metadata.name, b"")), _aliases(launch)
    if _gpu.supports_cuda_graphs():
        lowering = jax.ffi.ffi_lowering(_gpu.CALL, operand_output_aliases=aliases)
        return lowering(ctx, *operands, opaque=packed)
    lowering = jax.ffi.ffi_lowering(
        _gpu.OLDER_CALL,
        api_version=2,
        backend_config=packed,  # type: ignore[arg-type]
        operand_output_aliases=aliases,
    )
    return lowering(ctx, *operands)


def _aliases(launch):
    """{the place of an operand: that of the result in its memory}; XLA copies where it must."""
    written = [array is not None for array in launch.outputs]
    return {sum(launch.inputs[:i]): sum(written[:out]) for i, out in launch.updates} or None


def compile_launch(launch, inputs, target):
    """A launch's kernel, compiled, and its arguments as pairs of a type and a value.

    The value of an array, whose type is "array", is how many bytes of it to set to zero first.
    inputs: shapes and dtypes of the arrays that are given, in their order.
    """
    inputs = iter(inputs)
    arrays = [(next(inputs).dtype.name, 0) if given else None for given in launch.inputs]
    for array in launch.outputs:
        arrays.append(None if array is None else (array.dtype, _bytes(array) * array.zeros))
    options = dict(launch.options)
    names = launch.kernel.arg_names
    values = dict(zip(names, [*arrays, *launch.numbers], strict=False))
    unspecialized = {p.name for p in launch.kernel.params if p.do_not_specialize}
    signature, aligned, constants, arguments = {}, {}, {}, []
    for i, name in enumerate(names):
        value = values[name] if name in values else options.pop(name)
        if isinstance(value, tuple):
            dtype, zeroed = value
            signature[name] = f"*{_TYPES[dtype]}"
            aligned[(i,)] = [list(_ALIGNED)]
            arguments.append(("array", zeroed))
        elif name not in values or value is None or (value == 1 and name not in unspecialized):
            signature[name] = "constexpr"
            constants[(i,)] = value
        else:
            signature[name] = _type_of(value)
            if isinstance(value, int) and value % 16 == 0 and name not in unspecialized:
                aligned[(i,)] = [list(_ALIGNED)]
            arguments.append((signature[name], value))
    key = tuple(signature.items()), tuple(constants.items()), tuple(aligned), tuple(options.items())
    return _compiled(launch.kernel, *key, target), arguments


def _bytes(array):
    return int(jnp.dtype(array.dtype).itemsize * functools.reduce(int.__mul__, array.shape, 1))


def _type_of(number):
    if isinstance(number, float):
        return "fp32"
    return "i32" if -(2**31) <= number < 2**31 else "i64"


@functools.cache
def _compiled(kernel, signature, constants, aligned, options, target):
    source = triton.compiler.ASTSource(
        kernel, dict(signature), dict(constants), {i: [list(_ALIGNED)] for i in aligned}
    )
    options = {name: value for name, value in options if value is not None}
    version = _PTX_VERSIONS.get(target.arch, _PTX_VERSION)
    options = {"ptx_version": version, **options}
    try:
        compiled = triton.compile(source, target=target, options=options)
    except triton.runtime.errors.PTXASError as error:
        error.add_note(assembler_error_note(kernel, "jax"))
        raise
    if compiled.metadata.global_scratch_size:
        raise NotImplementedError(f"`{kernel.__name__}` needs memory that JAX does not give it")
    return compiled


def _interpret(ctx, *operands, launch):
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in _written(launch)]

    def call(*arrays):
        return jax.pure_callback(
            functools.partial(interpreter.run, launch), shapes, *arrays, vmap_method="sequential"
        )

    return mlir.lower_fun(call, multiple_results=True)(ctx, *operands)


def _refuse(ctx, *operands, launch):
    raise NotImplementedError(
        "the Triton kernels run where a program is lowered for CUDA, got one for "
        f"{', '.join(ctx.module_context.platforms)}: leave `implementation` to choose by itself. "
        "For tests, the environment variable TRITON_INTERPRET=1, set before Python starts, has "
        "Triton interpret them on a CPU, slowly"
    )


mlir.register_lowering(_launch, _refuse)
mlir.register_lowering(_launch, _lower, platform="cuda")
if INTERPRETED:
    mlir.register_lowering(_launch, _interpret, platform="cpu")


def forward_operation(name, forward, results, count, updates=()):
    """The function of an operation's tensors and options, without gradients."""
    del name, results, count, updates  # the launches say all
    return jax.jit(forward, static_argnames=tuple(options_of(forward)))


def operation(definition):
    """The function of an `Operation`'s tensors and options; None where XLA serves it as well."""
    return definition.dimensions and _Kernels(definition)


class _Kernels:
    """The passes of an operation, and the differentiable function made of them.

    `forward` and `backward` have the parameters of those in the file of the same name in
    `backends/jax`.
    """

    def __init__(self, definition):
        self.forward, self.backward = _passes(definition)
        plain = importlib.import_module(f"...jax.{definition.name}", __package__)
        self._run = plain.operation(self.forward, self.backward)

    def __call__(self, *tensors, **options):
        return self._run(*tensors, **options)


def _passes(definition):
    """The forward and the backward of an `Operation`, on shards and under `jax.vmap`.

    Over time, what is kept stands beside the results, and in the place of the output backwards.
    """
    tensors, results = definition.dimensions, definition.result_dimensions
    keeps = bool(definition.kept) and not definition.is_token_wise
    output = results[:1] if definition.keeps_output else results[-1:] if keeps else (None,)
    d_results = results[:-1] if keeps else results
    differentiable, channels = definition.differentiable, definition.channels

    def forward(*arguments, **options):
        run = functools.partial(definition.forward, **options)
        given, written = _named((tensors, results), arguments[0])
        found = _shards.distributed(run, given, written, channels)(*arguments)
        return (found[:-1], found[-1]) if keeps else found

    def backward(*arguments, **options):
        given = zip(differentiable, arguments, strict=False)
        present = [x is not None or name in definition.without for name, x in given]

        def gradients(*arguments):
            if keeps:
                arguments = *arguments[: len(tensors)], None, *arguments[len(tensors) :]
            found = definition.backward(*arguments, **options)
            return tuple(d for d, p in zip(found, present, strict=False) if p)

        of_present = [t for t, p in zip(tensors, present, strict=False) if p]
        names = *tensors, *output, *d_results
        given, written = _named((names, of_present), arguments[0])
        found = iter(_shards.distributed(gradients, given, written, channels)(*arguments))
        found = [next(found) if p else None for p in present]
        return *found, *[None] * (len(tensors) - len(found))

    return forward, backward


def _named(names, first):
    """Names of dimensions with "b" and others in place of "...", by the first tensor's rank."""
    if first is None or not names[0][0].startswith("..."):
        return names
    tokens = " ".join(["b", *(f"t{i}" for i in range(1, first.ndim))][: first.ndim - 1])
    return [[n and n.replace("...", tokens) for n in of] for of in names]
