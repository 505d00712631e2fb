"""Reading prompts and writing after them, as a program of JAX or TensorFlow.

Each row has a place of its own: all prompts are read to their last token but one, and every step
takes the last token of each row and adds the next. A row ends at a stop token or where it is full.
"""

from keras import ops

from keras_recurrent.generation.lengths import piece


def write(network, choose, cache, token_ids, lengths, limit, stop_token_ids, seeds):
    """Rows with new tokens.

    Args:
        network: a function `(token_ids [B, T], padding_mask or None, cache) -> (logits of the last
            token [B, vocabulary], cache)`. The logits are None where there is a mask.
        choose: a function `(logits [B, vocabulary], seeds) -> (tokens [B], seeds)`.
        cache: the cache in which nothing was seen.
        token_ids: integers `[B, room]`, prompts at the left.
        lengths: int32 `[B]`, their lengths, at least 1.
        limit: int32, the length at which a row is full, at most `room`.
        stop_token_ids: a tuple of integers, or None.
        seeds: what `choose` takes and returns: the states of generators of random numbers.

    Returns:
        `(token_ids [B, room], lengths [B], seeds)`.
    """
    cache = _read(network, cache, token_ids, lengths - 1)
    last = ops.take_along_axis(token_ids, lengths[:, None] - 1, axis=1)
    room = limit - lengths
    written, count = ops.zeros_like(token_ids), ops.zeros_like(lengths)

    def goes_on(t, done, *others):
        return ops.logical_not(ops.all(done))

    def step(t, done, count, last, written, cache, seeds):
        logits, cache = network(last, None, cache)
        token, seeds = choose(logits, seeds)
        token = ops.cast(token, token_ids.dtype)
        written = ops.slice_update(written, (0, t), token[:, None])
        count = count + ops.cast(ops.logical_not(done), count.dtype)
        done = ops.logical_or(done, count >= room)
        for stop in stop_token_ids or ():
            done = ops.logical_or(done, ops.equal(token, stop))
        return t + 1, done, count, token[:, None], written, cache, seeds

    t = ops.zeros((), "int32")
    state = t, room <= 0, count, last, written, cache, seeds
    _, _, count, _, written, _, seeds = ops.while_loop(goes_on, step, state)
    index = ops.arange(token_ids.shape[1], dtype="int32") - lengths[:, None]
    new = ops.logical_and(index >= 0, index < count[:, None])
    written = ops.take_along_axis(written, ops.maximum(index, 0), axis=1)
    return ops.where(new, written, token_ids), lengths + count, seeds


def _read(network, cache, token_ids, lengths):
    """The cache after the first `lengths` [B] tokens of each row."""
    size = piece(token_ids.shape[1])
    longest, places = ops.max(lengths), ops.arange(size, dtype="int32")

    def goes_on(start, cache):
        return start < longest

    def step(start, cache):
        tokens = ops.slice(token_ids, (0, start), (token_ids.shape[0], size))
        _, cache = network(tokens, start + places < lengths[:, None], cache)
        return start + size, cache

    return ops.while_loop(goes_on, step, (ops.zeros((), "int32"), cache))[1]
