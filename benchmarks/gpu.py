"""Times each operation on a CUDA GPU: `python -m benchmarks.gpu > benchmarks/results/gpu.md`.

Arguments, such as `rg_lru`, choose operations; without any, all are measured. Each operation of
`backends/triton` is compared with `backends/torch` and, if installed, flash-linear-attention
(`pip install flash-linear-attention`), and softmax attention with torch's own, in bfloat16. The
floor is the time that the same GPU takes, in the same run, to copy what must be read and written
once, or, if that is longer, for a matrix product with as many operations as attention has. Where
JAX is installed for CUDA, a process of its own times the operations on JAX as well.
"""

import datetime
import functools
import importlib.metadata
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("KERAS_BACKEND", "torch")

import numpy as np
import torch

from benchmarks import peers
from keras_recurrent import dispatch

SCANS = [(8, 2048, 2560), (4, 8192, 2560), (1, 65536, 2560)]
HEADS = [(8, 2048, 16, 128), (4, 8192, 16, 128), (1, 65536, 16, 128)]
# As in recurrentgemma_2b, where all heads of queries share one head of keys.
SOFTMAX_HEADS = [(8, 2048, 10, 256), (1, 16384, 10, 256)]
# Tokens, and the channels of hgrn2_1.3b_100b.
CHANNELS, INNER_CHANNELS = [(16384, 2048)], [(16384, 5632)]
# Tokens, and GPT-2's vocabulary, rounded up to a multiple of 64.
VOCABULARY = [(16384, 50304)]


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device="cuda").to(dtype)


def decays(*shape):
    """Logarithms of decays, from slow decay in the first channels to quick decay in the last."""
    spread = torch.logspace(-4, 1, shape[-1], device="cuda")
    return (-normal(*shape, dtype=torch.float32).abs() * spread).to(torch.bfloat16)


def conv_tensors(b, t, d):
    """Parameters are float32, as in the layer."""
    return [
        normal(b, t, d),
        normal(4, d, dtype=torch.float32),
        normal(d, dtype=torch.float32),
    ]


def bounded_gates(tokens, d):
    bound = torch.linspace(0.1, 0.9, d, device="cuda")
    return [normal(tokens, d), torch.stack([bound.log(), (1 - bound).log()])]


def attention_flops(b, t, h, k):
    """Two products forward and five backward, counting only visible pairs of queries and keys."""
    hidden = max(0, t - peers.WINDOW)
    pairs = b * h * (t * (t + 1) - hidden * (hidden + 1)) // 2
    return 4 * pairs * k, 10 * pairs * k


def between_heads(b, t, h, k):
    return [normal(b, t, h, k) for _ in range(3)]


def two_bytes(forward, backward):
    """A function of a shape: the bytes of so many bfloat16 tensors of it."""
    return lambda *shape: tuple(2 * n * math.prod(shape) for n in (forward, backward))


class Work(NamedTuple):
    """One operation, and what it is measured on. Functions take one of the shapes."""

    operation: str
    shapes: list
    tensors: Callable  # the arguments
    peers: Callable  # {name: function of the arguments that returns the output}
    bytes: Callable  # what the forward and the backward must read and write
    tied: bool = False  # whether the second argument is None
    flops: Callable = lambda *shape: (0, 0)  # of the forward and of the backward
    options: dict = {}  # the operation's arguments that are not tensors


WORK = {
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
        two_bytes(3, 4),  # its result and the gradient of that are float32
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
    "gated_linear_attention": Work(
        "gated_linear_attention",
        HEADS,
        lambda *shape: [*between_heads(*shape), decays(*shape)],
        peers.fla(peers.fla_gated),
        two_bytes(5, 9),
    ),
    "gated_linear_attention, k=None": Work(
        "gated_linear_attention",
        HEADS,
        lambda *shape: [*between_heads(*shape)[:2], decays(*shape)],
        peers.fla(peers.fla_tied),
        two_bytes(4, 7),
        tied=True,
    ),
    "lightning_attention": Work(
        "lightning_attention",
        HEADS,
        lambda b, t, h, k: [*between_heads(b, t, h, k), -8 / h * torch.arange(h, device="cuda")],
        peers.fla(peers.fla_lightning),
        two_bytes(4, 7),
    ),
    f"sliding_window_attention of {peers.WINDOW}": Work(
        "sliding_window_attention",
        SOFTMAX_HEADS,
        lambda b, t, h, k: [normal(b, t, h, k) / k**0.5, *(normal(b, t, 1, k) for _ in range(2))],
        peers.of_attention,
        lambda b, t, h, k: (2 * b * t * k * (2 * h + 2), 2 * b * t * k * (4 * h + 4)),
        flops=attention_flops,
        options={"sliding_window": peers.WINDOW},
    ),
}


def device_ms(call, target_ms=30):
    """The GPU's time for one call, without launches: calls queue up while the GPU is kept busy."""
    call()
    call()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    stop.record()
    torch.cuda.synchronize()
    repeats = max(1, min(20, int(target_ms / start.elapsed_time(stop))))
    times = []
    for _ in range(7):
        torch.cuda._sleep(3_000_000 * repeats)
        start.record()
        for _ in range(repeats):
            call()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / repeats)
    return statistics.median(times)


def wall_ms(call, target_ms=100):
    """The time of one call as a user sees it: Python, launches and the GPU."""

    def seconds(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / repeats

    repeats = max(1, min(10, int(target_ms / (1000 * seconds(1)))))
    return 1000 * statistics.median(seconds(repeats) for _ in range(5))


def peak_mib(call):
    """The peak of allocated memory in a call, less what was allocated before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - held) / 2**20


def bytes_a_second():
    source = normal(2**29, dtype=torch.float32)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (device_ms(lambda: target.copy_(source)) / 1000)


def flops_a_second():
    a, b = (normal(8192, 8192) for _ in range(2))
    return 2 * 8192**3 / (device_ms(lambda: a @ b) / 1000)


def measure(function, tensors):
    """The figures of one implementation, a function of the tensors that returns the output."""
    tensors = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
    leaves = [t for t in tensors if t.requires_grad]

    def forward():
        with torch.no_grad():
            return function(*tensors)

    d_output = torch.randn_like(forward())

    def both():
        # Some peers ignore the decays, which then have no gradient.
        return torch.autograd.grad(function(*tensors), leaves, d_output, allow_unused=True)

    start = time.perf_counter()
    both()
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    return {
        "forward": device_ms(forward),
        "both": device_ms(both),
        "wall": wall_ms(both),
        "peak": peak_mib(both),
        "first": first,
    }


def output_of(work, implementation):
    kernel = getattr(dispatch.IMPLEMENTATIONS[work.operation][implementation], work.operation)

    def output(*tensors):
        if work.tied:
            tensors = (tensors[0], None, *tensors[1:])
        results = kernel(*tensors, **work.options)
        return results[0] if isinstance(results, tuple) else results  # without the final state

    return output


class OnJax:
    """A process that times operations on JAX (`benchmarks.gpu_on_jax`)."""

    def __init__(self):
        self.process: Any = None
        if importlib.util.find_spec("jax_cuda12_plugin") or importlib.util.find_spec(
            "jax_cuda13_plugin"
        ):
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu_on_jax"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )

    def measure(self, work, tensors):
        """{name: figures}, on the same tensors: how fast a GPU is depends on their numbers."""
        if self.process is None:
            return {}
        message = {"operation": work.operation, "tied": work.tied, "options": work.options}
        with tempfile.TemporaryDirectory() as folder:
            files = [
                (f"{folder}/{i}.npy", str(t.dtype).removeprefix("torch."))
                for i, t in enumerate(tensors)
            ]
            for (file, dtype), tensor in zip(files, tensors, strict=True):
                bits = tensor.detach().view(torch.int16) if dtype == "bfloat16" else tensor.detach()
                np.save(file, bits.cpu().numpy())
            print(json.dumps(message | {"tensors": files}), file=self.process.stdin, flush=True)
            found = json.loads(self.process.stdout.readline())
        return {f"{name} on JAX" if name == "triton" else "JAX": f for name, f in found.items()}


def floors(work, shape, bytes_rate, flops_rate):
    """The milliseconds of the forward, and of forward and backward, at those rates."""
    moved, multiplied = work.bytes(*shape), work.flops(*shape)
    forward, backward = (
        1000 * max(m / bytes_rate, f / flops_rate) for m, f in zip(moved, multiplied, strict=True)
    )
    return forward, forward + backward


def rows(label, work, rates, on_jax):
    for shape in work.shapes:
        functions = {n: output_of(work, n) for n in ("triton", "torch")} | work.peers(*shape)
        tensors = work.tensors(*shape)
        floor = floors(work, shape, *rates)
        ours = None
        figures_of = {name: measure(function, tensors) for name, function in functions.items()}
        figures_of |= on_jax.measure(work, tensors)
        for name, figures in figures_of.items():
            ours = ours or figures
            yield [
                label,
                "×".join(map(str, shape)),
                name,
                *cells(figures["forward"], floor[0], ours["forward"]),
                *cells(figures["both"], floor[1], ours["both"]),
                f"{figures['wall']:.3f}",
                f"{figures['peak']:.0f}",
                f"{figures['first']:.1f}",
            ]


def cells(milliseconds, floor, ours):
    return f"{milliseconds:.3f}", f"{milliseconds / floor:.2f}", f"{milliseconds / ours:.1f}"


HEADER = [
    "operation",
    "B×T×D, B×T×H×K or tokens×D",
    "by",
    "forward ms",
    "× floor",
    "× ours",
    "forward + backward ms",
] + [
    "× floor",
    "× ours",
    "wall ms",
    "peak MiB",
    "first call s",
]


def line(cells):
    return "| " + " | ".join(map(str, cells)) + " |"


def main(operations):
    work = {n: w for n, w in WORK.items() if not operations or w.operation in operations}
    unknown = set(operations) - {w.operation for w in work.values()}
    if unknown:
        sys.exit(f"no such operation: {', '.join(sorted(unknown))}")
    packages = ("torch", "triton", "jax", "flash-linear-attention", "keras")
    installed = {d.metadata["Name"] for d in importlib.metadata.distributions()}
    versions = [f"{p} {importlib.metadata.version(p)}" for p in packages if p in installed]
    peers.compile_side_by_side()
    rates = bytes_a_second(), flops_a_second()
    print(f"# GPU\n\n{torch.cuda.get_device_name()}, {datetime.date.today().isoformat()}.")
    print(f"{', '.join(versions)}.\nA copy in device memory moves {rates[0] / 1e12:.2f} TB/s,")
    print(f"a product of matrices of bfloat16 takes {rates[1] / 1e12:.0f} TFLOP/s.\n")
    on_jax = OnJax()
    print(line(HEADER))
    print(line(["---"] * 3 + ["---:"] * (len(HEADER) - 3)), flush=True)
    for name, of in work.items():
        for row in rows(name, of, rates, on_jax):
            print(line(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
