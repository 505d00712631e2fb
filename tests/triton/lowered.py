"""Programs of JAX with Triton kernels, lowered for GPUs on a machine without one. Prints JSON.

Runs in a separate process: the variable that names the GPU is read once.
"""

import json

import jax
import jax.numpy as jnp
from jax import export

from keras_recurrent import ops
from keras_recurrent.backends.jax import _gpu
from keras_recurrent.ops import decoding_steps

B, T, D, H, K = 2, 200, 64, 2, 64


def array(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


X, HEADS, KEYS, MASK = (
    array(B, T, D),
    array(B, T, H, K),
    array(B, T, 1, K),
    array(B, T, dtype="bool"),
)
CHANNELS = array(D, dtype="float32")
# {name: the operation and its tensors, those that are differentiated first}
PROGRAMS = {
    "linear_scan": (ops.linear_scan, (X, X)),
    "rg_lru": (ops.rg_lru, (X, X, X, CHANNELS)),
    "causal_conv1d": (
        lambda *tensors, mask: ops.causal_conv1d(*tensors, activation="silu", mask=mask),
        (X, array(4, D, dtype="float32"), CHANNELS),
        {"mask": MASK},
    ),
    "gated_linear_attention": (
        lambda q, v, log_f: ops.gated_linear_attention(q, None, v, log_f),
        (HEADS, HEADS, HEADS),
    ),
    "lightning_attention": (
        ops.lightning_attention,
        (HEADS, HEADS, HEADS, array(H, dtype="float32")),
    ),
    "sliding_window_attention": (
        lambda q, k, v: ops.sliding_window_attention(q, k, v, sliding_window=32),
        (HEADS, KEYS, KEYS),
    ),
    "log_forget_gate": (ops.log_forget_gate, (X, array(2, D, dtype="float32"))),
    "token_crossentropy": (
        ops.token_crossentropy,
        (X,),
        {"tokens": array(B, T, dtype="int32")},
    ),
    "linear_crossentropy": (
        lambda *tensors, tokens: ops.linear_crossentropy(*tensors, tokens, soft_cap=30.0),
        (X, array(1000, D)),
        {"tokens": array(B, T, dtype="int32")},
    ),
}

ROW, SQUARE = array(1, D), array(D, D)
STEP = ROW, SQUARE, SQUARE, array(1, H, D // H, D // H, dtype="float32")


def hgrn2_step(x, q_kernel, f_kernel, memory):
    """A part of a step of generation, which has no gradient."""
    kernels = {"kernels": [q_kernel, f_kernel], "biases": [None, None]}
    q, f = decoding_steps.norm_linear(x=x, **kernels, epsilon=1e-5)
    return decoding_steps.hgrn2_step(q=q, f=f, v=x, memory=memory)


def traced(operation, tensors, others=None):
    def loss(tensors, others):
        results = jax.tree.leaves(operation(*tensors, **others))
        floats = (x for x in results if jnp.issubdtype(x.dtype, jnp.floating))
        return sum(jnp.sum(x.astype("float32")) for x in floats)

    return jax.jit(jax.value_and_grad(loss)).trace(tensors, others or {})


def calls(program):
    """Numbers of Triton and of Pallas kernels in a program."""
    text = program.as_text()
    return text.count("triton_kernel_call"), text.count("tpu_custom_call")


def main():
    reports = {}
    for name, of in PROGRAMS.items():
        program = traced(*of)
        reports[name] = {
            platform: calls(program.lower(lowering_platforms=(platform,)))
            for platform in ("cpu", "cuda", "tpu")
        }
    step = jax.jit(hgrn2_step).trace(*STEP)
    reports["hgrn2_step"] = {
        platform: calls(step.lower(lowering_platforms=(platform,))) for platform in ("cpu", "cuda")
    }
    in_place = step.lower(lowering_platforms=("cuda",)).as_text()
    reports["written over"] = in_place.count("#stablehlo.output_operand_alias")
    program = jax.jit(lambda x: ops.linear_scan(x, x)[0])
    call = _gpu.CALL if _gpu.supports_cuda_graphs() else _gpu.OLDER_CALL
    allowed = [export.DisabledSafetyCheck.custom_call(call)]
    exported = export.export(program, platforms=("cpu", "cuda"), disabled_checks=allowed)(X)
    exported = export.deserialize(exported.serialize())
    x = -jnp.ones(X.shape, X.dtype)
    difference = jnp.abs(exported.call(x) - program(x)).max()
    reports["exported"] = {"platforms": exported.platforms, "difference": float(difference)}
    reports["in graphs"] = f"@{_gpu.CALL}(" in in_place
    reports["may be in graphs"] = _gpu.supports_cuda_graphs()
    _gpu.supports_cuda_graphs = lambda: False
    jax.clear_caches()
    older = jax.jit(hgrn2_step).trace(*STEP).lower(lowering_platforms=("cuda",)).as_text()
    reports["by the older call"] = older.count(f"@{_gpu.OLDER_CALL}(")
    _gpu.capability.cache_clear()
    _gpu.OVERRIDE = "NO_SUCH_VARIABLE"
    reports["without a GPU"] = _gpu.capability()
    _gpu.capability = lambda: 75
    scan = traced(*PROGRAMS["linear_scan"])
    reports["older"] = calls(scan.lower(lowering_platforms=("cuda",)))
    _gpu.capability = lambda: 120  # needs a later version of PTX
    reports["later"] = calls(traced(*PROGRAMS["linear_scan"]).lower(lowering_platforms=("cuda",)))
    held = jnp.ones(X.shape, X.dtype)  # lies on the CPU, and is a constant of the program
    program = jax.jit(lambda x: ops.linear_scan(x, held)[0]).trace(X)
    reports["beside a constant"] = calls(program.lower(lowering_platforms=("cuda",)))
    print(json.dumps(reports))


if __name__ == "__main__":
    main()
