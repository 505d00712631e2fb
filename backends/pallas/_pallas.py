"""All names of Pallas that this folder uses.

They are experimental in JAX, and names in them change: `unavailable` tells whether one is missing.
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
