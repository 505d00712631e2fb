"""A decoding step of HGRN2 that writes its memory every few tokens only."""

from keras import ops

from keras_recurrent.backends.constants import PADDING
from keras_recurrent.portable._common import matmul
from keras_recurrent.portable.hgrn2_step import hgrn2_step, operands


def hgrn2_delayed_step(
    q, f, v, memory, recent, count, lower_bound=None, norm_scale=None, token_kind=None
):
    """q, f: [B, H K]; v: [B, H V]; memory: [B, H, K, V]; recent: [B, N, H (2 K + V)]; count: [B].

    norm_scale: [H V]. Returns ([B, H V], sums of squares [B, H, U], the next count, memory and
    recent tokens).
    """
    limit, current = recent.shape[1], current_memory(memory, recent, count)
    output, squares, after = hgrn2_step(q, f, v, current, lower_bound, norm_scale, token_kind)
    real = ops.ones_like(count, "bool") if token_kind is None else token_kind != PADDING
    _, key, value, decay = operands(q, f, v, memory, lower_bound, token_kind)
    parts = [ops.reshape(x, (x.shape[0], 1, -1)) for x in (decay, key, value)]
    token = ops.concatenate(parts, axis=2)
    is_next = real[:, None] & (ops.arange(limit, dtype="int32") == count[:, None])
    recent = ops.where(is_next[:, :, None], token, recent)
    writes = real & (count == limit)
    memory = ops.where(writes[:, None, None, None], after, memory)
    return output, squares, ops.where(real, (count + 1) % (limit + 1), count), memory, recent


def current_memory(memory, recent, count):
    """Returns the memory after the first `count` of the recent tokens, [B, H, K, V]."""
    (batch, heads, keys, _), limit = memory.shape, recent.shape[1]
    missing = (ops.arange(limit, dtype="int32") >= count[:, None])[:, :, None]
    # On torch, `ops.split` and `ops.where` of a number would wait for the device.
    stops = heads * keys, 2 * heads * keys
    parts = recent[..., : stops[0]], recent[..., stops[0] : stops[1]], recent[..., stops[1] :]
    fills = ops.ones_like, ops.zeros_like, ops.zeros_like
    present = (ops.where(missing, fill(x), x) for fill, x in zip(fills, parts, strict=True))
    decays, keys, values = (ops.reshape(x, (batch, limit, heads, -1)) for x in present)
    # Each key is multiplied by the decays of later tokens, so that one product adds all tokens.
    later = [ops.ones_like(decays[:, 0])]
    for i in reversed(range(limit)):
        later.append(later[-1] * decays[:, i])
    keys = keys * ops.stack(later[-2::-1], axis=1)
    added = matmul(ops.transpose(keys, (0, 2, 3, 1)), ops.transpose(values, (0, 2, 1, 3)))
    return later[-1][..., None] * memory + added
