"""Programs of JAX with Triton kernels, lowered for GPUs on a machine without one.

`test_on_jax.py` runs these tests in a separate process: the variable that names the GPU is read
once.
"""

import concurrent.futures
import threading

import jax
import jax.numpy as jnp
import pytest
import triton
from jax import export
from triton.runtime.cache import triton_key

from keras_recurrent import ops
from keras_recurrent.backends.jax import _gpu
from keras_recurrent.backends.triton._runtime import jax_functions
from keras_recurrent.ops import decoding_steps

B, T, D, H, K = 2, 200, 64, 2, 64


def array(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


X, HEADS, KEYS = array(B, T, D), array(B, T, H, K), array(B, T, 1, K)
MASK, TOKENS = array(B, T, dtype="bool"), array(B, T, dtype="int32")
CHANNELS = array(D, dtype="float32")
# {name: number of launches, operation, tensors that are differentiated, other tensors}
PROGRAMS: dict = {
    "linear_scan": (2, ops.linear_scan, (X, X)),
    "rg_lru": (2, ops.rg_lru, (X, X, X, CHANNELS)),
    "causal_conv1d": (
        *(4, lambda *tensors, mask: ops.causal_conv1d(*tensors, activation="silu", mask=mask)),
        *((X, array(4, D, dtype="float32"), CHANNELS), {"mask": MASK}),
    ),
    "gated_linear_attention": (
        *(8, lambda q, v, log_f: ops.gated_linear_attention(q, None, v, log_f)),
        (HEADS, HEADS, HEADS),
    ),
    "lightning_attention": (
        *(4, ops.lightning_attention, (HEADS, HEADS, HEADS, array(H, dtype="float32"))),
    ),
    "scalar_decay_attention": (
        *(7, ops.scalar_decay_attention),
        (KEYS, KEYS, HEADS, array(B, T, H, dtype="float32")),
    ),
    "sliding_window_attention": (
        *(3, lambda q, k, v: ops.sliding_window_attention(q, k, v, sliding_window=32)),
        (HEADS, KEYS, KEYS),
    ),
    "log_forget_gate": (2, ops.log_forget_gate, (X, array(2, D, dtype="float32"))),
    "token_crossentropy": (2, ops.token_crossentropy, (X,), {"tokens": TOKENS}),
    "linear_crossentropy": (
        *(1, lambda *tensors, tokens: ops.linear_crossentropy(*tensors, tokens, soft_cap=30.0)),
        *((X, array(1000, D)), {"tokens": TOKENS}),
    ),
}
WITHOUT_PALLAS = ("log_forget_gate", "token_crossentropy", "linear_crossentropy")


@pytest.fixture(autouse=True)
def _no_cached_programs():
    jax.clear_caches()


def trace(operation, tensors, others=None):
    """A program of a loss and its gradients."""

    def loss(tensors, others):
        results = jax.tree.leaves(operation(*tensors, **others))
        floats = (x for x in results if jnp.issubdtype(x.dtype, jnp.floating))
        return sum(jnp.sum(x.astype("float32")) for x in floats)

    return jax.jit(jax.value_and_grad(loss)).trace(tensors, others or {})


def count_kernels(program, platform):
    """Numbers of Triton and of Pallas kernels in a traced program."""
    text = program.lower(lowering_platforms=(platform,)).as_text()
    return text.count("triton_kernel_call"), text.count("tpu_custom_call")


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_has_the_kernels_of_the_platform_it_is_lowered_for(name):
    """A program that is traced once has no kernels, or those of another platform."""
    launches, *arguments = PROGRAMS[name]
    program = trace(*arguments)
    assert count_kernels(program, "cpu") == (0, 0)
    assert count_kernels(program, "cuda") == (launches, 0)
    triton, pallas = count_kernels(program, "tpu")
    assert triton == 0
    assert (pallas > 0) == (name not in WITHOUT_PALLAS)


@pytest.fixture
def decoding_step():
    """The traced program of a part of a decoding step, which has no gradient."""
    square = array(D, D)

    def step(x, q_kernel, f_kernel, memory):
        kernels = {"kernels": [q_kernel, f_kernel], "biases": [None, None]}
        q, f = decoding_steps.norm_linear(x=x, **kernels, epsilon=1e-5)
        return decoding_steps.hgrn2_step(q=q, f=f, v=x, memory=memory)

    memory = array(1, H, D // H, D // H, dtype="float32")
    return jax.jit(step).trace(array(1, D), square, square, memory)


def test_decoding_step_updates_its_state_in_place(decoding_step):
    """The state of a step is copied, or its kernels cannot be in a CUDA graph."""
    assert count_kernels(decoding_step, "cpu") == (0, 0)
    assert count_kernels(decoding_step, "cuda") == (2, 0)
    text = decoding_step.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("#stablehlo.output_operand_alias") == 1
    assert (f"@{_gpu.CALL}(" in text) == _gpu.supports_cuda_graphs()


def test_decoding_step_without_cuda_graphs_uses_the_older_call(decoding_step, monkeypatch):
    monkeypatch.setattr(_gpu, "supports_cuda_graphs", lambda: False)
    text = decoding_step.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(f"@{_gpu.OLDER_CALL}(") == 2


def test_exported_program_of_two_platforms_runs_on_a_cpu():
    program = jax.jit(lambda x: ops.linear_scan(x, x)[0])
    call = _gpu.CALL if _gpu.supports_cuda_graphs() else _gpu.OLDER_CALL
    allowed = [export.DisabledSafetyCheck.custom_call(call)]
    exported = export.export(program, platforms=("cpu", "cuda"), disabled_checks=allowed)(X)
    exported = export.deserialize(exported.serialize())
    assert exported.platforms == ("cpu", "cuda")
    x = -jnp.ones(X.shape, X.dtype)
    assert (exported.call(x) == program(x)).all()


# The second one needs a later version of PTX.
@pytest.mark.parametrize(("capability", "launches"), [(75, 0), (120, 2)])
def test_kernels_are_lowered_for_supported_capabilities(capability, launches, monkeypatch):
    monkeypatch.setattr(_gpu, "capability", lambda: capability)
    assert count_kernels(trace(ops.linear_scan, (X, X)), "cuda") == (launches, 0)


def test_kernels_compile_once_and_while_a_program_is_traced(monkeypatch):
    """Kernels of the first call of `generate` compile one after another, or a second time.

    Or each thread hashes Triton's files, 461 MB, which delays the tracing of the program.
    """
    triton_key.cache_clear()
    compiled, compile_kernel = [], triton.compile

    def record(source, **options):
        is_hashed = triton_key.cache_info().currsize == 1
        compiled.append((threading.current_thread(), source.hash(), is_hashed))
        return compile_kernel(source, **options)

    monkeypatch.setattr(triton, "compile", record)
    monkeypatch.setattr(jax_functions, "_compilations", {})
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with jax_functions.compile_ahead():
        program = trace(ops.linear_scan, (X, X))
    concurrent.futures.wait(jax_functions._compilations.values())
    threads, sources, is_hashed = map(set, zip(*compiled, strict=True))
    assert len(compiled) == len(sources) == 2
    assert is_hashed == {True}
    assert threading.current_thread() not in threads
    assert count_kernels(program, "cuda") == (2, 0)
    trace(ops.rg_lru, (X, X, X, CHANNELS))  # outside of the block: not lowered, not compiled
    assert len(compiled) == 2


def test_failed_compilation_is_repeated(monkeypatch):
    """A remedy, such as another assembler, needs another process."""
    monkeypatch.setattr(jax_functions, "_compilations", {})
    program = trace(ops.linear_scan, (X, X))
    with monkeypatch.context() as patch:
        patch.setattr(triton, "compile", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            program.lower(lowering_platforms=("cuda",))
    assert count_kernels(program, "cuda") == (2, 0)


def test_capability_without_a_gpu_is_the_lowest(monkeypatch):
    monkeypatch.setattr(_gpu, "OVERRIDE", "NO_SUCH_VARIABLE")
    assert _gpu.capability.__wrapped__() == 80


def test_program_with_a_constant_on_the_cpu_has_kernels():
    """An array on the CPU that a jitted function closes over prevents kernels on GPUs."""
    constant = jnp.ones(X.shape, X.dtype)
    program = jax.jit(lambda x: ops.linear_scan(x, constant)[0]).trace(X)
    assert count_kernels(program, "cuda") == (1, 0)
