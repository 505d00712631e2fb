"""Token embeddings of a decoding step, with each token's kind and position and the next state."""

from keras import ops

from keras_recurrent.backends.constants import CONTINUES, STARTS


def embedding_step(table, token_ids, segment=None, position=None, scale=1.0, dtype="float32"):
    """table: [V, D]; token_ids, segment, position: integers [B].

    Returns ([B, D] in `dtype`, token kinds int8 [B], positions, the next segments and positions),
    None for those whose argument is None.
    """
    y = ops.cast(ops.take(table, token_ids, axis=0), dtype)
    y = y if scale == 1 else ops.multiply(y, scale)
    kind = next_segment = next_position = None
    if segment is not None:
        kind = ops.cast(ops.where(segment < 0, STARTS, CONTINUES), "int8")
        next_segment = ops.maximum(segment, 0)
    if position is not None:
        next_position = position + 1
    return y, kind, position, next_segment, next_position
