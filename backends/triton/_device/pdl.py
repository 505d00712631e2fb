"""CUDA programmatic dependent launch (PDL): a kernel starts before the previous one has ended.

Before `wait_for_previous_launch` a kernel may read only what no launch of the same step writes,
such as weights; after it, all previous launches are complete. Every kernel that starts early also
waits, so launches before the previous one are complete, too.
"""

import triton
from triton.language.extra import cuda


@triton.jit
def launch_dependents():
    """Allows the next kernel of the stream to start."""
    cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous_launch():
    """Waits until the previous launch is complete and its results are visible."""
    cuda.gdc_wait()
