"""Compares gated linear attention and lightning attention with a loop, on one backend.

Prints JSON; `python benchmarks/linear_attention.py` runs it for every backend and makes a table.
Forward and backward in float32: `jax.jit` on JAX, `tf.function` with and without XLA on TensorFlow,
eager on torch; the loop is compiled in the same way.
"""

import ctypes
import gc
import json
import statistics

import keras
import numpy as np

from benchmarks.scan_scaling import status
from benchmarks.training_step import medians, seconds
from keras_recurrent import ops

BACKEND = keras.backend.backend()
OPERATIONS = {"gated": ops.gated_linear_attention, "lightning": ops.lightning_attention}
SHAPES = [(4, 2048, 4, 64), (1, 2048, 4, 64), (1, 2048, 4, 128)]  # batch, tokens, heads, K = V
LENGTHS = [1024 * 2**i for i in range(6)]

# `loop` is the definition, token by token; decay is [B, T, H, K] or [H].

if BACKEND == "jax":
    import jax
    import jax.numpy as jnp

    MODES = {"": lambda function: jax.jit(function)}

    def loop(q, k, v, log_decay):
        def step(state, token):
            q, k, v, log_decay = token
            state = jnp.exp(log_decay)[..., None] * state + k[..., None] * v[..., None, :]
            return state, jnp.einsum("bhkv,bhk->bhv", state, q)

        log_decay = log_decay if log_decay.ndim == 4 else every_token(log_decay, k, jnp)
        tokens = [jnp.moveaxis(x, 1, 0) for x in (q, k, v, log_decay)]
        state, output = jax.lax.scan(step, jnp.zeros(state_shape(q, v)), tokens)
        return jnp.moveaxis(output, 0, 1), state

    def gradients(operation):
        return jax.grad(lambda tensors: loss(operation, tensors))

    def wait(result):
        jax.block_until_ready(result)

elif BACKEND == "torch":
    import torch

    MODES = {"": lambda function: function}

    def loop(q, k, v, log_decay):
        log_decay = log_decay if log_decay.ndim == 4 else every_token(log_decay, k, torch)
        decay, state, output = torch.exp(log_decay), q.new_zeros(state_shape(q, v)), []
        for t in range(q.shape[1]):
            state = decay[:, t, :, :, None] * state + k[:, t, :, :, None] * v[:, t, :, None]
            output.append((q[:, t, :, None] @ state).squeeze(2))
        return torch.stack(output, 1), state

    def gradients(operation):
        def call(tensors):
            tensors = [t.detach().requires_grad_() for t in tensors]
            return torch.autograd.grad(loss(operation, tensors), tensors, allow_unused=True)

        return call

    def wait(result):
        pass

else:
    import tensorflow as tf

    MODES = {
        "": lambda function: tf.function(function),
        ", XLA": lambda function: tf.function(function, jit_compile=True),
    }

    def loop(q, k, v, log_decay):
        log_decay = log_decay if len(log_decay.shape) == 4 else every_token(log_decay, k, tf)
        length, decay = q.shape[1], tf.exp(log_decay)

        def step(t, state, output):
            state = decay[:, t, :, :, None] * state + k[:, t, :, :, None] * v[:, t, :, None]
            return t + 1, state, output.write(t, tf.matmul(q[:, t, :, None], state)[:, :, 0])

        start = (0, tf.zeros(state_shape(q, v)), tf.TensorArray("float32", length))
        _, state, output = tf.while_loop(
            lambda t, *_: t < length, step, start, maximum_iterations=length
        )
        return tf.transpose(output.stack(), [1, 0, 2, 3]), state

    def gradients(operation):
        def call(tensors):
            with tf.GradientTape() as tape:
                tape.watch(tensors)
                value = loss(operation, tensors)
            return tape.gradient(value, tensors)

        return call

    def wait(result):
        result[0].numpy()


def state_shape(q, v):
    return q.shape[0], q.shape[2], q.shape[3], v.shape[3]


def every_token(log_decay, k, framework):
    return framework.broadcast_to(log_decay[:, None], tuple(k.shape))


def loss(operation, tensors):
    output, final_state = operation(*tensors)
    return keras.ops.sum(output * output) + keras.ops.sum(final_state)


def tensors(name, shape):
    q, k, v, decay = np.random.default_rng(0).normal(size=(4, *shape)).astype("float32")
    log_decay = -np.abs(decay) / 10 if name == "gated" else -np.abs(decay[0, 0, :, 0]) / 10
    return [keras.ops.convert_to_tensor(x) for x in (q, k, v, log_decay)]


def call(operation, mode, arguments):
    compiled = MODES[mode](gradients(operation))
    return lambda: wait(compiled(arguments))


def against_loop(name, shape, mode):
    arguments = tensors(name, shape)
    return medians(
        {
            "ours": call(OPERATIONS[name], mode, arguments),
            "loop": call(loop, mode, arguments),
        }
    )


def measure_length(name, length):
    """Returns seconds, and bytes beyond those of the process before its tensors are made."""
    mode, shape = list(MODES)[-1], (1, length, 4, 64)
    compiled = MODES[mode](gradients(OPERATIONS[name]))
    wait(compiled(tensors(name, shape)))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # returns free memory to the system
    held = status("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak
    arguments, times = tensors(name, shape), []
    while len(times) < 5 or sum(times) < 1:
        times.append(seconds(lambda: wait(compiled(arguments))))
    return statistics.median(times), status("VmHWM") - held


def main():
    ratios = [
        {"operation": name, "mode": mode, "shape": shape, **against_loop(name, shape, mode)}
        for name in OPERATIONS
        for mode in MODES
        for shape in SHAPES
    ]
    lengths = []
    for name in OPERATIONS:
        for length in LENGTHS:
            time, memory = measure_length(name, length)
            lengths.append({"operation": name, "length": length, "seconds": time, "bytes": memory})
    print(json.dumps({"ratios": ratios, "lengths": lengths}))


if __name__ == "__main__":
    main()
