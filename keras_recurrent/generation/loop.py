"""Reading prompts and writing after them, as a program of JAX or TensorFlow.

Each row has a place of its own: all prompts are read to their last token but one, and every step
takes the last token of each row and adds the next. A row ends at a stop token or where it is full.
"""

from typing import Any, NamedTuple

from keras import ops

from keras_recurrent.generation.lengths import piece


class Network(NamedTuple):
    """What a loop asks of the language model.

    Attributes:
        read: a function `(token_ids [B, T], padding_mask, cache) -> cache`.
        step: a function `(token_ids [B, 1], padding_mask or None, cache) -> (logits
            [B, vocabulary], cache)`.
        choose: a function `(logits [B, vocabulary], seeds) -> (tokens [B], seeds)`, where seeds are
            the states of generators of random numbers.
    """

    read: Any
    step: Any
    choose: Any


class Walk(NamedTuple):
    """Where all rows are between two steps.

    Attributes:
        done: boolean [B], which rows write no more.
        count: int32 [B], how many tokens each has written.
        token: integers [B, 1], the last token of each row, which the cache has not seen.
        cache: what each row has seen.
        seeds: the states of generators of random numbers.
    """

    done: Any
    count: Any
    token: Any
    cache: Any
    seeds: Any


def begin(cache, token, room, seeds):
    """The `Walk` of rows whose last tokens are `token` [B, 1], with room for `room` [B] more."""
    return Walk(room <= 0, ops.zeros_like(room), token, cache, seeds)


def advance(network, walk, room, stop_token_ids, keep):
    """One token more for each row that is not done.

    keep: whether the cache of a row that is done stays as it is.
    """
    real = ops.logical_not(walk.done)[:, None] if keep else None
    logits, cache = network.step(walk.token, real, walk.cache)
    token, seeds = network.choose(logits, walk.seeds)
    token = ops.cast(token, walk.token.dtype)
    if keep:
        token = ops.where(walk.done, walk.token[:, 0], token)
    count = walk.count + ops.cast(ops.logical_not(walk.done), walk.count.dtype)
    done = ops.logical_or(walk.done, count >= room)
    for stop in stop_token_ids or ():
        done = ops.logical_or(done, ops.equal(token, stop))
    return Walk(done, count, token[:, None], cache, seeds)


def write(network, cache, token_ids, lengths, limit, stop_token_ids, seeds, keep):
    """Rows with new tokens.

    Args:
        network: a `Network`.
        cache: what the rows have seen before these tokens.
        token_ids: integers `[B, room]`, prompts at the left.
        lengths: int32 `[B]`, their lengths, at least 1.
        limit: int32, the length at which a row is full, at most `room`.
        stop_token_ids: a tuple of integers, or None.
        seeds: the states of generators of random numbers.
        keep: whether the cache after it is wanted.

    Returns:
        `(token_ids [B, room], lengths [B], seeds)` and, with `keep`, the cache in which each row
        has seen all its tokens but the last.
    """
    cache = read(network, cache, token_ids, lengths - 1)
    last = ops.take_along_axis(token_ids, lengths[:, None] - 1, axis=1)
    room = limit - lengths

    def goes_on(t, written, walk):
        return ops.logical_not(ops.all(walk.done))

    def step(t, written, walk):
        walk = advance(network, walk, room, stop_token_ids, keep)
        return t + 1, ops.slice_update(written, (0, t), walk.token), walk

    state = ops.zeros((), "int32"), ops.zeros_like(token_ids), begin(cache, last, room, seeds)
    _, written, walk = ops.while_loop(goes_on, step, state)
    index = ops.arange(token_ids.shape[1], dtype="int32") - lengths[:, None]
    new = ops.logical_and(index >= 0, index < walk.count[:, None])
    written = ops.take_along_axis(written, ops.maximum(index, 0), axis=1)
    rows = ops.where(new, written, token_ids), lengths + walk.count, walk.seeds
    return (*rows, walk.cache) if keep else rows


def read(network, cache, token_ids, lengths):
    """The cache after the first `lengths` [B] tokens of each row."""
    size = piece(*token_ids.shape)
    longest, places = ops.max(lengths), ops.arange(size, dtype="int32")

    def goes_on(start, cache):
        return start < longest

    def step(start, cache):
        tokens = ops.slice(token_ids, (0, start), (token_ids.shape[0], size))
        return start + size, network.read(tokens, start + places < lengths[:, None], cache)

    return ops.while_loop(goes_on, step, (ops.zeros((), "int32"), cache))[1]
