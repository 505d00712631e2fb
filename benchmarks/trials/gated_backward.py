"""The kernels of two trees, one after the other: `gated_linear_attention` in bfloat16, both passes.

    PYTHONPATH=OTHER_TREE python benchmarks/trials/gated_backward.py before
    PYTHONPATH=. python benchmarks/trials/gated_backward.py after

Results are compared with float64 in memory full of NaN, then timed: a line for each kind of decays,
and the time of each kernel.
"""

import collections
import os
import sys

os.environ.setdefault("KERAS_BACKEND", "torch")

import torch

from benchmarks import gpu
from benchmarks.gpu_checks import Judge
from benchmarks.gpu_timing import device_ms
from benchmarks.gpu_work import WORK

LABEL = sys.argv[1]
DECAYS = {
    "trained": "gated_linear_attention, f from 0.97",
    "spread": "gated_linear_attention",
    "f from 0": "gated_linear_attention, f from 0.0",
}
print(LABEL, torch.cuda.get_device_name(), torch.__version__, flush=True)
for decays, name in DECAYS.items():
    work = WORK[name]
    shape = work.shapes[0]
    torch.manual_seed(0)
    tensors, plain = work.tensors(*shape), gpu.output_of(work, "torch")
    kernel = gpu.output_of(work, "triton")
    with torch.no_grad():
        d_output = torch.randn_like(plain(*tensors))
    seconds, error, far = Judge(plain, tensors, d_output).check(kernel)
    leaves = [t.detach().requires_grad_(True) for t in tensors]

    def forward():
        with torch.no_grad():
            kernel(*leaves)

    def both():
        torch.autograd.grad(kernel(*leaves), leaves, d_output)

    print(
        f"{LABEL} {decays}: error {error:.2f} of what is allowed, {far:.2%} in all; "
        f"forward {device_ms(forward)}, both {device_ms(both)} ms",
        flush=True,
    )
    if decays != "f from 0":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(5):
                both()
            torch.cuda.synchronize()
        found = collections.defaultdict(list)
        for event in profile.events():
            if event.name.endswith("_kernel"):
                found[event.name].append(event.time_range.elapsed_us())
        for kernel_name, times in found.items():
            print(f"    {kernel_name[:40]}: {len(times) / 5:g} a call, {sum(times) / 5e3:.3f} ms")
    torch.cuda.empty_cache()
