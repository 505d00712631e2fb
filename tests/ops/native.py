"""Run a kernel on native tensors of the current backend, with its gradients: NumPy in and out."""

import keras
import numpy as np

BACKEND = keras.config.backend()


def run(kernel, drawn, token_kind="drawn"):
    """Returns {name: float64 array}: output, final_state and the gradient of every argument."""
    arguments = dict(drawn.tensors)
    dtypes = dict(drawn.dtypes)
    accumulation = "float64" if "float64" in dtypes.values() else "float32"
    if drawn.initial_state is not None:
        arguments["initial_state"] = drawn.initial_state
        dtypes["initial_state"] = accumulation
    arguments = {name: tensor(a, dtypes[name]) for name, a in arguments.items()}
    cotangents = (tensor(drawn.d_output, dtypes["x"]), tensor(drawn.d_final_state, accumulation))
    kind = None if drawn.token_kind is None else tensor(drawn.token_kind, "int8")

    def call(arguments):
        return kernel(**arguments, token_kind=kind)

    outputs, gradients = _gradients(call, arguments, cotangents)
    assert [dtype(o) for o in outputs] == [dtypes["x"], accumulation]
    assert {name: dtype(g) for name, g in gradients.items()} == dtypes
    results = {"output": outputs[0], "final_state": outputs[1]}
    results |= {f"gradient of {name}": g for name, g in gradients.items()}
    return {name: to_numpy(r) for name, r in results.items()}


def dtype(t):
    return keras.backend.standardize_dtype(t.dtype)


if BACKEND == "jax":
    import jax
    import jax.numpy as jnp

    def tensor(array, dtype):
        return jnp.asarray(array, dtype)

    def to_numpy(t):
        return np.asarray(t).astype("float64")

    def precision(dtype):
        """float64 is off in JAX unless one asks for it."""
        return jax.enable_x64(dtype == "float64")

    def _gradients(call, arguments, cotangents):
        outputs, pull_back = jax.vjp(call, arguments)
        return outputs, pull_back(cotangents)[0]

elif BACKEND == "torch":
    import contextlib

    import torch

    DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # as Keras takes it

    def tensor(array, dtype):
        return torch.tensor(array, device=DEVICE).to(getattr(torch, dtype))

    def to_numpy(t):
        return t.detach().to(torch.float64).cpu().numpy()

    def precision(dtype):
        return contextlib.nullcontext()

    def _gradients(call, arguments, cotangents):
        for a in arguments.values():
            a.requires_grad_()
        outputs = call(arguments)
        gradients = torch.autograd.grad(outputs, list(arguments.values()), cotangents)
        return outputs, dict(zip(arguments, gradients, strict=True))

else:
    import contextlib

    import tensorflow as tf

    def tensor(array, dtype):
        return tf.cast(tf.constant(array), dtype)

    def to_numpy(t):
        return tf.cast(t, "float64").numpy()

    def precision(dtype):
        return contextlib.nullcontext()

    def _gradients(call, arguments, cotangents):
        with tf.GradientTape() as tape:
            tape.watch(arguments)
            outputs = call(arguments)
        return outputs, tape.gradient(outputs, arguments, output_gradients=list(cotangents))
