"""S_t = diag(f_t) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t,  in every head, chunk by chunk.

Inside a chunk token u attends to an earlier token s with the weight q_u f_{s+1} ... f_u k_s. The
chunk is halved recursively. For u in a right half and s in the adjacent left half, q_u is
multiplied by the decays from the boundary to u, and k_s by those from s to the boundary. With one
decay per head, the weight is q_u k_s times the decays of s + 1 to u.
"""

from keras import ops

from keras_recurrent.portable import _loop, _opset_27
from keras_recurrent.portable._common import fill_where, matmul, state_or_zeros
from keras_recurrent.portable._scan import (
    power_of_two,
    scan,
    split_blocks,
    states_before,
)

CHUNK, SCALAR_CHUNK = 64, 32
LOG_OF_ZERO = -1e4  # exp of it is 0 in float32 and in float64


def linear_attention(q, k, v, log_f, initial_state, starts):
    """q, k: [B, T, G, K]; v: [B, T, H, V]; log_f: [B, T, H, K or 1], all of one dtype.

    H / G heads share a query and a key; with K decays a head, G is H. At padding k is 0 and log_f
    is 0. starts: [B, T, 1, 1] or None. Returns ([B, T, H, V], [B, H, K, V]).
    """
    batch, length, groups, key_size = ops.shape(q)
    heads, value_size = v.shape[2:]
    share, is_scalar = heads // groups, log_f.shape[3] == 1
    state = state_or_zeros(initial_state, (batch, heads, key_size, value_size), q.dtype)
    if share > 1 and (_opset_27.is_active() or q.shape[1] == 1 or _loop.is_needed(q)):
        q, k = (ops.repeat(x, share, axis=2) for x in (q, k))
    log_f = fill_where(starts, LOG_OF_ZERO, log_f)
    if _opset_27.is_active():
        return _opset_27.linear_attention(q, k, v, log_f, state)
    if q.shape[1] == 1:
        state, output = step(state, *(x[:, 0] for x in (q, k, v, ops.exp(log_f))))
        return output[:, None], state
    if _loop.is_needed(q):
        return _loop.loop(step, state, (q, k, v, ops.exp(log_f)))
    size = min(SCALAR_CHUNK if is_scalar else CHUNK, power_of_two(length))
    count = (length + size - 1) // size

    def split_groups(x):
        """Reshapes [B H N, ...] to [B G, heads of a group, N, ...]."""
        return ops.reshape(x, (batch * groups, -1, count, *x.shape[1:]))

    # Zeros after the last token leave the state as it is.
    q, k, v, log_f = (_split_heads(x, size) for x in (q, k, v, log_f))
    if is_scalar:
        decays, from_start, to_end = _scalar_decays(log_f)
        q, k, v, decays = map(split_groups, (q, k, v, decays))
        # The decays multiply values and outputs, because groups of heads share queries and keys.
        weights = ops.matmul(q, _transpose(k)) * decays
        added = ops.matmul(_transpose(k), v * split_groups(to_end))
    else:
        levels, from_start, to_end = _decay_products(ops.exp(log_f))
        weights = split_groups(_weights_of_pairs(q, k, levels))
        q, k, v = map(split_groups, (q * from_start, k * to_end, v))
        added = ops.matmul(_transpose(k), v)
    total = ops.reshape(ops.copy(from_start[:, -1]), (batch * heads, count, log_f.shape[2], 1))
    added = ops.reshape(added, (batch * heads, count, key_size, value_size))
    first = ops.reshape(state, (batch * heads, key_size, value_size))
    after = scan(total, added, first)
    before = ops.reshape(
        states_before(after, first), (batch * groups, share, count, key_size, value_size)
    )
    output = ops.matmul(q, before)
    if is_scalar:
        output = output * split_groups(from_start)
    output = output + ops.matmul(weights, v)
    output = ops.reshape(output, (batch, heads, count * size, value_size))[:, :, :length]
    return (
        ops.transpose(output, (0, 2, 1, 3)),
        ops.reshape(after[:, -1], (batch, heads, key_size, value_size)),
    )


def step(state, q, k, v, f):
    """Computes one token: q, k, f [B, H, K], v [B, H, V]. Returns the next state and the output."""
    state = next_state(state, k, v, f)
    return state, matmul(q[:, :, None], state)[:, :, 0]


def next_state(state, k, v, f):
    return f[..., None] * state + k[..., None] * v[:, :, None]


def _split_heads(x, size):
    """Reshapes [B, T, H, K] to chunks [B H N, C, K]."""
    batch, length, heads, width = ops.shape(x)
    x = ops.reshape(ops.transpose(x, (0, 2, 1, 3)), (batch * heads, length, width))
    return split_blocks(x, size)


def _scalar_decays(log_f):
    """Returns products of f in a chunk: between tokens, from its start, and to its end.

    Between s and u it is f_{s+1} ... f_u, and 0 if u is before s, [.., C, C]. Logarithms are only
    added. The gradient is made of matrix products; that of a tree of products is slower.
    """
    index, dtype = ops.arange(log_f.shape[1], dtype="int32"), log_f.dtype
    upto, after = (
        ops.cast(mask, dtype) for mask in (index[:, None] >= index, index[:, None] > index)
    )
    row = _transpose(ops.maximum(log_f, ops.cast(LOG_OF_ZERO, dtype)))
    between = ops.exp(ops.matmul(upto * row, after)) * upto
    from_start, to_end = (ops.exp(ops.matmul(row, sums)) for sums in (_transpose(upto), after))
    return between, _transpose(from_start), _transpose(to_end)


def _decay_products(f):
    """Returns products of f in a chunk: `levels`, from its start, and to its end.

    A level has the products from the boundary of two halves to tokens of the right one, and from
    tokens of the left one to the boundary. A product to the end excludes the f of its first token.
    """
    from_start, to_end = f, ops.ones_like(f)
    levels, half = [], 1
    while half < f.shape[1]:
        (p_left, p_right), (s_left, s_right) = _halves(from_start, half), _halves(to_end, half)
        levels.append((p_right, s_left))
        from_start = _join_halves(p_left, p_left[:, :, -1:] * p_right)
        to_end = _join_halves(s_left * p_right[:, :, -1:], s_right)
        half *= 2
    return levels, from_start, to_end


def _weights_of_pairs(q, k, levels):
    """Returns the weights [.., C, C] of tokens s <= u, built from blocks of one token up to C."""
    weights = ops.sum(q * k, axis=-1)[:, :, None, None]
    for from_boundary, to_boundary in levels:
        half = from_boundary.shape[2]
        q_right = _halves(q, half)[1] * from_boundary
        k_left = _halves(k, half)[0] * to_boundary
        if half == 1:
            between = ops.sum(q_right * k_left, axis=-1, keepdims=True)
        else:
            between = ops.matmul(q_right, _transpose(k_left))
        left, right = _halves(ops.reshape(weights, (-1, weights.shape[1], half * half)), 1)
        left, right = (ops.reshape(x, (-1, x.shape[1], half, half)) for x in (left, right))
        above = ops.concatenate([left, ops.zeros_like(left)], axis=-1)
        below = ops.concatenate([between, right], axis=-1)
        weights = ops.concatenate([above, below], axis=-2)
    return weights[:, 0]


def _halves(x, half):
    """Returns the left and the right halves [.., C / (2 half), half, K] of x [.., C, K]."""
    _, size, width = x.shape
    return ops.unstack(ops.reshape(x, (-1, size // (2 * half), 2, half, width)), axis=2)


def _transpose(x):
    return ops.swapaxes(x, -2, -1)


def _join_halves(left, right):
    _, count, half, width = left.shape
    return ops.reshape(ops.stack([left, right], axis=2), (-1, 2 * count * half, width))
