"""Imports all names of Pallas that this folder uses.

Pallas is experimental, and its names change between releases of JAX. If one is missing,
`unavailable` returns the reason.
"""

# ruff: noqa: F401
from jax.experimental.pallas import BlockSpec, cdiv, ds, multiple_of, pallas_call, program_id, when
from jax.experimental.pallas.tpu import (
    SMEM,
    VMEM,
    CompilerParams,
    get_tpu_info,
    is_tpu_device,
    roll,
)
