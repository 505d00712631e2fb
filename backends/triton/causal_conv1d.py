"""y_t = bias + sum_j kernel[j] * x_{t-W+1+j}, per channel.  De et al. 2024, arXiv:2402.19427, §2.3.

The filter skips padding, which may be anywhere. Kernels therefore work on positions, not on tokens
(`_convolution/convolution_positions.py`).
"""

from ._convolution.convolution_forward import forward_kernel
from ._convolution.convolution_gradients import backward_kernel
from ._convolution.convolution_positions import tabulate_positions
from ._device.common import tilings
from ._runtime import search
from ._runtime.framework import cast, operation, run, unsupported_reason
from ._runtime.launch import Array, Launch, cdiv, dtype_name, like, next_power_of_2
from ._runtime.operation import Operation

_MAX_WIDTH = 16
_STEPS = 16  # in the backward: the number of steps of ROWS positions of a thread
TILINGS = tilings(
    *((64, 4, 8, 2), (64, 8, 4, 4), (64, 8, 8, 4), (64, 16, 4, 4, 128), (64, 16, 8, 4, 128))
)
BACKWARD_TILINGS = tilings((64, 4, 4, 2, 128), (64, 8, 4, 4, 128), (64, 4, 4, 2, 168))


def unsupported(
    x, kernel, bias=None, initial_state=None, token_kind=None, activation=None
) -> str | None:
    if kernel.shape[0] > _MAX_WIDTH:
        return f"takes kernels of up to {_MAX_WIDTH} taps, got a kernel of {kernel.shape[0]}"
    return unsupported_reason(x, kernel, bias, initial_state, token_kind)


def _state_array(x, kernel):
    return Array((x.shape[0], kernel.shape[0] - 1, x.shape[2]), "float32")


def results(x, kernel, bias, initial_state, token_kind, *, activation: str | None):
    return like(x), _state_array(x, kernel)


def forward(x, kernel, bias, initial_state, token_kind, *, activation: str | None):
    batch, length, width = x.shape
    taps, silu = kernel.shape[0], activation == "silu"
    tensors = x, kernel, bias, initial_state
    inputs = *tensors, tabulate_positions(token_kind)
    outputs = results(x, kernel, bias, initial_state, token_kind, activation=activation)

    def launch(tile):
        tile = tile.fitted(length + taps - 1, width)
        tiles = cdiv(length + taps - 1, tile.tokens)
        programs = batch * tiles * cdiv(width, tile.BLOCK_D)
        options = {"W": taps, "SILU": silu, **tile.options}
        return run(Launch(forward_kernel, programs, inputs, outputs, (length, width), options))

    sizes = {"batch": batch, "length": length, "width": width, "taps": taps, "silu": silu}
    return search.run("causal_conv1d", TILINGS, launch, (*tensors, token_kind), sizes)


def backward(
    x, kernel, bias, initial_state, token_kind, output, dy, d_final, *, activation: str | None
):  # fmt: skip
    batch, length, width = x.shape
    taps, silu = kernel.shape[0], activation == "silu"
    tensors = dy, d_final, x, kernel, bias, initial_state
    inputs = *tensors, tabulate_positions(token_kind)

    def launch(tile):
        tile = tile.fitted(length + taps - 1, width)
        steps = min(_STEPS, next_power_of_2(cdiv(length + taps - 1, tile.tokens)))
        tiles = cdiv(length + taps - 1, tile.tokens * steps)
        programs = batch * tiles * cdiv(width, tile.BLOCK_D)
        sums = Array((batch * tiles, taps + 1, width), "float32")
        outputs = like(x), sums, _state_array(x, kernel)
        options = {"W": taps, "SILU": silu, "STEPS": steps, **tile.options}
        dx, d_parameters, d_initial = run(
            Launch(backward_kernel, programs, inputs, outputs, (length, width), options)
        )
        return dx, d_parameters.sum(0), d_initial

    sizes = {"batch": batch, "length": length, "width": width, "taps": taps, "silu": silu}
    dx, d_parameters, d_initial = search.run(
        "causal_conv1d backward", BACKWARD_TILINGS, launch, (*tensors, token_kind), sizes
    )
    d_kernel = cast(d_parameters[:taps], dtype_name(kernel))
    d_bias = None if bias is None else cast(d_parameters[taps], dtype_name(bias))
    return dx, d_kernel, d_bias, None if initial_state is None else d_initial, None


causal_conv1d = operation(Operation("causal_conv1d", forward, results, backward, unsupported))
