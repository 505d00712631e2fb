"""Launches that begin before the one before them has ended (programmatic dependent launch).

Until `wait_for_launch_before` a kernel may read what no launch of the same step writes, such as
weights; after it, all that came before is done. Every kernel that begins early also waits, so what
came before the one before is done, too.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def let_next_launch_begin():
    cuda.gdc_launch_dependents()


@triton.jit
def wait_for_launch_before():
    cuda.gdc_wait()


@triton.jit
def fetch_ahead(weight, k, n, K: tl.constexpr, N: tl.constexpr):
    """Brings the rows k, from the first of the columns n on, into the L2 cache."""
    address = weight + tl.minimum(k, K - 1) * N + tl.min(n, 0)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [address],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
