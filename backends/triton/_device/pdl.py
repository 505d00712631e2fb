"""CUDA programmatic dependent launch (PDL): a kernel starts before the previous one has ended.

Before `wait_for_previous_launch` a kernel may read only what no launch of the same step writes,
such as weights; after it, all previous launches are complete. Every kernel that starts early also
waits, so launches before the previous one are complete, too. PDL: boolean, whether the launch has
it; otherwise these functions do nothing.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """Allows the next kernel of the stream to start."""
    if PDL:
        cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous_launch(PDL: tl.constexpr):
    """Waits until the previous launch is complete and its results are visible."""
    if PDL:
        cuda.gdc_wait()
