"""Log probabilities of given tokens."""

from keras import ops

from keras_recurrent.ops.token_crossentropy import token_crossentropy


def score_tokens(backbone, token_ids, targets, mask, cache):
    """Computes the losses of target tokens.

    Args:
        backbone: the backbone of a language model.
        token_ids: integers `[B, T]`.
        targets: integers `[B, T]`, the token after each of `token_ids`.
        mask: boolean `[B, T]`, False at padding.
        cache: the cache before `token_ids`.

    Returns:
        The losses of the targets, in nats, booleans that are True where a target is the most
        probable token, both `[B, T]`, and the cache after the real tokens.
    """
    hidden_states, cache = backbone.hidden_states(token_ids, mask, cache=cache)
    logits = backbone.token_embedding(hidden_states, reverse=True)
    is_best = ops.equal(ops.cast(ops.argmax(logits, axis=-1), targets.dtype), targets)
    return token_crossentropy(logits, targets), is_best, cache
