"""y_t = bias + sum_j kernel[j] * x_{t-W+1+j}, per channel.  De et al. 2024, arXiv:2402.19427, §2.3.

The filter skips padding, which may be anywhere. Kernels therefore work on positions, not on tokens:
a real token's position is the number of real tokens before it in its sequence. The state has the
positions -W+1 to -1 of document 0, and padding has the positions after the real tokens. A small
kernel tabulates the token and the document of each position. A program of the forward goes through
positions with the last W inputs in registers, a program of the backward with the gradients of the
next W outputs. For the gradient of an activation it starts W - 1 positions earlier, and computes
the filter's results again.
"""

import triton
import triton.language as tl

from ._device.common import Tiling
from ._device.math import sigmoid
from ._device.tokens import PADDING, STARTS
from ._runtime import search
from ._runtime.framework import cast, operation, run, unsupported_reason
from ._runtime.launch import Array, Launch, dtype_name, like
from ._runtime.operation import Operation

_MAX_WIDTH = 16
_POSITIONS_BLOCK = 4096
# In the backward: the number of steps of ROWS positions of a thread, and the number of pipeline
# stages, of which one is computed while the others are loaded.
_STEPS, _STAGES = 16, tl.constexpr(4)
TILINGS = (
    Tiling(64, 4, 8, 2),
    Tiling(64, 8, 4, 4),
    Tiling(64, 8, 8, 4),
    Tiling(64, 16, 4, 4, 128),
    Tiling(64, 16, 8, 4, 128),
)
BACKWARD_TILINGS = (
    Tiling(64, 4, 4, 2, 128),
    Tiling(64, 8, 4, 4, 128),
    Tiling(64, 4, 4, 2, 168),
)


def unsupported(
    x, kernel, bias=None, initial_state=None, token_kind=None, activation=None
) -> str | None:
    """Reason why this implementation cannot take these arguments, or None."""
    if kernel.shape[0] > _MAX_WIDTH:
        return f"takes kernels of up to {_MAX_WIDTH} taps, got a kernel of {kernel.shape[0]}"
    return unsupported_reason(x, kernel, bias, initial_state, token_kind)


def causal_conv1d(x, kernel, bias=None, initial_state=None, token_kind=None, activation=None):
    """x: [B, T, D]; kernel: [W, D]; bias: [D]; activation: None or "silu".

    Returns ([B, T, D] in x's dtype, [B, W - 1, D] in float32).
    """
    return kernels(x, kernel, bias, initial_state, token_kind, activation=activation)


@triton.jit
def _positions_kernel(
    token_kind, token_at, document_at, real_counts, start_counts, T, BLOCK: tl.constexpr
):
    """Stores the token and document of each position, [B, T], and two counts per sequence, [B].

    real_counts: real tokens. start_counts: tokens that start a document.
    """
    b = tl.program_id(0)
    row = b.to(tl.int64) * T
    num_real = 0
    num_starts = 0
    for start in range(0, T, BLOCK):
        t = start + tl.arange(0, BLOCK)
        kind = tl.load(token_kind + row + t, t < T, other=PADDING)
        real = (kind != PADDING).to(tl.int32)
        starts = (kind == STARTS).to(tl.int32)
        num_real_t = num_real + tl.cumsum(real, 0)
        position = tl.where(kind != PADDING, num_real_t - 1, T - 1 - (t - num_real_t))
        tl.store(token_at + row + position, t, t < T)
        tl.store(document_at + row + position, num_starts + tl.cumsum(starts, 0), t < T)
        num_real += tl.sum(real, 0)
        num_starts += tl.sum(starts, 0)
    tl.store(real_counts + b, num_real)
    tl.store(start_counts + b, num_starts)


@triton.jit
def _locate_program(T, D, BLOCK_D: tl.constexpr, TILE: tl.constexpr, W: tl.constexpr):
    """The tile of TILE positions, the number of tiles, the sequence in the batch, the channels.

    A launch has one dimension: the other dimensions of a grid end at 65,535.
    """
    blocks, tiles = tl.cdiv(D, BLOCK_D), tl.cdiv(T + W - 1, TILE)
    rest = tl.program_id(0) // blocks
    d = (tl.program_id(0) % blocks * BLOCK_D + tl.arange(0, BLOCK_D))[None, :]
    return rest % tiles, tiles, rest // tiles, d


@triton.jit
def _load_token_and_document(position, T, token_at, document_at, INSIDE: tl.constexpr):
    """Loads the token and the document at each position.

    token_at, document_at: pointers to the tables of a sequence.
    """
    t, document = position, position * 0
    if token_at is not None:
        valid = None if INSIDE else (position >= 0) & (position < T)
        other = None if INSIDE else 0
        t = tl.load(token_at + position, valid, other)
        document = tl.load(document_at + position, valid, other)
    return t, document


@triton.jit
def _token_offsets(origin, i, t, D, d, token_at):
    """The offsets of tokens t; without tables, positions are tokens, i after those at `origin`."""
    if token_at is None:
        offsets = origin + i * D
    else:
        offsets = t.to(tl.int64) * D + d
    return offsets


@triton.jit
def _sequence_sizes(b, T, real_counts, start_counts):
    """The number of real tokens of a sequence, and the index of its last document."""
    num_real, last_document = T, 0
    if real_counts is not None:
        num_real, last_document = tl.load(real_counts + b), tl.load(start_counts + b)
    return num_real, last_document


@triton.jit
def _load_parameters(kernel, bias, d, D, W: tl.constexpr):
    """Loads the filter's weights, the current token's first, and the bias."""
    weights = ()
    for k in tl.static_range(W):
        weights = weights + (tl.load(kernel + (W - 1 - k) * D + d, d < D, other=0.0),)
    bias_value = tl.zeros(d.shape, tl.float32)
    if bias is not None:
        bias_value = tl.load(bias + d, d < D, other=0.0).to(tl.float32)
    return weights, bias_value


@triton.jit
def _load_input(
    x, initial, position, offsets, num_real, d, D, W: tl.constexpr, INSIDE: tl.constexpr
):
    """Loads the input at each position: 0 before the state, and after the last real token.

    x, initial: pointers to a sequence's inputs and state. INSIDE: all positions are real tokens.
    """
    real = d < D
    if not INSIDE:
        real &= (position >= 0) & (position < num_real)
    value = tl.load(x + offsets, real, other=0.0).to(tl.float32)
    if not INSIDE and initial is not None:
        in_state = (position < 0) & (position > -W) & (d < D)
        value += tl.load(initial + ((position + W - 1) * D + d), in_state, other=0.0)
    return value


@triton.jit
def _filter(values, documents, weights, bias_value, token_at, W: tl.constexpr):
    """The filter's result at the last of these positions, without inputs of other documents."""
    total = bias_value
    for k in tl.static_range(W):
        tap = values[-1 - k]
        if token_at is not None:
            tap = tl.where(documents[-1 - k] == documents[-1], tap, 0.0)
        total += weights[k].to(tl.float32) * tap
    return total


@triton.jit
def _load_gradient(
    dy,
    z,
    position,
    offsets,
    num_real,
    d_valid,
    SILU: tl.constexpr,
    FINE: tl.constexpr,
    INSIDE: tl.constexpr,
):
    """Loads the gradient of the filter's results z; 0 outside the real tokens."""
    valid = d_valid
    if not INSIDE:
        valid = d_valid & (position >= 0) & (position < num_real)
    gradient = tl.load(dy + offsets, valid, other=0.0).to(tl.float32)
    if SILU:
        s, not_s = sigmoid(z, FINE)
        gradient *= s * (1.0 + z * not_s)
    return gradient


@triton.jit
def _forward_kernel(
    x,
    kernel,
    bias,
    initial,
    token_at,
    document_at,
    real_counts,
    start_counts,
    y,
    final,
    T,
    D,
    W: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
):
    FINE: tl.constexpr = x.dtype.element_ty == tl.float32
    tile, _, b, d = _locate_program(T, D, BLOCK_D, GROUPS * ROWS, W)
    d_valid = d < D
    row, state = b.to(tl.int64) * T, b.to(tl.int64) * (W - 1) * D
    x += row * D
    y += row * D
    final += state
    if initial is not None:
        initial += state
    if token_at is not None:
        token_at += row
        document_at += row
    num_real, last_document = _sequence_sizes(b, T, real_counts, start_counts)
    tile_begin = tile * (GROUPS * ROWS) - (W - 1)
    begin = tile_begin + tl.arange(0, GROUPS)[:, None] * ROWS

    weights, bias_value = _load_parameters(kernel, bias, d, D, W)

    values = ()
    tokens = ()
    documents = ()
    for j in tl.static_range(ROWS + W - 1):
        position = begin + j - (W - 1)
        t, document = _load_token_and_document(position, T, token_at, document_at, False)
        offsets = t.to(tl.int64) * D + d
        values = values + (_load_input(x, initial, position, offsets, num_real, d, D, W, False),)
        tokens = tokens + (t,)
        documents = documents + (document,)
    # The compiler does not move loads before stores: all loads come first.
    for j in tl.static_range(ROWS):
        position = begin + j
        total = _filter(values[j : j + W], documents[j : j + W], weights, bias_value, token_at, W)
        if SILU:
            total *= sigmoid(total, FINE)[0]
        offsets = tokens[j + W - 1].to(tl.int64) * D + d
        tl.store(y + offsets, total, (position >= 0) & (position < T) & d_valid)
        if tile_begin + GROUPS * ROWS > num_real - (W - 1):
            slot = position - num_real + W - 1
            in_state = (slot >= 0) & (slot < W - 1) & d_valid
            value = tl.where(documents[j + W - 1] == last_document, values[j + W - 1], 0.0)
            tl.store(final + (slot * D + d), value, in_state)


@triton.jit
def _sequence_gradients(
    dy,
    d_final,
    x,
    kernel,
    bias,
    initial,
    token_at,
    document_at,
    num_real,
    last_document,
    dx,
    d_parameters,
    d_initial,
    begin,
    d,
    T,
    D,
    W: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    INSIDE: tl.constexpr,
):
    """Processes STEPS * ROWS positions from `begin` [GROUPS, 1] on; pointers are a sequence's.

    INSIDE: all positions that are read are real tokens, whose inputs are not in the final state.
    """
    FINE: tl.constexpr = x.dtype.element_ty == tl.float32
    HISTORY: tl.constexpr = W - 1 if SILU else 0  # inputs that the first z needs
    d_valid = d < D
    origin = begin.to(tl.int64) * D + d
    weights, bias_value = _load_parameters(kernel, bias, d, D, W)
    sums = ()
    for _ in tl.static_range(W):
        sums = sums + (tl.zeros((GROUPS, BLOCK_D), tl.float32),)
    d_bias = tl.zeros((GROUPS, BLOCK_D), tl.float32)

    values = ()
    gradients = ()
    tokens = ()
    documents = ()
    for j in tl.static_range(HISTORY + W - 1):
        position = begin + (j - HISTORY)
        t, document = _load_token_and_document(position, T, token_at, document_at, INSIDE)
        offsets = _token_offsets(origin, j - HISTORY, t, D, d, token_at)
        values = values + (_load_input(x, initial, position, offsets, num_real, d, D, W, INSIDE),)
        documents = documents + (document,)
        if j >= HISTORY:
            z = bias_value
            if SILU:
                z = _filter(values, documents, weights, bias_value, token_at, W)
            gradient = _load_gradient(
                dy, z, position, offsets, num_real, d_valid, SILU, FINE, INSIDE
            )
            gradients = gradients + (gradient,)
            tokens = tokens + (t,)
    values, documents = values[HISTORY:], documents[HISTORY:]
    num_steps = STEPS
    if not INSIDE:  # the steps of the last tile may end early
        num_steps = tl.minimum(STEPS, tl.cdiv(T - tl.min(begin), ROWS))
    # Loads are not pipelined with tables of positions, where registers would spill, nor with
    # states, where shared memory would be needed.
    STATES: tl.constexpr = initial is not None or d_final is not None
    STAGES: tl.constexpr = 1 if token_at is not None or (STATES and not INSIDE) else _STAGES
    for step in tl.range(0, num_steps, num_stages=STAGES):
        for j in tl.static_range(ROWS):
            i = step * ROWS + j + W - 1
            position = begin + i
            t, document = _load_token_and_document(position, T, token_at, document_at, INSIDE)
            offsets = _token_offsets(origin, i, t, D, d, token_at)
            values = values + (
                _load_input(x, initial, position, offsets, num_real, d, D, W, INSIDE),
            )
            documents = documents + (document,)
            z = bias_value
            if SILU:
                z = _filter(values, documents, weights, bias_value, token_at, W)
            gradient = _load_gradient(
                dy, z, position, offsets, num_real, d_valid, SILU, FINE, INSIDE
            )
            gradients = gradients + (gradient,)
            tokens = tokens + (t,)
        # The compiler does not move loads before stores: all loads of a step come first.
        for j in tl.static_range(ROWS):
            i = step * ROWS + j
            position = begin + i
            d_value = tl.zeros((GROUPS, BLOCK_D), tl.float32)
            if not INSIDE and d_final is not None:
                slot = position - num_real + W - 1
                in_state = (slot >= 0) & (slot < W - 1) & (documents[j] == last_document) & d_valid
                d_value = tl.load(d_final + (slot * D + d), in_state, other=0.0)
            new_sums = ()
            for k in tl.static_range(W):
                gradient = gradients[j + k]
                if token_at is not None:
                    gradient = tl.where(documents[j + k] == documents[j], gradient, 0.0)
                d_value += weights[k].to(tl.float32) * gradient
                new_sums = new_sums + (sums[k] + values[j] * gradient,)
            sums = new_sums
            d_bias += gradients[j]
            offsets = _token_offsets(origin, i, tokens[j], D, d, token_at)
            if INSIDE:
                tl.store(dx + offsets, d_value, d_valid)
            else:
                tl.store(dx + offsets, d_value, (position >= 0) & (position < T) & d_valid)
                slot = position + W - 1
                tl.store(d_initial + (slot * D + d), d_value, (position < 0) & d_valid)
        values, gradients = values[ROWS:], gradients[ROWS:]
        tokens, documents = tokens[ROWS:], documents[ROWS:]

    for k in tl.static_range(W):
        tl.store(d_parameters + (W - 1 - k) * D + d, tl.sum(sums[k], 0)[None, :], d_valid)
    tl.store(d_parameters + W * D + d, tl.sum(d_bias, 0)[None, :], d_valid)


@triton.jit
def _backward_kernel(
    dy,
    d_final,
    x,
    kernel,
    bias,
    initial,
    token_at,
    document_at,
    real_counts,
    start_counts,
    dx,
    d_parameters,
    d_initial,
    T,
    D,
    W: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Stores dx and d_initial, and each program's sums of the gradients of kernel and bias.

    A group of a tile processes STEPS * ROWS positions. It also reads the W - 1 positions after
    them, and, for the gradient of an activation, the W - 1 positions before them.
    d_parameters: [B, tiles, W + 1, D], W lines for the kernel and one for the bias.
    """
    GROUP_POSITIONS: tl.constexpr = STEPS * ROWS  # positions whose dx a group stores
    tile, tiles, b, d = _locate_program(T, D, BLOCK_D, GROUPS * GROUP_POSITIONS, W)
    row, state = b.to(tl.int64) * T, b.to(tl.int64) * (W - 1) * D
    x += row * D
    dy += row * D
    dx += row * D
    d_initial += state
    if d_final is not None:
        d_final += state
    if initial is not None:
        initial += state
    if token_at is not None:
        token_at += row
        document_at += row
    d_parameters += (b.to(tl.int64) * tiles + tile) * (W + 1) * D
    num_real, last_document = _sequence_sizes(b, T, real_counts, start_counts)

    first = tile * (GROUPS * GROUP_POSITIONS) - (W - 1)
    begin = first + tl.arange(0, GROUPS)[:, None] * GROUP_POSITIONS
    pointers = dy, d_final, x, kernel, bias, initial, token_at, document_at, num_real, last_document
    results = dx, d_parameters, d_initial
    if (first >= W - 1) & (first + GROUPS * GROUP_POSITIONS + W - 1 <= num_real):
        _sequence_gradients(
            *pointers, *results, begin, d, T, D, W, SILU, BLOCK_D, GROUPS, ROWS, STEPS, True
        )
    else:
        _sequence_gradients(
            *pointers, *results, begin, d, T, D, W, SILU, BLOCK_D, GROUPS, ROWS, STEPS, False
        )


def _tabulate_positions(token_kind):
    """The results of `_positions_kernel`; Nones without kinds, where positions are tokens."""
    if token_kind is None:
        return (None,) * 4
    batch, length = token_kind.shape
    shapes = [(batch, length)] * 2 + [(batch,)] * 2
    outputs = tuple(Array(shape, "int32") for shape in shapes)
    options = {"BLOCK": min(_POSITIONS_BLOCK, triton.next_power_of_2(length))}
    return run(Launch(_positions_kernel, batch, (token_kind,), outputs, (length,), options))


def _state_array(x, kernel):
    return Array((x.shape[0], kernel.shape[0] - 1, x.shape[2]), "float32")


def results(x, kernel, bias, initial_state, token_kind, *, activation: str | None):
    return like(x), _state_array(x, kernel)


def gradients(
    x, kernel, bias, initial_state, token_kind, output, dy, d_final, *, activation: str | None
):  # fmt: skip
    d_bias = None if bias is None else like(bias)
    return like(x), like(kernel), d_bias, _state_array(x, kernel), None


def forward(x, kernel, bias, initial_state, token_kind, *, activation: str | None):
    batch, length, width = x.shape
    taps, silu = kernel.shape[0], activation == "silu"
    tensors = x, kernel, bias, initial_state
    inputs = *tensors, *_tabulate_positions(token_kind)
    outputs = results(x, kernel, bias, initial_state, token_kind, activation=activation)

    def launch(tile):
        tile = tile.fitted(length + taps - 1, width)
        tiles = triton.cdiv(length + taps - 1, tile.tokens)
        programs = batch * tiles * triton.cdiv(width, tile.BLOCK_D)
        options = {"W": taps, "SILU": silu, **tile._asdict()}
        return run(Launch(_forward_kernel, programs, inputs, outputs, (length, width), options))

    sizes = {"batch": batch, "length": length, "width": width, "taps": taps, "silu": silu}
    return search.run("causal_conv1d", TILINGS, launch, (*tensors, token_kind), sizes)


def backward(
    x, kernel, bias, initial_state, token_kind, output, dy, d_final, *, activation: str | None
):  # fmt: skip
    batch, length, width = x.shape
    taps, silu = kernel.shape[0], activation == "silu"
    tensors = dy, d_final, x, kernel, bias, initial_state
    inputs = *tensors, *_tabulate_positions(token_kind)

    def launch(tile):
        tile = tile.fitted(length + taps - 1, width)
        steps = min(_STEPS, triton.next_power_of_2(triton.cdiv(length + taps - 1, tile.tokens)))
        tiles = triton.cdiv(length + taps - 1, tile.tokens * steps)
        programs = batch * tiles * triton.cdiv(width, tile.BLOCK_D)
        sums = Array((batch * tiles, taps + 1, width), "float32")
        outputs = like(x), sums, _state_array(x, kernel)
        options = {"W": taps, "SILU": silu, "STEPS": steps, **tile._asdict()}
        dx, d_parameters, d_initial = run(
            Launch(_backward_kernel, programs, inputs, outputs, (length, width), options)
        )
        return dx, d_parameters.sum(0), d_initial

    sizes = {"batch": batch, "length": length, "width": width, "taps": taps, "silu": silu}
    dx, d_parameters, d_initial = search.run(
        "causal_conv1d backward", BACKWARD_TILINGS, launch, (*tensors, token_kind), sizes
    )
    d_kernel = cast(d_parameters[:taps], dtype_name(kernel))
    d_bias = None if bias is None else cast(d_parameters[taps], dtype_name(bias))
    return dx, d_kernel, d_bias, d_initial, None


kernels = operation(
    Operation(
        "causal_conv1d",
        forward,
        results,
        backward,
        gradients,
    )
)
