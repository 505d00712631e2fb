"""o_t = sum_s softmax_s(q_t · k_s) v_s over a window of keys.

Each query is multiplied with all keys, those of the state and those of the sequence, and a mask
selects the keys it attends to. Memory grows with the square of the length.
"""

from keras import ops

from keras_recurrent.backends.constants import PADDING, STARTS
from keras_recurrent.portable._common import sum_dtype

MASKED_LOGIT = -1e30  # finite, with a softmax weight of 0


def sliding_window_attention(
    q, k, v, sliding_window=None, initial_state=None, token_kind=None, capacity=None
):
    """q: [B, T, H, K]; k: [B, T, G, K]; v: [B, T, G, V].

    Returns ([B, T, H, V], {"key": [B, C, G, K], "value": [B, C, G, V], "position": [B]}).
    """
    state = initial_state or {}
    dtype = sum_dtype(q, k, v, state.get("key"), state.get("value"))
    positions = _Positions(q, state, token_kind)
    keys, values = (
        positions.concatenate(t, state.get(name)) for t, name in ((k, "key"), (v, "value"))
    )
    visible = ops.equal(positions.document[:, :, None], positions.key_document[:, None])
    distance = positions.number[:, :, None] - positions.key_number[:, None]
    visible &= distance >= 0
    if sliding_window is not None:
        visible &= distance < sliding_window
    queries = _zero_unless(positions.real, q)
    queries, keys, values = (ops.cast(t, dtype) for t in (queries, keys, values))
    output = _attend(queries, keys, values, visible)
    if initial_state is not None:
        capacity = state["key"].shape[1]
    elif capacity is None and sliding_window is not None:
        capacity = sliding_window - 1
    after = {} if capacity is None else positions.update_cache(keys, values, capacity)
    return ops.cast(output, q.dtype), after


def _attend(q, k, v, visible):
    """q: [B, T, H, K]; k, v: [B, S, G, K or V]; visible: [B, T, S]."""
    batch, length, heads, size = ops.shape(q)
    groups, shared = k.shape[2], heads // k.shape[2]
    q = ops.reshape(q, (batch, length, groups, shared, size))
    q = ops.reshape(ops.transpose(q, (0, 2, 3, 1, 4)), (batch, groups, shared * length, size))
    logits = ops.matmul(q, ops.transpose(k, (0, 2, 3, 1)))
    logits = ops.reshape(logits, (batch, groups, shared, length, ops.shape(k)[1]))
    logits = ops.where(visible[:, None, None], logits, ops.cast(MASKED_LOGIT, logits.dtype))
    weights = ops.softmax(logits, axis=-1)
    weights = ops.reshape(weights, (batch, groups, shared * length, ops.shape(k)[1]))
    output = ops.matmul(weights, ops.transpose(v, (0, 2, 1, 3)))
    output = ops.reshape(output, (batch, groups, shared, length, v.shape[3]))
    return ops.reshape(ops.transpose(output, (0, 3, 1, 2, 4)), (batch, length, heads, v.shape[3]))


class _Positions:
    """Document and number of each query and key; the number counts the real tokens.

    Keys are the slots of the state, followed by the tokens of the sequence. The document of a key
    that is masked is -1.
    """

    def __init__(self, q, state, token_kind):
        batch, length = ops.shape(q)[:2]
        if token_kind is None:
            real = ops.ones((batch, length), "bool")
            self.document = ops.zeros((batch, length), "int32")
        else:
            token_kind = ops.cast(token_kind, "int32")
            real = ops.not_equal(token_kind, PADDING)
            starts = ops.cast(ops.equal(token_kind, STARTS), "int32")
            self.document = ops.cumsum(starts, axis=1)
        self.real = real
        self.number = ops.cumsum(ops.cast(real, "int32"), axis=1)
        self.key_number = self.number
        self.key_document = ops.where(real, self.document, -1)
        position = state.get("position")
        if position is None:
            position = ops.zeros((batch,), "int32")
        self.filled = None
        if state:
            age = _ages(position, state["key"].shape[1])
            self.filled = age < position[:, None]
            before = ops.where(self.filled, 0, -1)
            self.key_number = ops.concatenate([-age, self.number], axis=1)
            self.key_document = ops.concatenate([before, self.key_document], axis=1)
        last = self.document[:, -1:]
        in_last = ops.cast(real & ops.equal(self.document, last), "int32")
        first = ops.where(ops.equal(last[:, 0], 0), position, 0)
        self.next_position = first + ops.sum(in_last, axis=1)

    def concatenate(self, x, cache):
        """Returns the keys or values [B, S, G, ...] of state and sequence, 0 at padding."""
        x = _zero_unless(self.real, x)
        if cache is None:
            return x
        return ops.concatenate([_zero_unless(self.filled, ops.cast(cache, x.dtype)), x], axis=1)

    def update_cache(self, keys, values, capacity):
        """Returns the state after the sequence. A product with 0 and 1 selects its keys."""
        age = _ages(self.next_position, capacity)
        numbers = self.number[:, -1:] - age
        selected = ops.equal(numbers[:, :, None], self.key_number[:, None])
        selected &= ops.equal(self.document[:, -1:], self.key_document)[:, None]
        selected &= (age < self.next_position[:, None])[:, :, None]
        state = {"position": self.next_position}
        for name, x in (("key", keys), ("value", values)):
            batch, count, groups, size = ops.shape(x)
            flat = ops.reshape(x, (batch, count, groups * size))
            cache = ops.matmul(ops.cast(selected, x.dtype), flat)
            state[name] = ops.reshape(cache, (batch, capacity, groups, size))
        return state


def _ages(position, capacity):
    """Returns the number of tokens after the one in each slot, [B, C]."""
    # Without negative dividends, which tf2onnx rounds toward 0.
    number = position[:, None] + capacity - 1 - ops.arange(0, capacity, dtype="int32")
    return ops.mod(number, max(capacity, 1))


def _zero_unless(condition, x):
    return ops.where(condition[:, :, None, None], x, ops.zeros_like(x))
