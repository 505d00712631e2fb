"""o_t = sum_s softmax_s(q_t · k_s) v_s over a window of keys.

Each query is multiplied with all keys, those of the state and those of the row, and a mask says
which it attends to: the memory grows with the square of the length.
"""

from keras import ops

from keras_recurrent.backends.constants import PADDING, STARTS
from keras_recurrent.portable._common import sum_dtype

HIDDEN = -1e30  # a logit that counts for nothing, and is finite


def sliding_window_attention(
    q, k, v, sliding_window=None, initial_state=None, token_kind=None, capacity=None
):
    """q: [B, T, H, K]; k: [B, T, G, K]; v: [B, T, G, V].

    Returns ([B, T, H, V], {"key": [B, C, G, K], "value": [B, C, G, V], "position": [B]}).
    """
    state = initial_state or {}
    dtype = sum_dtype(q, k, v, state.get("key"), state.get("value"))
    row = _Row(q, state, token_kind)
    keys, values = (row.joined(t, state.get(name)) for t, name in ((k, "key"), (v, "value")))
    visible = ops.equal(row.document[:, :, None], row.key_document[:, None])
    distance = row.number[:, :, None] - row.key_number[:, None]
    visible &= distance >= 0
    if sliding_window is not None:
        visible &= distance < sliding_window
    queries = _zero_unless(row.real, q)
    queries, keys, values = (ops.cast(t, dtype) for t in (queries, keys, values))
    output = _attend(queries, keys, values, visible)
    if initial_state is not None:
        capacity = state["key"].shape[1]
    elif capacity is None and sliding_window is not None:
        capacity = sliding_window - 1
    after = {} if capacity is None else row.ring(keys, values, capacity)
    return ops.cast(output, q.dtype), after


def _attend(q, k, v, visible):
    """q: [B, T, H, K]; k, v: [B, S, G, K or V]; visible: [B, T, S]."""
    batch, length, heads, size = ops.shape(q)
    groups, shared = k.shape[2], heads // k.shape[2]
    q = ops.reshape(q, (batch, length, groups, shared, size))
    q = ops.reshape(ops.transpose(q, (0, 2, 3, 1, 4)), (batch, groups, shared * length, size))
    logits = ops.matmul(q, ops.transpose(k, (0, 2, 3, 1)))
    logits = ops.reshape(logits, (batch, groups, shared, length, ops.shape(k)[1]))
    logits = ops.where(visible[:, None, None], logits, ops.cast(HIDDEN, logits.dtype))
    weights = ops.softmax(logits, axis=-1)
    weights = ops.reshape(weights, (batch, groups, shared * length, ops.shape(k)[1]))
    output = ops.matmul(weights, ops.transpose(v, (0, 2, 1, 3)))
    output = ops.reshape(output, (batch, groups, shared, length, v.shape[3]))
    return ops.reshape(ops.transpose(output, (0, 3, 1, 2, 4)), (batch, length, heads, v.shape[3]))


class _Row:
    """Where each query and each key stands: in which document, and after how many real tokens.

    The keys are the slots of the state, then the tokens of the row. A key of no document is -1.
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
        own = ops.cast(real & ops.equal(self.document, last), "int32")
        first = ops.where(ops.equal(last[:, 0], 0), position, 0)
        self.next_position = first + ops.sum(own, axis=1)

    def joined(self, x, ring):
        """The keys or values [B, S, G, ...], 0 where there is none."""
        x = _zero_unless(self.real, x)
        if ring is None:
            return x
        return ops.concatenate([_zero_unless(self.filled, ops.cast(ring, x.dtype)), x], axis=1)

    def ring(self, keys, values, capacity):
        """The state after the row. A product with 0 and 1 takes its keys from all."""
        age = _ages(self.next_position, capacity)
        wanted = self.number[:, -1:] - age
        taken = ops.equal(wanted[:, :, None], self.key_number[:, None])
        taken &= ops.equal(self.document[:, -1:], self.key_document)[:, None]
        taken &= (age < self.next_position[:, None])[:, :, None]
        state = {"position": self.next_position}
        for name, x in (("key", keys), ("value", values)):
            batch, count, groups, size = ops.shape(x)
            flat = ops.reshape(x, (batch, count, groups * size))
            ring = ops.matmul(ops.cast(taken, x.dtype), flat)
            state[name] = ops.reshape(ring, (batch, capacity, groups, size))
        return state


def _ages(position, capacity):
    """How many tokens came after the one in each slot, [B, C]."""
    return ops.mod(position[:, None] - 1 - ops.arange(0, capacity, dtype="int32"), max(capacity, 1))


def _zero_unless(condition, x):
    return ops.where(condition[:, :, None, None], x, ops.zeros_like(x))
