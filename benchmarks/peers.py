"""Calls the baselines of the GPU benchmarks, as their documentation does.

Functions take the tensors of this package's implementations and return the output.
"""

import concurrent.futures
import functools
import importlib
import importlib.util

import torch
import torch.nn.attention
from triton.runtime import Autotuner
from triton.runtime._async_compile import AsyncCompileMode

HAS_FLA = importlib.util.find_spec("fla") is not None
WINDOW = 2048
EPSILON = 1e-6


def compile_side_by_side():
    """Makes Triton's autotuner compile all configurations in parallel before timing them.

    flash-linear-attention tries hundreds, which takes minutes. The choice is the same.
    """
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


def fla_swiglu(gate, x):
    from fla.modules.activations import swiglu

    return swiglu(gate, x)


def fla_crossentropy(logits, tokens):
    """Allocates the gradient, as ours does; the baseline could overwrite the logits."""
    from fla.modules.fused_cross_entropy import cross_entropy_loss

    return cross_entropy_loss(logits, tokens)[0]


def torch_crossentropy(logits, tokens):
    """Computes and returns losses in the dtype of the logits."""
    return torch.nn.functional.cross_entropy(logits, tokens, reduction="none")


def torch_rms_norm(x, scale):
    return torch.nn.functional.rms_norm(x, scale.shape, scale, EPSILON)


def fla(function):
    """Returns a function of flash-linear-attention as a baseline for every shape, if installed."""
    return lambda *shape: {"FLA": function} if HAS_FLA else {}


def attention_baselines(b, t, h, k):
    """Returns flex_attention, FlashAttention 3 and 4 if installed, and torch's SDPA.

    SDPA has no window, so it is compared only on sequences that fit into the window.
    """
    peers = {"flex_attention": flex(t)}
    for version, module in (("3", "flash_attn_interface"), ("4", "flash_attn.cute")):
        if _is_installed(module):
            peers[f"FlashAttention {version}"] = functools.partial(flash_attention, module)
    if t <= WINDOW:
        backends = torch.nn.attention.SDPBackend
        peers["SDPA, flash"] = torch_attention(backends.FLASH_ATTENTION)
        peers["SDPA, cuDNN"] = torch_attention(backends.CUDNN_ATTENTION)
        peers["SDPA, cuDNN, keys repeated"] = torch_attention(
            backends.CUDNN_ATTENTION, repeated=True
        )
    return peers


def flex(t):
    from torch.nn.attention import flex_attention as flex

    def seen(b, h, query, key):
        return (query >= key) & (query - key < WINDOW)

    mask = flex.create_block_mask(seen, None, None, t, t, device="cuda")
    compiled = functools.partial(torch.compile(flex.flex_attention), block_mask=mask)
    return swap_heads(compiled, scale=1.0, enable_gqa=True)


def _is_installed(module):
    package = module.partition(".")[0]
    return bool(importlib.util.find_spec(package)) and bool(importlib.util.find_spec(module))


def flash_attention(module, q, k, v):
    attend = importlib.import_module(module).flash_attn_func
    output = attend(q, k, v, softmax_scale=1.0, causal=True, window_size=(WINDOW - 1, 0))
    return output[0] if isinstance(output, tuple) else output


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
