"""What the Triton kernels of linear attention share: chunks of time, and the states between them.

The states come first, chunk after chunk, and go to device memory; then all chunks are worked on at
once. `walk` makes the states before each chunk, S, or, from the last chunk to the first, the
gradients G of the states after each chunk:

    S' = decay S + (decay to the end * k)^T v,  G' = decay G + (decay from the start * q)^T d_output

Where heads are too few to fill the GPU, the walk is cut into segments: what each does to a state,
a decay and a total, is computed for all at once, and then each enters with what those before it do.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from keras_recurrent.backends.triton import _common
from keras_recurrent.backends.triton._math import exp_of_decays, one_minus_exp
from keras_recurrent.backends.triton._products import operand, product, sums_of_columns

CHUNK = 64  # tokens: the rows that a tensor core multiplies at a time
_LARGEST_HEAD = 256
_SMALLEST_TILE = 32  # channels; what is larger may have a tail (flash-linear-attention, #1241)
_MANY_PROGRAMS = 256  # about two for each multiprocessor of a large GPU
_SHORTEST_SEGMENT = 8  # chunks
_GONE = tl.constexpr(-1e4)  # the logarithm of 0; sums of it stay finite


def refusal(*tensors):
    """Why the kernels refuse q, k, v and others (or Nones); None if they accept them."""
    reason = _common.refusal(*tensors)
    if reason is not None:
        return reason
    for tensor in (tensors[0], tensors[2]):
        size = tensor.shape[3]
        if size > _LARGEST_HEAD:
            return f"takes heads of up to {_LARGEST_HEAD} channels, got {size}"
        if size > _SMALLEST_TILE and size % 2 and tensor.element_size() == 2:
            return f"Triton compiles odd tails of 16 bits wrongly on Hopper, got heads of {size}"
    return None


class Heads(NamedTuple):
    """Sizes of q: [B, T, H, K] and v: [B, T, H, V], and how numbers meet in products."""

    batch: int
    length: int
    heads: int
    keys: int
    values: int
    short: bool

    @property
    def chunks(self):
        return triton.cdiv(self.length, CHUNK)

    @property
    def state_shape(self):
        return self.batch, self.heads, self.keys, self.values

    @property
    def programs(self):
        """One for each chunk of each head."""
        return self.batch * self.heads * self.chunks

    @property
    def numbers(self):
        """As the kernels take them."""
        return self.length, self.heads, self.keys, self.values


def heads_of(q, k, v):
    short = all(x is None or x.dtype == torch.bfloat16 for x in (q, k, v))
    batch, length, heads, keys = q.shape
    return Heads(batch, length, heads, keys, v.shape[3], short)


def launch_options(sizes, keys, values):
    """Tiles [CHUNK, BLOCK_K] and [CHUNK, BLOCK_V] that leave room for two programs of 128 threads.

    All of their registers and the shared memory of a multiprocessor are then in use on Hopper.
    """
    return {
        "BLOCK_K": block(keys, 64 if sizes.short else 32),
        "BLOCK_V": block(values, 128 if sizes.short else 64),
        "CHUNK": CHUNK,
        "SHORT": sizes.short,
        "num_warps": 4,
        "num_stages": 2 if sizes.short else 1,
    }


def block(size, largest):
    """A power of two that holds `size`, or the largest one."""
    return min(largest, max(16, triton.next_power_of_2(size)))


@triton.jit
def real_tokens(chunk, token_kind, b, T, CHUNK: tl.constexpr):
    """Which tokens of a chunk are there and no padding, and which of them start afresh."""
    t = chunk * CHUNK + tl.arange(0, CHUNK)
    real = t < T
    starts = tl.full((CHUNK,), False, tl.int1)
    if token_kind is not None:
        kind = tl.load(token_kind + b.to(tl.int64) * T + t, real, other=2)
        real = kind != 2
        starts = kind == 1
    return real, starts


@triton.jit
def read(tensor, row, real, d, D, H):
    """[CHUNK, BLOCK_D] as float32, of a tensor [.., H, D] from its first token on; else 0."""
    at = row[:, None] * (H * D) + d[None, :]
    return tl.load(tensor + at, real[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)


@triton.jit
def read_columns(tensor, row, real, d, D, H):
    """The transpose of `read`."""
    at = row[None, :] * (H * D) + d[:, None]
    return tl.load(tensor + at, real[None, :] & (d < D)[:, None], other=0.0).to(tl.float32)


@triton.jit
def applied(log_f, starts):
    """The logarithms of the decays that tokens really apply, all finite."""
    return tl.where(starts, _GONE, tl.maximum(log_f, _GONE))


@triton.jit
def place(T, H, chunks, tiles, CHUNK: tl.constexpr):
    """Of this program: the tile, chunk, number of the head, row of the batch, and first token."""
    tile = tl.program_id(0) % tiles
    chunk = tl.program_id(0) // tiles % chunks
    head = tl.program_id(0) // tiles // chunks
    b = head // H
    token = (b.to(tl.int64) * T + chunk * CHUNK) * H + head % H
    return tile, chunk, head, b, token


@triton.jit
def power(ticks, log_decay, FINE: tl.constexpr):
    """decay to the power of ticks; not 0 * log_decay, which is not a number if the decay is 0."""
    return exp_of_decays(tl.where(ticks == 0, 0.0, ticks * log_decay), FINE)


@triton.jit
def counts(real, starts):
    """Up to and with each token, the real ones and those that start; and the whole of both."""
    count, document = tl.cumsum(real.to(tl.int32), 0), tl.cumsum(starts.to(tl.int32), 0)
    return count, document, tl.max(count, 0), tl.max(document, 0)


@triton.jit(do_not_specialize=["T", "chunks", "each"])
def _walk_kernel(
    k,
    v,
    log_f,
    log_decay,
    token_kind,
    first,
    states,
    last,
    totals,
    decays,
    T,
    H,
    K,
    V,
    chunks,
    each,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    SHORT: tl.constexpr,
    PARTS: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """k: keys, or queries if REVERSE; v: values, or gradients. Without states: totals, decays."""
    k_tiles = tl.cdiv(K, BLOCK_K)
    tiles = k_tiles * tl.cdiv(V, BLOCK_V)
    segments = tl.cdiv(chunks, each)
    walked = segments
    if states is None:
        walked = segments - 1
    tile = tl.program_id(0) % tiles
    segment = tl.program_id(0) // tiles % walked
    head = tl.program_id(0) // tiles // walked
    heads = tl.num_programs(0) // tiles // walked
    b = head // H
    d = tile % k_tiles * BLOCK_K + tl.arange(0, BLOCK_K)
    e = tile // k_tiles * BLOCK_V + tl.arange(0, BLOCK_V)
    row = tl.arange(0, CHUNK)
    at = d[:, None] * V + e[None, :]
    inside = (d < K)[:, None] & (e < V)[None, :]

    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    decay = tl.full((BLOCK_K,), 1.0, tl.float32)
    if log_decay is not None:
        rate = tl.load(log_decay + head % H).to(tl.float32)
    if states is not None:
        if first is not None:
            of = head.to(tl.int64) * K * V
            state = tl.load(first + of + at, inside, other=0.0).to(tl.float32)
        if totals is not None:
            for s in range(segment):
                of = (s * heads + head).to(tl.int64) * K
                over = tl.load(decays + of + d, d < K, other=0.0)
                total = tl.load(totals + of * V + at, inside, other=0.0)
                state = over[:, None] * state + total

    for i in range(segment * each, tl.minimum((segment + 1) * each, chunks)):
        chunk = chunks - 1 - i if REVERSE else i
        token = (b.to(tl.int64) * T + chunk * CHUNK) * H + head % H
        real, starts = real_tokens(chunk, token_kind, b, T, CHUNK)
        if states is not None:
            slot = states + (head * chunks + chunk).to(tl.int64) * K * V
            tl.store(slot + at, operand(state, SHORT), inside)
        if log_f is not None:
            logarithm = read_columns(log_f + token * K, row, real, d, K, H)
            if k is None:
                key = one_minus_exp(logarithm, not SHORT)
            else:
                key = read_columns(k + token * K, row, real, d, K, H)
            logarithm = applied(logarithm, starts[None, :])
            if REVERSE:
                reach = row[:, None] <= row[None, :]
            else:
                reach = row[:, None] > row[None, :]
            key *= exp_of_decays(sums_of_columns(logarithm, reach, PARTS), not SHORT)
            over = exp_of_decays(tl.sum(logarithm, 1), not SHORT)
        else:
            key = read_columns(k + token * K, row, real, d, K, H)
            count, document, whole, latest = counts(real, starts)
            if REVERSE:
                scale = tl.where(document == 0, power(count, rate, not SHORT), 0.0)
            else:
                scale = tl.where(document == latest, power(whole - count, rate, not SHORT), 0.0)
            key *= scale[None, :]
            over = tl.where(latest == 0, power(whole, rate, not SHORT), 0.0)
            over = tl.where(d >= 0, over, 1.0)
        state *= over[:, None]
        decay *= over
        value = read(v + token * V, row, real, e, V, H)
        state = product(key, value, state, SHORT)

    if states is None:
        of = (segment * heads + head).to(tl.int64) * K
        tl.store(totals + of * V + at, state, inside)
        tl.store(decays + of + d, decay, d < K)
    elif segment == segments - 1:
        tl.store(last + head.to(tl.int64) * K * V + at, state, inside)


def walk(
    sizes, k, v, first, *, token_kind, log_f=None, log_decay=None, parts=1, reverse=False
):  # fmt: skip
    """Returns the states [B, H, chunks, K, V], as products take them, and the last one in float32.

    With `reverse`, k is q and v the gradient of the output, and these are gradients of states.
    """
    shape = (sizes.batch, sizes.heads, sizes.chunks, sizes.keys, sizes.values)
    states = v.new_empty(shape, dtype=torch.bfloat16 if sizes.short else torch.float32)
    last = v.new_empty(sizes.state_shape, dtype=torch.float32)
    block_k, block_v = block(sizes.keys, 64), block(sizes.values, 128 if sizes.short else 32)
    tiles = triton.cdiv(sizes.keys, block_k) * triton.cdiv(sizes.values, block_v)
    programs = sizes.batch * sizes.heads * tiles
    segments = max(1, min(_MANY_PROGRAMS // programs, sizes.chunks // _SHORTEST_SEGMENT))
    each = triton.cdiv(sizes.chunks, segments)
    segments = triton.cdiv(sizes.chunks, each)
    totals = decays = None
    if segments > 1:
        totals = last.new_empty((segments - 1, *sizes.state_shape))
        decays = last.new_empty((segments - 1, *sizes.state_shape[:3]))

    def launch(segments, states, last):
        _walk_kernel[(programs * segments,)](
            k,
            v,
            log_f,
            log_decay,
            token_kind,
            first,
            states,
            last,
            totals,
            decays,
            *sizes.numbers,
            sizes.chunks,
            each,
            BLOCK_K=block_k,
            BLOCK_V=block_v,
            CHUNK=CHUNK,
            SHORT=sizes.short,
            PARTS=parts,
            REVERSE=reverse,
            num_warps=4,
            num_stages=3,
        )

    if segments > 1:
        launch(segments - 1, None, None)
    launch(segments, states, last)
    return states, last
