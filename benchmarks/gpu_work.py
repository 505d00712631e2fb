"""Defines the work of `benchmarks.gpu`: operations, shapes, tensors, baselines and bytes moved."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from benchmarks import peers

SCANS = [(8, 2048, 2560), (4, 8192, 2560), (1, 65536, 2560)]
HEADS = [(8, 2048, 16, 128), (4, 8192, 16, 128), (1, 65536, 16, 128)]
# A constant number of tokens in sequences of increasing length.
LENGTHS = [(2**17 // t, t, 16, 128) for t in (2**n for n in range(10, 18))]
# Lower bounds of forget gates; HGRN2's rise from 0 in the first layer to nearly 1 in the last.
BOUNDS = (0.0, 0.5, 0.97)
# As in recurrentgemma_2b, whose query heads share one key head.
SOFTMAX_HEADS = [(8, 2048, 10, 256), (1, 16384, 10, 256)]
# Tokens × channels of hgrn2_1.3b_100b.
CHANNELS, INNER_CHANNELS = [(16384, 2048)], [(16384, 5632)]
# Tokens × GPT-2's vocabulary, rounded up to a multiple of 64.
VOCABULARY = [(16384, 50304)]


# The tolerance of their results has units of each result's dtype, else of the coarsest dtype.
TOKEN_WISE = ("rms_norm", "gated_linear_unit", "log_forget_gate", "token_crossentropy")


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device="cuda").to(dtype)


def decays(*shape):
    """Returns log decays, from slow in the first channels to fast in the last."""
    spread = torch.logspace(-4, 1, shape[-1], device="cuda")
    return (-normal(*shape, dtype=torch.float32).abs() * spread).to(torch.bfloat16)


def gates(bound, *shape, dtype):
    """Returns log forget gates above a lower bound, as in a layer of HGRN2."""
    gate = torch.sigmoid(torch.randn(shape, device="cuda"))
    return (bound + (1 - bound) * gate).log().to(dtype)


def conv_tensors(b, t, d):
    """Returns the arguments of a convolution; its parameters are float32, as in the layer."""
    return [
        normal(b, t, d),
        normal(4, d, dtype=torch.float32),
        normal(d, dtype=torch.float32),
    ]


def bounded_gates(tokens, d):
    bound = torch.linspace(0.1, 0.9, d, device="cuda")
    return [normal(tokens, d), torch.stack([bound.log(), (1 - bound).log()])]


def attention_flops(b, t, h, k):
    """Counts two products forward and five backward, for visible query-key pairs only."""
    hidden = max(0, t - peers.WINDOW)
    pairs = b * h * (t * (t + 1) - hidden * (hidden + 1)) // 2
    return 4 * pairs * k, 10 * pairs * k


def between_heads(b, t, h, k):
    return [normal(b, t, h, k) for _ in range(3)]


def two_bytes(forward, backward):
    """Returns a function of a shape: the bytes of `forward` and `backward` bfloat16 tensors."""
    return lambda *shape: tuple(2 * n * math.prod(shape) for n in (forward, backward))


class Work(NamedTuple):
    """An operation and its inputs. Functions take one of the shapes."""

    operation: str
    shapes: list
    tensors: Callable  # the arguments
    peers: Callable  # {name: function of the arguments that returns the output}
    bytes: Callable  # bytes that forward and backward must read and write
    tied: bool = False  # whether the second argument is None
    flops: Callable = lambda *shape: (0, 0)  # forward and backward
    options: dict = {}  # the operation's arguments that are not tensors
    on_jax: bool = True  # whether JAX is measured too


_SCANS = {
    "linear_scan": Work(
        "linear_scan",
        SCANS,
        lambda b, t, d: [normal(b, t, d), decays(b, t, d)],
        peers.fla(peers.fla_scan),
        two_bytes(3, 5),
    ),
    "rg_lru": Work(
        "rg_lru",
        SCANS,
        lambda b, t, d: [
            *(normal(b, t, d) for _ in range(3)),
            torch.linspace(2, 9, d, device="cuda"),
        ],
        peers.fla(peers.fla_rg_lru),
        two_bytes(4, 8),
    ),
    "causal_conv1d": Work(
        "causal_conv1d",
        SCANS[:1],
        conv_tensors,
        peers.fla(peers.fla_conv),
        two_bytes(2, 3),
    ),
    "causal_conv1d, silu": Work(
        "causal_conv1d",
        SCANS[:1],
        conv_tensors,
        peers.fla(functools.partial(peers.fla_conv, activation="silu")),
        two_bytes(2, 3),
        options={"activation": "silu"},
    ),
    "rms_norm": Work(
        "rms_norm",
        CHANNELS,
        lambda *shape: [normal(*shape), normal(shape[-1])],
        lambda *shape: {"torch's own": peers.torch_rms_norm},
        two_bytes(2, 3),
        options={"epsilon": peers.EPSILON},
    ),
    "gated_linear_unit, silu": Work(
        "gated_linear_unit",
        INNER_CHANNELS,
        lambda *shape: [normal(*shape), normal(*shape)],
        peers.fla(peers.fla_swiglu),
        two_bytes(3, 5),
        options={"activation": "silu"},
    ),
    "log_forget_gate": Work(
        "log_forget_gate",
        CHANNELS,
        bounded_gates,
        lambda *shape: {},
        two_bytes(3, 4),  # the result and its gradient are float32
    ),
    "token_crossentropy": Work(
        "token_crossentropy",
        VOCABULARY,
        lambda *shape: [normal(*shape), torch.randint(shape[1], shape[:1], device="cuda")],
        lambda *shape: {
            **peers.fla(peers.fla_crossentropy)(*shape),
            "torch's own": peers.torch_crossentropy,
        },
        two_bytes(1, 2),
    ),
}

_GATED = Work(
    "gated_linear_attention",
    HEADS,
    lambda *shape: [*between_heads(*shape), decays(*shape)],
    peers.fla(peers.fla_gated),
    two_bytes(5, 9),
)
_TIED = Work(
    "gated_linear_attention",
    HEADS,
    lambda *shape: [*between_heads(*shape)[:2], decays(*shape)],
    peers.fla(peers.fla_tied),
    two_bytes(4, 7),
    tied=True,
)


def replace_decays(work, bound, dtype=torch.bfloat16):
    """Replaces the decays by forget gates above a bound, for the first and the last shape."""
    return work._replace(
        shapes=[work.shapes[0], work.shapes[-1]],
        tensors=lambda *shape: [*work.tensors(*shape)[:-1], gates(bound, *shape, dtype=dtype)],
        on_jax=False,
    )


_ATTENTION = {
    "gated_linear_attention": _GATED,
    **{f"gated_linear_attention, f from {b}": replace_decays(_GATED, b) for b in BOUNDS},
    "gated_linear_attention, k=None": _TIED,
    "gated_linear_attention, k=None, f from 0.97": replace_decays(_TIED, 0.97),
    # The dtype of `log_forget_gate` in the layers; the floor is for bfloat16.
    "gated_linear_attention, k=None, f from 0.97, log f in float32": replace_decays(
        _TIED, 0.97, torch.float32
    ),
    **{
        name: Work(
            "sliding_window_attention",
            shapes,
            lambda b, t, h, k: [
                normal(b, t, h, k) / k**0.5,
                *(normal(b, t, 1, k) for _ in range(2)),
            ],
            peers.attention_baselines,
            lambda b, t, h, k: (2 * b * t * k * (2 * h + 2), 2 * b * t * k * (4 * h + 4)),
            flops=attention_flops,
            options={"sliding_window": window},
        )
        for name, window, shapes in (
            (f"sliding_window_attention of {peers.WINDOW}", peers.WINDOW, SOFTMAX_HEADS),
            # Without a window or a final state, as in baselines; the results are equal here.
            ("sliding_window_attention to all tokens", None, SOFTMAX_HEADS[:1]),
        )
    },
    "lightning_attention": Work(
        "lightning_attention",
        HEADS,
        lambda b, t, h, k: [*between_heads(b, t, h, k), -8 / h * torch.arange(h, device="cuda")],
        peers.fla(peers.fla_lightning),
        two_bytes(4, 7),
    ),
    "lightning_attention, rows of 131072 tokens": Work(
        "lightning_attention",
        LENGTHS,
        lambda b, t, h, k: [*between_heads(b, t, h, k), -8 / h * torch.arange(h, device="cuda")],
        lambda *shape: {},
        two_bytes(4, 7),
        on_jax=False,
    ),
}
# The most important first, because a run may end early.
WORK = _ATTENTION | _SCANS
