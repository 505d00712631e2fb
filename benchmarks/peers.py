"""Calls the baselines of operations, as their documentation does.

Functions take the tensors of this package's implementations and return the output.
A library is imported where it is called, and is no baseline if it is not installed.
"""

import concurrent.futures
import functools
import importlib.util

from keras import ops

from benchmarks.timing import BACKEND, has_gpu, has_tpu
from keras_recurrent import dispatch

if BACKEND == "torch":
    import torch
elif BACKEND == "jax":
    import jax
    import jax.numpy as jnp

LOOP_LENGTH = 2048  # tokens of the longest loop on a CPU


def is_installed(module):
    return importlib.util.find_spec(module) is not None


def operation_baselines(operation, shape, options):
    """Returns `{name: function}` of an operation on the current backend and device."""
    if not has_gpu() or has_tpu():
        return loops_over_tokens(operation, options) if has_tpu() or shape[1] <= LOOP_LENGTH else {}
    if BACKEND == "jax":
        return jax_baselines(operation) if is_installed("jla") else {}
    found = {}
    if is_installed("fla") and (function := fla_baseline(operation, options)):
        found["FLA"] = function
    if operation == "rms_norm":
        found["torch's own"] = functools.partial(torch_rms_norm, **options)
    if operation == "token_crossentropy":
        found["torch's own"] = torch_crossentropy
    if operation == "linear_crossentropy":
        found["logits, then token_crossentropy"] = functools.partial(loss_of_logits, **options)
    if operation == "sliding_window_attention":
        found |= attention_baselines(shape[1], **options)
    return found


# --- The definitions of linear attention and of recurrences, token by token ---


def loops_over_tokens(operation, options):
    if operation in ("gated_linear_attention", "lightning_attention") and "k" not in options:
        return {"loop over tokens": token_loop}
    if BACKEND == "jax" and operation in ("linear_scan", "rg_lru"):
        scans = {"lax.scan": sequential_scan, "associative_scan": associative_scan}
        return {name: functools.partial(jax_recurrence, scan) for name, scan in scans.items()}
    return {}


def jax_recurrence(scan, x, log_a, gate_x=None, a_logit=None):
    """Computes `linear_scan`, or `rg_lru` if `log_a` is its gate, by a scan in float32."""
    dtype, (x, log_a) = x.dtype, (t.astype("float32") for t in (x, log_a))
    if gate_x is not None:
        log_a = -8 * jax.nn.softplus(-a_logit) * jax.nn.sigmoid(log_a)
        x *= jnp.sqrt(-jnp.expm1(2 * log_a)) * jax.nn.sigmoid(gate_x.astype("float32"))
    return scan(jnp.exp(log_a), x).astype(dtype)


def sequential_scan(a, x):
    def step(h, token):
        a, x = token
        return a * h + x, a * h + x

    tokens = [jnp.moveaxis(t, 1, 0) for t in (a, x)]
    return jnp.moveaxis(jax.lax.scan(step, jnp.zeros_like(x[:, 0]), tokens)[1], 0, 1)


def associative_scan(a, x):
    def combine(earlier, later):
        return earlier[0] * later[0], earlier[1] * later[0] + later[1]

    return jax.lax.associative_scan(combine, (a, x), axis=1)[1]


def token_loop(q, k, v, log_decay):
    """Computes linear attention in a loop that the backend compiles like the operation."""
    if len(log_decay.shape) == 1:  # a constant for each head
        log_decay = ops.stop_gradient(log_decay)[:, None]
    log_decay = ops.broadcast_to(log_decay, k.shape)
    state = ops.zeros((q.shape[0], *q.shape[2:], v.shape[3]))
    if BACKEND == "tensorflow":
        return tensorflow_loop(q, k, v, log_decay, state)

    def step(state, token):
        q, k, v, log_decay = token
        state = ops.exp(log_decay)[..., None] * state + k[..., None] * v[..., None, :]
        return state, ops.matmul(q[..., None, :], state)[..., 0, :]

    tokens = [ops.moveaxis(x, 1, 0) for x in (q, k, v, log_decay)]
    return ops.moveaxis(ops.scan(step, state, tokens)[1], 0, 1)


def tensorflow_loop(q, k, v, log_decay, state):
    import tensorflow as tf

    length, decay = q.shape[1], tf.exp(log_decay)

    def step(t, state, output):
        state = decay[:, t, :, :, None] * state + k[:, t, :, :, None] * v[:, t, :, None]
        return t + 1, state, output.write(t, tf.matmul(q[:, t, :, None], state)[:, :, 0])

    start = (0, state, tf.TensorArray("float32", length))
    *_, output = tf.while_loop(lambda t, *_: t < length, step, start, maximum_iterations=length)
    return tf.transpose(output.stack(), [1, 0, 2, 3])


# --- Operations on JAX ---


def jax_baselines(operation):
    """Returns the Pallas Mosaic kernels of jax-linear-attention (0.1.0)."""
    from jla import ops as jla_ops

    attend = functools.partial(jla_ops.linear_attention, scale=1.0, impl="mosaic_gpu")

    def gated(q, k, v, log_f):
        return attend("gla", q, k, v, g=log_f)[0]

    def lightning(q, k, v, log_decay):
        log_decay = jax.numpy.broadcast_to(log_decay, q.shape[:3])
        return attend("simple_gla", q, k, v, g=log_decay)[0]

    functions = {"gated_linear_attention": gated, "lightning_attention": lightning}
    return {"jax-linear-attention": functions[operation]} if operation in functions else {}


# --- Operations on torch ---


def compile_side_by_side():
    """Makes Triton's autotuner compile all configurations in parallel before timing them.

    flash-linear-attention tries hundreds, which takes minutes. The choice is the same.
    """
    from triton.runtime import Autotuner
    from triton.runtime._async_compile import AsyncCompileMode

    prune, bench = Autotuner.prune_configs, Autotuner._bench

    def prune_and_remember(tuner, options):
        tuner.to_compile = prune(tuner, options)
        return tuner.to_compile

    def compile_and_bench(tuner, *arguments, config, **options):
        """Skipped if Triton's cache has the choice of an earlier run."""
        with (
            concurrent.futures.ThreadPoolExecutor() as pool,
            AsyncCompileMode(pool, ignore_errors=True),  # raised again while timing
        ):
            for each in tuner.to_compile:
                tuner.fn.run(*arguments, **{**options, **each.all_kwargs(), "warmup": True})
        tuner.to_compile = []
        return bench(tuner, *arguments, config=config, **options)

    Autotuner.prune_configs = prune_and_remember
    Autotuner._bench = compile_and_bench


def fla_baseline(operation, options):
    """Returns the function of flash-linear-attention, or None."""
    if operation == "linear_crossentropy" and options:  # a soft cap
        return None
    functions = {
        "linear_scan": fla_scan,
        "rg_lru": fla_rg_lru,
        "causal_conv1d": functools.partial(fla_conv, **options),
        "gated_linear_attention": fla_tied if "k" in options else fla_gated,
        "lightning_attention": fla_lightning,
        "scalar_decay_attention": fla_scalar,
        "gated_linear_unit": fla_swiglu,
        "token_crossentropy": fla_crossentropy,
        "linear_crossentropy": fla_linear_crossentropy,
    }
    return functions.get(operation)


def fla_scan(x, log_a):
    from fla.ops.hgrn import chunk_hgrn

    return chunk_hgrn(x, log_a)[0]


def fla_rg_lru(x, gate_a, gate_x, a_logit):
    """Uses the baseline's scan; gates and square root are plain torch."""
    softplus = torch.nn.functional.softplus(-a_logit)
    log_a = -8 * softplus * torch.sigmoid(gate_a.float())
    multiplier = torch.sqrt(-torch.expm1(2 * log_a))
    inputs = multiplier * torch.sigmoid(gate_x.float()) * x
    return fla_scan(inputs.to(x.dtype), log_a.to(x.dtype))


def fla_conv(x, kernel, bias, activation=None):
    from fla.modules.causal_conv1d import causal_conv1d

    return causal_conv1d(x, weight=kernel.T.contiguous(), bias=bias, activation=activation)[0]


def fla_gated(q, k, v, log_f):
    from fla.ops.gla import chunk_gla

    return chunk_gla(q, k, v, log_f, scale=1.0)[0]


def fla_tied(q, v, log_f):
    """Computes keys from decays and stores them, as in the baseline's HGRN2 layer."""
    return fla_gated(q, (1 - log_f.exp()).to(q.dtype), v, log_f)


def fla_lightning(q, k, v, log_decay):
    """Uses decays that the baseline computes, here those of a model's first layer."""
    from fla.ops.lightning_attn import chunk_lightning_attn

    return chunk_lightning_attn(q, k, v, layer_idx=0, num_layers=16, scale=1.0)[0]


def fla_scalar(q, k, v, log_decay):
    """Expands queries, keys and constant decays to all heads, as the baseline needs them."""
    from fla.ops.simple_gla import chunk_simple_gla

    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    return chunk_simple_gla(q, k, v, log_decay.expand(v.shape[:3]), scale=1.0)[0]


def fla_swiglu(gate, x):
    from fla.modules.activations import swiglu

    return swiglu(gate, x)


def fla_crossentropy(logits, tokens):
    """Allocates the gradient, as ours does; the baseline could overwrite the logits."""
    from fla.modules.fused_cross_entropy import cross_entropy_loss

    return cross_entropy_loss(logits, tokens)[0]


def fla_linear_crossentropy(x, embedding, tokens):
    from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss

    return fused_linear_cross_entropy_loss(x, tokens, embedding, reduction="sum")


def torch_crossentropy(logits, tokens):
    """Computes and returns losses in the dtype of the logits."""
    return torch.nn.functional.cross_entropy(logits, tokens, reduction="none")


def torch_rms_norm(x, scale, epsilon):
    return torch.nn.functional.rms_norm(x, scale.shape, scale, epsilon)


def loss_of_logits(x, embedding, tokens, soft_cap=None):
    """Computes the loss of hidden states from the logits of all tokens."""
    logits = x @ embedding.T
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    return dispatch.run("token_crossentropy", {"logits": logits, "tokens": tokens}, "triton").sum()


def attention_baselines(length, sliding_window=None):
    """Returns flex_attention, and torch's SDPA.

    SDPA has no window, so it is compared only on sequences that fit into the window.
    """
    found = {"flex_attention": flex(length, sliding_window or length)}
    if length <= (sliding_window or length):
        backends = torch.nn.attention.SDPBackend
        found["SDPA, flash"] = torch_attention(backends.FLASH_ATTENTION)
        found["SDPA, cuDNN"] = torch_attention(backends.CUDNN_ATTENTION)
        found["SDPA, cuDNN, keys repeated"] = torch_attention(
            backends.CUDNN_ATTENTION, repeated=True
        )
    return found


def flex(length, window):
    from torch.nn.attention import flex_attention as flex

    def seen(b, h, query, key):
        return (query >= key) & (query - key < window)

    mask = flex.create_block_mask(seen, None, None, length, length, device="cuda")
    compiled = functools.partial(torch.compile(flex.flex_attention), block_mask=mask)
    return swap_heads(compiled, scale=1.0, enable_gqa=True)


def torch_attention(backend, repeated=False):
    """Calls SDPA; `repeated` copies keys and values for each query head first."""

    def attend(q, k, v):
        if repeated:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        with torch.nn.attention.sdpa_kernel([backend]):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=1.0, enable_gqa=not repeated
            )

    return swap_heads(attend)


def swap_heads(function, **options):
    """Adapts a function of tensors [B, H, T, ...] to [B, T, H, ...]."""
    return lambda *tensors: function(*(x.transpose(1, 2) for x in tensors), **options).transpose(
        1, 2
    )
