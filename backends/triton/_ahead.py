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
def fetch_ahead(array, BYTES: tl.constexpr, part, PARTS: tl.constexpr, THREADS: tl.constexpr):
    """Asks for a part of an array to be brought into the L2 cache, and waits for nothing."""
    EACH: tl.constexpr = (BYTES + PARTS * THREADS * 16 - 1) // (PARTS * THREADS * 16) * 16
    begin = (part * THREADS + tl.arange(0, THREADS)).to(tl.int64) * EACH
    # Whole units of 16 bytes, which an array may begin or end in the middle of.
    size = tl.minimum(BYTES - 16 - begin, EACH).to(tl.int32) & -16
    address = (array.to(tl.int64) + begin + 15) & -16
    tl.inline_asm_elementwise(
        """{
        .reg .pred some;
        setp.gt.s32 some, $2, 0;
        @some cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [address, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
