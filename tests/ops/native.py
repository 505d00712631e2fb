"""Run a kernel on native tensors of the current backend, with its gradients: NumPy in and out."""

import contextlib
import gc
import os

import keras
import numpy as np

from tests.ops.cases import named, unnamed

BACKEND = keras.config.backend()
PROGRAMS = {}  # what JAX or TensorFlow have compiled


def run(kernel, drawn, compiled=False):
    """Returns {name: float64 array}: output, final_state and the gradient of every argument.

    Where a state has several arrays, their names follow: "final_state key". JAX and TensorFlow may
    compile the whole, once for inputs alike in shapes and dtypes; torch needs no such thing.
    """
    arguments = {name: t for name, t in drawn.tensors.items() if t is not None}
    absent = {name: None for name in drawn.tensors if name not in arguments}
    dtypes = {name.replace("state", "initial_state"): d for name, d in drawn.dtypes.items()}
    arguments |= named("initial_state", drawn.initial_state)
    position = arguments.pop("initial_state position", None)
    arguments = {name: tensor(a, dtypes[name]) for name, a in arguments.items()}
    dtypes = {name: dtypes[name] for name in arguments}
    state_dtypes = {name: d for name, d in drawn.dtypes.items() if name.startswith("state")}
    cotangents = [
        tensor(drawn.d_output, drawn.dtypes[drawn.output]),
        *(tensor(d, state_dtypes[n]) for n, d in named("state", drawn.d_final_state).items()),
    ]
    integers = {}
    if drawn.token_kind is not None:
        integers["token_kind"] = tensor(drawn.token_kind, "int8")
    if position is not None:
        integers["initial_state position"] = tensor(position, "int32")

    def call(arguments, integers):
        arguments = {"token_kind": None, **arguments, **integers}
        parts = {n: a for n, a in arguments.items() if n.startswith("initial_state")}
        tensors = {n: a for n, a in arguments.items() if n not in parts}
        state = unnamed("initial_state", parts) if parts else None
        output, final = kernel(**absent, **tensors, **drawn.options, initial_state=state)
        final = named("final_state", final)
        integers = {n: final.pop(n) for n in ("final_state position",) if n in final}
        return [output, *final.values()], integers

    names = ["output", *(n.replace("state", "final_state") for n in state_dtypes)]
    same = (kernel, *drawn.options.items(), *absent) if compiled else None
    outputs, integers, found = gradients(call, arguments, integers, cotangents, same)
    wanted = [drawn.dtypes[drawn.output], *state_dtypes.values()]
    assert [dtype(o) for o in outputs] == wanted
    assert {name: dtype(g) for name, g in found.items()} == dtypes
    assert {dtype(i) for i in integers.values()} <= {"int32"}
    results = dict(zip(names, outputs, strict=True)) | integers
    results |= {f"gradient of {name}": g for name, g in found.items()}
    return {name: to_numpy(r) for name, r in results.items()}


def run_token_wise(kernel, drawn, compiled=False):
    """Returns {name: float64 array}: the output, and the gradient of every tensor."""
    tensors, others = {}, {}
    for name, array in drawn.tensors.items():
        given = None if array is None else tensor(array, drawn.dtypes[name])
        (tensors if name in drawn.differentiated else others)[name] = given
    absent = {name: others.pop(name) for name in list(others) if others[name] is None}

    def call(tensors, others):
        return [kernel(**tensors, **others, **absent, **drawn.options)], {}

    cotangents = [tensor(drawn.d_output, drawn.output_dtype)]
    same = (kernel, *drawn.options.items(), *absent) if compiled else None
    (output,), _, found = gradients(call, tensors, others, cotangents, same)
    assert dtype(output) == drawn.output_dtype
    assert {name: dtype(g) for name, g in found.items()} == drawn.differentiated
    results = {"output": output} | {f"gradient of {name}": g for name, g in found.items()}
    return {name: to_numpy(r) for name, r in results.items()}


def forget_programs():
    """Give back the memory of compiled programs."""
    PROGRAMS.clear()
    if BACKEND == "jax":
        jax.clear_caches()
    if BACKEND == "tensorflow":
        # Each graph with a `tf.custom_gradient` registers that, and would be kept for it for ever.
        for name in list(gradient_registry.list()):
            if name.startswith("CustomGradient-"):
                del gradient_registry._registry[name]
    gc.collect()


def refusal(kernel, arguments):
    """Returns the reason why a kernel refuses arguments, or None."""
    return kernel.unsupported(**arguments) if kernel.unsupported else None


def dtype(t):
    return keras.backend.standardize_dtype(t.dtype)


def runs(implementation):
    """Whether it runs on this machine. Programs of JAX can be lowered for others, which is a test
    of its own (`tests/triton/test_on_jax.py`)."""
    if (BACKEND, implementation) != ("jax", "triton"):
        return True
    return os.environ.get("TRITON_INTERPRET") == "1" or jax.default_backend() == "gpu"


if BACKEND == "jax":
    import jax
    import jax.numpy as jnp
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
    from jax.experimental.pallas import tpu as pltpu

    def tensor(array, dtype):
        return jnp.asarray(array, dtype)

    def to_numpy(t):
        return np.asarray(t).astype("float64")

    def precision(dtype):
        """float64 is off in JAX unless one asks for it."""
        return jax.enable_x64(dtype == "float64")

    @contextlib.contextmanager
    def interpreted(implementation):
        """Kernels for TPU run in JAX's interpreter of them, which finds races, too."""
        if implementation != "pallas":
            yield
            return
        pltpu.reset_tpu_interpret_mode_state()
        with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
            yield
        assert interpreter.races is None or not interpreter.races.races_found

    def gradients(call, arguments, integers, cotangents, same=None):
        """same: calls with the same, if that is not None, share a program."""

        def forward_and_backward(arguments, integers, cotangents):
            outputs, pull_back, aside = jax.vjp(
                lambda arguments: call(arguments, integers), arguments, has_aux=True
            )
            return outputs, aside, pull_back(cotangents)[0]

        if same is not None:
            forward_and_backward = PROGRAMS.setdefault(same, jax.jit(forward_and_backward))
        return forward_and_backward(arguments, integers, cotangents)

elif BACKEND == "torch":
    import torch

    DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # as Keras takes it

    def tensor(array, dtype):
        return torch.tensor(array, device=DEVICE).to(getattr(torch, dtype))

    def to_numpy(t):
        return t.detach().to(torch.float64).cpu().numpy()

    def precision(dtype):
        return contextlib.nullcontext()

    def interpreted(implementation):
        return contextlib.nullcontext()

    class _Ends(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, d_x):
            return None

    ends = _Ends.apply  # a copy that gives no gradient back

    def gradients(call, arguments, integers, cotangents, same=None):
        for a in arguments.values():
            a.requires_grad_()
        outputs, aside = call(arguments, integers)
        found = torch.autograd.grad(outputs, list(arguments.values()), cotangents)
        return outputs, aside, dict(zip(arguments, found, strict=True))

else:
    import tensorflow as tf
    from tensorflow.python.framework.ops import gradient_registry

    def tensor(array, dtype):
        return tf.cast(tf.constant(array), dtype)

    def to_numpy(t):
        return tf.cast(t, "float64").numpy()

    def precision(dtype):
        return contextlib.nullcontext()

    def interpreted(implementation):
        return contextlib.nullcontext()

    def gradients(call, arguments, integers, cotangents, same=None):
        """same: calls with the same, if that is not None, share a function of TensorFlow.

        Only the functions of one kernel are kept: a graph takes ten megabytes.
        """

        def forward_and_backward(arguments, integers, cotangents):
            with tf.GradientTape() as tape:
                tape.watch(arguments)
                outputs, aside = call(arguments, integers)
            found = tape.gradient(outputs, arguments, output_gradients=cotangents)
            return outputs, aside, found

        if same is not None:
            if same not in PROGRAMS:
                if any(known[0] is not same[0] for known in PROGRAMS):
                    forget_programs()
                PROGRAMS[same] = tf.function(forward_and_backward, autograph=False)
            forward_and_backward = PROGRAMS[same]
        return forward_and_backward(arguments, integers, cotangents)
