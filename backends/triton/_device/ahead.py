"""Launches that begin before the one before them has ended (programmatic dependent launch).

Until `wait_for_launch_before` a kernel may read what no launch of the same step writes, such as
weights; after it, all that came before is done. Every kernel that begins early also waits, so what
came before the one before is done, too.
"""

import triton
from triton.language.extra import cuda


@triton.jit
def let_next_launch_begin():
    cuda.gdc_launch_dependents()


@triton.jit
def wait_for_launch_before():
    cuda.gdc_wait()
