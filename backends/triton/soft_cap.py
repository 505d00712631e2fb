"""c tanh(x / c), the soft cap of a decoding step's logits, in one launch.

torch needs three launches, each of which reads and writes all logits. This kernel rounds where
torch does, so that the argmax is the same token.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from ._device.common import IN_INTERPRETER
from ._device.math import tanh
from ._device.pdl import launch_dependents, wait_for_previous_launch
from ._runtime.framework import decoding_step, pdl_options, run
from ._runtime.launch import Launch, cdiv, like

_BLOCK, _WARPS = 2048, 4  # numbers and warps of a program


@triton.jit
def _kernel(x, y, n, cap, BLOCK: tl.constexpr, PDL: tl.constexpr):
    launch_dependents(PDL)
    wait_for_previous_launch(PDL)
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + index, index < n, other=0.0).to(tl.float32)
    # On a GPU, torch divides by a scalar by multiplying by its reciprocal.
    value = (value * tl.div_rn(1.0, cap)).to(y.dtype.element_ty).to(tl.float32)
    if IN_INTERPRETER:
        value = tanh(value, True)
    else:
        value = libdevice.tanh(value)
    # Keras multiplies by an array of the logits' dtype.
    cap = tl.full([], cap, tl.float32).to(y.dtype.element_ty).to(tl.float32)
    value = value.to(y.dtype.element_ty).to(tl.float32) * cap
    tl.store(y + index, value, index < n)


def results(x, cap):
    return (like(x),)


@decoding_step(None, results, count=1, on_jax=False)
def soft_cap(x, cap: float):
    count = x.shape[0] * x.shape[1]
    options = {"BLOCK": _BLOCK, "num_warps": _WARPS, **pdl_options(x)}
    programs = cdiv(count, _BLOCK)
    return run(Launch(_kernel, programs, (x,), results(x, cap), (count, cap), options))
