"""Launches in JAX programs, through the custom call for Triton kernels of JAX's CUDA plugin.

Triton compiles a kernel to PTX for the GPU at hand when a program is lowered, or, in
`compile_ahead`, when its launch is traced. JAX's own assembler compiles the PTX when the program
first runs. With Triton's interpreter, launches run in NumPy on the host, called back from CPU
programs.

JAX's plugin declares the module used here private. `jax-triton` uses public names for the same
purpose, and needs JAX 0.11.
"""

import concurrent.futures
import contextlib
import functools
import math
import threading
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import triton_key

from ...jax import _gpu, _shards, _time_groups
from ...jax._common import size_reason
from ...kernel import Kernel, load_kernel
from .._device.common import INTERPRETED, assembler_error_note
from . import interpreter
from .launch import flat, map_arrays
from .operation import parameters_of, tensors_among

zeros_like = jnp.zeros_like


def matrix_product(a, b, dtype):
    highest = jax.lax.Precision.HIGHEST
    return jnp.matmul(a, b, precision=highest, preferred_element_type=dtype)


_TYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "int32": "i32",
    "int64": "i64",
    "int8": "i8",
}
# The PTX version of the oldest assembler that JAX supports (CUDA 12.6), and of later GPUs.
_PTX_VERSION, _PTX_VERSIONS = 86, {103: 88, 110: 90, 120: 87, 121: 88}
_ALIGNED = ("tt.divisibility", 16)  # of an address in bytes, or of an integer


def unsupported_reason(*arguments, **named):
    """Reason why kernels cannot take tensors of these shapes and dtypes, or None."""
    tensors = tensors_among((*arguments, *named.values()))
    if reason := size_reason(*tensors):
        return reason
    for tensor in tensors:
        if tensor.dtype == jnp.float64:
            return "computes in float32, got a float64 tensor"
        if tensor.dtype.name not in _TYPES:
            return f"takes tensors of {', '.join(_TYPES)}, got {tensor.dtype.name}"
    return None


token_wise_unsupported_reason = unsupported_reason
step_unsupported_reason = unsupported_reason  # plain JAX replaces a differentiated decoding step


def cast(x, dtype, copy=True):
    return x.astype(dtype)


def are_aligned(*tensors):
    """Returns True: XLA's arrays begin at multiples of 16 bytes."""
    return True


def compute_capability(x):
    return None if INTERPRETED else divmod(_gpu.capability(), 10)


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
    """Adds a launch to the program that is being traced; returns its outputs."""
    present = [x for x in flat(launch.inputs) if x is not None]
    static = launch._replace(
        inputs=map_arrays(lambda x: x is not None, launch.inputs),
        options=tuple(sorted(launch.options.items())),
    )
    if getattr(_thread, "compiles_ahead", False):
        start_compilation(static, present)
    results = iter(_launch.bind(*present, launch=static))
    return map_arrays(lambda array: array if array is None else next(results), launch.outputs)


_thread = threading.local()


@contextlib.contextmanager
def compile_ahead():
    """Context manager in which Triton compiles the kernels of a program while it is traced.

    Otherwise, kernels are compiled one after another when the program is lowered. A program that is
    only traced, for example for shapes, needs no compiled kernels.
    """
    has_gpu = jax.default_backend() == "gpu"
    _thread.compiles_ahead = has_gpu and _gpu.capability() >= _gpu.MIN_CAPABILITY
    if _thread.compiles_ahead:
        triton_key()  # a hash of Triton's files, cached: otherwise, each thread would compute it
    try:
        yield
    finally:
        _thread.compiles_ahead = False


NAME = "keras_recurrent_triton"  # the primitive of a launch
_launch = Primitive(NAME)
_launch.multiple_results = True


def _present_outputs(launch):
    return [array for array in flat(launch.outputs) if array is not None]


@_launch.def_abstract_eval
def _(*_, launch):
    return [jax.core.ShapedArray(a.shape, jnp.dtype(a.dtype)) for a in _present_outputs(launch)]


def _batch_by_loop(arrays, axes, *, launch):
    """The rule of `jax.vmap`: one launch for each member of the mapped axis."""
    arrays = [x if a is None else jnp.moveaxis(x, a, 0) for x, a in zip(arrays, axes, strict=True)]

    def launch_one(mapped):
        mapped = iter(mapped)
        return _launch.bind(
            *(x if a is None else next(mapped) for x, a in zip(arrays, axes, strict=True)),
            launch=launch,
        )

    mapped = [x for x, a in zip(arrays, axes, strict=True) if a is not None]
    return jax.lax.map(launch_one, mapped), [0] * len(_present_outputs(launch))


batching.primitive_batchers[_launch] = _batch_by_loop


def _no_derivative(primals, tangents, *, launch):
    raise NotImplementedError(
        f"the Triton kernel `{launch.kernel.__name__}` has no derivative: it is a decoding step "
        "or itself a gradient. Leave `implementation` unset, or set it to 'jax', which has the "
        "derivative."
    )


ad.primitive_jvps[_launch] = _no_derivative


def _lower(ctx, *operands, launch):
    compilation, arguments = start_compilation(launch, ctx.avals_in)
    compiled, gpu = compilation.result(), _gpu.plugin()
    parameters = []
    for kind, value in arguments:
        if kind == "array":
            parameters.append(gpu.create_array_parameter(value, _ALIGNED[1]))
        else:
            parameters.append(gpu.create_scalar_parameter(value, kind))
    metadata = compiled.metadata
    sizes = metadata.num_warps, metadata.num_ctas, metadata.shared
    kernel = gpu.TritonKernel(metadata.name, *sizes, compiled.asm["ptx"], "", metadata.target.arch)
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
    """{index of an operand: index of the result that reuses its memory}; XLA copies if needed."""
    written = map_arrays(lambda array: array is not None, launch.outputs)
    return {
        sum(flat(launch.inputs[:i])): sum(flat(written[:out])) for i, out in launch.updates
    } or None


class _Array(NamedTuple):
    """An array as an argument of a kernel: the name of its dtype, and the bytes to zero first."""

    dtype: str
    zeroed: int = 0


def start_compilation(launch, inputs):
    """Compiles a launch's kernel in a thread, unless its compilation has already started.

    Returns the `Future` of the kernel, and its arguments as pairs of a type and a value. For an
    array, the type is "array" and the value is the number of bytes to set to zero first.
    inputs: shapes and dtypes of the given arrays, in order.
    """
    inputs = iter(inputs)
    arrays = (
        *map_arrays(
            lambda given: _Array(next(inputs).dtype.name) if given else None, launch.inputs
        ),
        *map_arrays(_output_array, launch.outputs),
    )
    options = dict(launch.options)
    names = launch.kernel.arg_names
    values = dict(zip(names, [*arrays, *launch.numbers], strict=False))
    unspecialized = {p.name for p in launch.kernel.params if p.do_not_specialize}
    aligned, constants, arguments = {}, {}, []

    def type_of(value, path, is_specialized):
        """The type of an argument, which is added to the constants or to the arguments."""
        if type(value) is tuple:
            return tuple(type_of(x, (*path, i), True) for i, x in enumerate(value))
        if value is None or (value == 1 and is_specialized):
            constants[path] = value
            return "constexpr"
        if isinstance(value, _Array):
            aligned[path] = [list(_ALIGNED)]
            arguments.append(("array", value.zeroed))
            return f"*{_TYPES[value.dtype]}"
        if isinstance(value, int) and value % 16 == 0 and is_specialized:
            aligned[path] = [list(_ALIGNED)]
        arguments.append((_scalar_type(value), value))
        return _scalar_type(value)

    signature = {}
    for i, name in enumerate(names):
        if name in values:
            signature[name] = type_of(values[name], (i,), name not in unspecialized)
        else:
            signature[name], constants[(i,)] = "constexpr", options.pop(name)
    target = GPUTarget("cuda", _gpu.capability(), 32)
    parts = (tuple(part.items()) for part in (signature, constants))
    key: Any = (launch.kernel, *parts, tuple(aligned), tuple(options.items()), target)
    found = _compilations.get(key)
    if found is None or (found.done() and found.exception()):
        found = _compilations[key] = _threads.submit(_compile, *key)
    return found, arguments


def _output_array(array):
    if array is None:
        return None
    num_bytes = jnp.dtype(array.dtype).itemsize * math.prod(array.shape)
    return _Array(array.dtype, num_bytes * array.zeros)


def _scalar_type(number):
    if isinstance(number, float):
        return "fp32"
    return "i32" if -(2**31) <= number < 2**31 else "i64"


_compilations: dict[tuple, concurrent.futures.Future] = {}
_threads = concurrent.futures.ThreadPoolExecutor(thread_name_prefix="triton-compile")


def _compile(kernel, signature, constants, aligned, options, target):
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
        raise NotImplementedError(
            f"`{kernel.__name__}` needs global scratch memory, which JAX does not provide"
        )
    return compiled


def _interpret(ctx, *operands, launch):
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in _present_outputs(launch)]

    def call(*arrays):
        return jax.pure_callback(
            functools.partial(interpreter.run, launch), shapes, *arrays, vmap_method="sequential"
        )

    return mlir.lower_fun(call, multiple_results=True)(ctx, *operands)


def _raise_not_cuda(ctx, *operands, launch):
    raise NotImplementedError(
        "the Triton kernels run where a program is lowered for CUDA, got one for "
        f"{', '.join(ctx.module_context.platforms)}: leave `implementation` unset. For tests, the "
        "environment variable TRITON_INTERPRET=1, set before Python starts, makes Triton interpret "
        "them on a CPU, slowly"
    )


mlir.register_lowering(_launch, _raise_not_cuda)
mlir.register_lowering(_launch, _lower, platform="cuda")
if INTERPRETED:
    mlir.register_lowering(_launch, _interpret, platform="cpu")


def _fused_reason(**_):
    return "XLA fuses this operation with its neighbors"


def decoding_step(unsupported, results, count=None, updates=(), name=None, on_jax=True):
    """The JAX version of `torch_operators.decoding_step`; launches describe the results."""
    del results, count, updates, name
    unsupported = (unsupported or step_unsupported_reason) if on_jax else _fused_reason

    def decorate(forward):
        options = tuple(parameters_of(forward).options)
        return Kernel(jax.jit(forward, static_argnames=options), unsupported)

    return decorate


def operation(definition):
    """Makes an `Operation` a `Kernel` of passes; without any where XLA replaces the kernels.

    The passes have the parameters of those in `backends/jax`.
    """
    if definition.name in _time_groups.HAS_RESIDUALS:
        forward, backward = _passes(definition)
        return _time_groups.linear_attention_kernel(
            definition.name, forward, backward, definition.unsupported
        )
    plain = load_kernel("keras_recurrent.backends.jax", definition.name)
    if not definition.on_jax:
        return plain._replace(unsupported=_fused_reason)
    return plain.replace_passes(*_passes(definition), definition.unsupported)


def _passes(definition):
    """The forward and the backward of an `Operation`, on shards and under `jax.vmap`.

    An operation over time returns its residual separately from the results, and its backward takes
    the residual in place of the output.
    """
    tensors, results = definition.dimensions, definition.result_dimensions
    has_residuals = bool(definition.residuals) and not definition.is_token_wise
    output = results[:1] if definition.saves_output else results[-1:] if has_residuals else (None,)
    d_results = results[:-1] if has_residuals else results
    differentiable, channels = definition.differentiable, definition.channels

    def forward(*arguments, **options):
        run = functools.partial(definition.forward, **options)
        input_dims, output_dims = _expand_token_dims((tensors, results), arguments[0])
        outputs = _shards.distributed(run, input_dims, output_dims, channels)(*arguments)
        return (outputs[:-1], outputs[-1]) if has_residuals else outputs

    def backward(*arguments, **options):
        named_inputs = zip(differentiable, arguments, strict=False)
        present = [
            x is not None or name in definition.unused_in_backward for name, x in named_inputs
        ]

        def gradients(*arguments):
            if has_residuals:
                arguments = *arguments[: len(tensors)], None, *arguments[len(tensors) :]
            outputs = definition.backward(*arguments, **options)
            return tuple(d for d, p in zip(outputs, present, strict=False) if p)

        present_tensors = [t for t, p in zip(tensors, present, strict=False) if p]
        names = *tensors, *output, *d_results
        input_dims, output_dims = _expand_token_dims((names, present_tensors), arguments[0])
        outputs = iter(
            _shards.distributed(gradients, input_dims, output_dims, channels)(*arguments)
        )
        outputs = [next(outputs) if p else None for p in present]
        return *outputs, *[None] * (len(tensors) - len(outputs))

    return forward, backward


def _expand_token_dims(names, first):
    """Replaces "..." in names of dimensions by "B" and more names, by the first tensor's rank."""
    if first is None or not names[0][0].startswith("..."):
        return names
    tokens = " ".join(["B", *(f"T{i}" for i in range(1, first.ndim))][: first.ndim - 1])
    return [[n and n.replace("...", tokens) for n in group] for group in names]
