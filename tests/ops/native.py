"""Runs a kernel on tensors of the current backend, and differentiates it: NumPy in and out."""

import contextlib
import functools
import gc
import os
from unittest import mock

import keras
import numpy as np

from tests.ops.cases import flatten, map_tensors, nest

BACKEND = keras.config.backend()
PROGRAMS = {}  # programs that JAX or TensorFlow have compiled


def run(kernel, drawn, compiled=False):
    """Returns {name: float64 array}: results, and gradients of arguments if the kernel has them.

    Parts of a state have names such as "final_state key". If `compiled`, JAX and TensorFlow compile
    forward and backward once for inputs of equal shapes and dtypes.
    """
    arguments = tensors(drawn)
    absent = {name: None for name, value in drawn.arguments.items() if value is None}
    floats = {name: arguments.pop(name) for name in drawn.differentiated}
    cotangents = drawn.cotangents

    def call(floats, others):
        results = kernel(**absent, **nest(floats | others), **drawn.options)
        results = flatten(drawn.name_results(results))
        return [results.pop(name) for name in cotangents], results

    if not cotangents:
        _, results = forward(call, floats, arguments)
    else:
        key = (kernel, *drawn.options.items(), *absent) if compiled else None
        d_results = [tensor(d, drawn.dtype_of(name)) for name, d in cotangents.items()]
        outputs, others, found = gradients(call, floats, arguments, d_results, key)
        results = dict(zip(cotangents, outputs, strict=True)) | others
        results |= {f"gradient of {name}": g for name, g in found.items()}
    assert {n: dtype(r) for n, r in results.items()} == {n: drawn.dtype_of(n) for n in results}
    assert {f"gradient of {name}" for name in floats} <= results.keys()
    return {name: to_numpy(r) for name, r in results.items()}


def tensors(drawn):
    """{flat name: tensor} of all arguments that are not None."""
    return {
        name: map_tensors(functools.partial(tensor, dtype=drawn.dtypes[name]), value)
        for name, value in flatten(drawn.arguments).items()
    }


def forget_programs():
    """Gives back the memory of compiled programs."""
    PROGRAMS.clear()
    if BACKEND == "jax":
        jax.clear_caches()
    if BACKEND == "tensorflow":
        # TensorFlow registers each graph with a `tf.custom_gradient`, and never frees it.
        for name in list(gradient_registry.list()):
            if name.startswith("CustomGradient-"):
                del gradient_registry._registry[name]
    gc.collect()


def dtype(t):
    return keras.backend.standardize_dtype(t.dtype)


def runs(implementation):
    """Returns True if this machine runs or interprets an implementation.

    `tests/triton/test_on_jax.py` lowers programs of JAX for GPUs on machines without one.
    """
    if (BACKEND, implementation) != ("jax", "triton"):
        return True
    return os.environ.get("TRITON_INTERPRET") == "1" or jax.default_backend() == "gpu"


def precision(dtype):
    """JAX computes in float64 only if told so."""
    return contextlib.nullcontext()


def interpreted(implementation):
    """Kernels for TPUs run in JAX's interpreter."""
    return contextlib.nullcontext()


def forward(call, floats, others):
    return call(floats, others)


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
        return jax.enable_x64(dtype == "float64")

    INTERPRETER = {"detect_races": True}  # arguments of `pltpu.InterpretParams`
    RaceDetectionState = interpreter.RaceDetectionState

    @contextlib.contextmanager
    def interpreted(implementation):
        """Without a TPU, the interpreter runs the kernels, and finds no race in any of them."""
        if implementation != "pallas" or jax.default_backend() == "tpu":
            yield
            return
        kernels = []

        def watch_kernel(**options):
            kernels.append(RaceDetectionState(**options))
            return kernels[-1]

        pltpu.reset_tpu_interpret_mode_state()
        with (
            mock.patch.object(interpreter, "RaceDetectionState", watch_kernel),
            pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(**INTERPRETER)),
        ):
            yield
        assert not any(kernel.races_found for kernel in kernels), "a race, printed above"

    def forward(call, floats, others):
        # One program compiles faster than each of its operations.
        return jax.jit(call)(floats, others)

    def gradients(call, floats, others, cotangents, key=None):
        """Outputs, further results, and gradients. Calls with an equal key share a program."""

        def forward_and_backward(floats, others, cotangents):
            outputs, pull_back, further = jax.vjp(
                lambda floats: call(floats, others), floats, has_aux=True
            )
            return outputs, further, pull_back(cotangents)[0]

        if key is not None:
            forward_and_backward = PROGRAMS.setdefault(key, jax.jit(forward_and_backward))
        return forward_and_backward(floats, others, cotangents)

elif BACKEND == "torch":
    import torch

    DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the device of Keras's tensors

    def tensor(array, dtype):
        return torch.tensor(array, device=DEVICE).to(getattr(torch, dtype))

    def to_numpy(t):
        return t.detach().to(torch.float64).cpu().numpy()

    class _WithoutGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, d_x):
            return None

    copy_without_gradient = _WithoutGradient.apply

    def gradients(call, floats, others, cotangents, key=None):
        leaves = [t.requires_grad_() for t in floats.values()]
        outputs, further = call(floats, others)
        found = torch.autograd.grad(outputs, leaves, cotangents)
        return outputs, further, dict(zip(floats, found, strict=True))

else:
    import tensorflow as tf
    from tensorflow.python.framework.ops import gradient_registry

    def tensor(array, dtype):
        return tf.cast(tf.constant(array), dtype)

    def to_numpy(t):
        return tf.cast(t, "float64").numpy()

    def gradients(call, floats, others, cotangents, key=None):
        """Outputs, further results, and gradients. Calls with an equal key share a function.

        Only the functions of one kernel are kept: a graph takes ten megabytes.
        """

        def forward_and_backward(floats, others, cotangents):
            with tf.GradientTape() as tape:
                tape.watch(floats)
                outputs, further = call(floats, others)
            found = tape.gradient(outputs, floats, output_gradients=cotangents)
            return outputs, further, found

        if key is not None:
            if key not in PROGRAMS:
                if any(known[0] is not key[0] for known in PROGRAMS):
                    forget_programs()
                PROGRAMS[key] = tf.function(forward_and_backward, autograph=False)
            forward_and_backward = PROGRAMS[key]
        return forward_and_backward(floats, others, cotangents)
