"""Times `ops.linear_crossentropy` on a CUDA GPU.

    python -m benchmarks.gpu_loss

Forward and backward in bfloat16, with the gradient of a sum, compared with matrix products followed
by `token_crossentropy` ("apart") and with installed baselines. Each implementation is compared with
the plain version in float64 in the same run, in memory full of NaN. The floor is the three matrix
products alone, at the rate of a large one. The peak excludes the given tensors and includes the
gradients of x and of the embedding. "Apart" applies a soft cap in torch, pass by pass; "no cap" has
its time without one.
"""

import argparse
import importlib.util
import os
import sys
import time

os.environ.setdefault("KERAS_BACKEND", "torch")

import torch

from benchmarks.gpu_checks import FAR_OFF, Judge
from benchmarks.gpu_timing import bytes_a_second, device_ms, flops_a_second, line, peak_mib
from keras_recurrent.backends.torch import linear_crossentropy as plain
from keras_recurrent.backends.torch._common import product
from keras_recurrent.backends.triton import token_crossentropy
from keras_recurrent.backends.triton._crossentropy import torch_crossentropy as ours

# Tokens, channels, vocabulary and soft cap of RecurrentGemma 2B and HGRN2 1.3B.
SIZES = {
    "RecurrentGemma 2B": (16384, 2560, 256_000, 30.0),
    "the same, no cap": (16384, 2560, 256_000, None),
    "HGRN2 1.3B": (16384, 2048, 50304, None),
}


def total(function, cap, **options):
    """Returns the sum of the losses as a function of x, the embedding and the tokens."""

    def run(x, embedding, tokens):
        return function(x, embedding, tokens, soft_cap=cap, **options)[0].sum()

    return run


def set_chunk(function, numbers):
    """Sets how many logits have their gradient in memory at a time."""

    def run(*tensors):
        plain.GRADIENTS = numbers
        return function(*tensors)

    return run


def apart(cap):
    """Returns the loss from materialized bfloat16 logits of all tokens."""

    def run(x, embedding, tokens):
        logits = x @ embedding.T
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        return token_crossentropy.token_crossentropy(logits, tokens).sum()

    return run


def fla(cap):
    from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss

    def run(x, embedding, tokens):
        return fused_linear_cross_entropy_loss(x, tokens, embedding, reduction="sum")

    return run


def liger(cap):
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    def run(x, embedding, tokens):
        return liger_fused_linear_cross_entropy(x, embedding, tokens, reduction="sum", softcap=cap)

    return run


def implementations(cap):
    summed = total(ours.linear_crossentropy, cap)
    each = total(ours.linear_crossentropy, cap, reduction=None)
    found = {
        **{f"triton, pieces of 2^{n}": set_chunk(summed, 2**n) for n in (30, 29, 31)},
        "triton, losses a token": set_chunk(each, 2**30),
        "apart": apart(cap),
        "torch": set_chunk(total(plain.linear_crossentropy, cap), 2**30),
    }
    if importlib.util.find_spec("fla") and cap is None:  # has no soft cap
        found["FLA"] = fla(cap)
    if importlib.util.find_spec("liger_kernel"):
        found["Liger"] = liger(cap)
    return found


def kernel_alone(size, width, vocabulary, cap):
    """Times the kernel between the products, and the products, for `size` tokens."""
    x, embedding = (torch.randn(n, width, device="cuda").bfloat16() for n in (size, vocabulary))
    tokens, weights = (
        torch.randint(vocabulary, (size,), device="cuda"),
        torch.ones(size, device="cuda"),
    )
    z = product(x, embedding.T * width**-0.5, torch.float32)
    d_z = torch.empty(z.shape, dtype=torch.bfloat16, device="cuda")
    d_embedding = torch.zeros(vocabulary, width, device="cuda")
    piece = z, weights, tokens, cap or 0.0, torch.bfloat16, d_z
    return {
        "the kernel": device_ms(lambda: ours.chunk_losses(*piece)),
        "logits": device_ms(lambda: torch.mm(x, embedding.T, out_dtype=torch.float32)),
        "gradient of x": device_ms(lambda: product(d_z, embedding, torch.float32)),
        "gradient of the embedding": device_ms(lambda: plain._add_product(d_embedding, d_z.T, x)),
    }


def measure(function, judge, tensors):
    x, embedding, tokens = tensors
    leaves = [t.detach().requires_grad_() for t in (x, embedding)]

    def both():
        return torch.autograd.grad(function(*leaves, tokens), leaves)

    first, error, far = judge.check(function)
    if far > FAR_OFF:
        return f"wrong by {far:.1%} of the results' size"
    return device_ms(both), peak_mib(both), first, error


def main(seconds):
    end = time.monotonic() + seconds
    rates = bytes_a_second(), flops_a_second()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; a copy moves", end=" ")
    print(f"{rates[0] / 1e12:.2f} TB/s, a product takes {rates[1] / 1e12:.0f} TFLOP/s.\n")
    print(
        line(
            [
                "sizes",
                "by",
                "forward + backward ms",
                "× floor",
                "× apart",
                "peak MiB",
                "first call s",
                "error",
            ]
        )
    )
    print(line(["---"] * 2 + ["---:"] * 6), flush=True)
    for name, (count, width, vocabulary, cap) in SIZES.items():
        torch.manual_seed(0)
        x = torch.randn(count, width, device="cuda").bfloat16()
        embedding = (torch.randn(vocabulary, width, device="cuda") * width**-0.5).bfloat16()
        tensors = x, embedding, torch.randint(vocabulary, (count,), device="cuda")
        truth = set_chunk(total(plain.linear_crossentropy, cap), 2**29)
        judge = Judge(truth, tensors, torch.ones((), device="cuda"), own_units=True)
        floor = 1000 * 6 * count * width * vocabulary / rates[1]
        functions, rows = implementations(cap), {}
        # First, because all others are compared with it.
        for of in ("apart", *(n for n in functions if n != "apart")):
            if time.monotonic() > end:
                print(f"not begun within {seconds:.0f} s: {name}, {of}", file=sys.stderr)
                continue
            try:
                rows[of] = measure(functions[of], judge, tensors)
            except Exception as reason:  # a baseline may raise anything
                if "triton" in of:
                    raise
                rows[of] = (
                    f"{type(reason).__name__}: {(str(reason).strip() or '?').splitlines()[0]}"
                )
            torch.cuda.empty_cache()
            if isinstance(rows[of], str):
                print(f"not timed: {name}, {of}: {rows[of]}", file=sys.stderr, flush=True)
                continue
            took, peak, first, error = rows[of]
            beside = rows["apart"]
            by = "" if isinstance(beside, str) else f"{took.median / beside[0].median:.3f}"
            cells = name, of, took, f"{took.median / floor:.3f}", by, f"{peak:.0f}"
            print(line((*cells, f"{first:.1f}", f"{error:.2f}")), flush=True)
        del judge
        torch.cuda.empty_cache()
        alone = kernel_alone(4096, width, vocabulary, cap)
        moved = 4096 * vocabulary * 6 / (alone["the kernel"].median / 1000) / 1e12
        print(f"\n{name}, a piece of 4,096 tokens, ms: ", end="")
        print(", ".join(f"{of} {took}" for of, took in alone.items()), end="; ")
        print(f"the kernel moves {moved:.2f} TB/s.\n", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    main(parser.parse_args().seconds)
