"""Generation in the loop of a KerasHub sampler."""

import keras_hub
from keras import ops


def generate_by_sampler(model, inputs, stop_token_ids, step):
    """Generates as `generate_step` of a model, in the loop of its sampler.

    Args:
        model: the language model.
        inputs, stop_token_ids: as in `generate_step`.
        step: a function `(token_ids [B, 1], cache) -> (logits [B, vocabulary_size],
            hidden_states [B, hidden_dim], cache)`.
    """
    token_ids = inputs["token_ids"]
    padding_mask = ops.cast(inputs["padding_mask"], "bool")
    index = ops.min(ops.sum(ops.cast(padding_mask, "int32"), axis=-1))

    def next_token(prompt, cache, index):
        return step(ops.slice(prompt, [0, index - 1], [ops.shape(prompt)[0], 1]), cache)

    # A sampler first passes the token at `index - 1`, then the rest of longer prompts token by
    # token. A recurrent state must not process a token twice, so the prefilled cache ends
    # before the token at `index - 1`.
    batch_size, length = ops.shape(token_ids)
    mask = ops.broadcast_to(ops.arange(length, dtype="int32") < index - 1, ops.shape(token_ids))
    cache = model.backbone.get_initial_state(batch_size, max_length=length)
    hidden_states, cache = model.backbone.hidden_states(token_ids, mask, cache=cache)
    if isinstance(model.sampler, keras_hub.samplers.ContrastiveSampler):
        # It uses all hidden states before `index`, of which the last is not computed yet.
        _, last, _ = next_token(token_ids, cache, index)
        hidden_states = ops.slice_update(hidden_states, [0, index - 1, 0], last[:, None])

    token_ids = model.sampler(
        next=next_token,
        prompt=token_ids,
        cache=cache,
        index=index,
        mask=padding_mask,
        stop_token_ids=stop_token_ids,
        hidden_states=hidden_states,
        model=model,
    )
    return {
        "token_ids": token_ids,
        "padding_mask": _output_mask(token_ids, padding_mask, stop_token_ids),
    }


def _output_mask(token_ids, padding_mask, stop_token_ids):
    """Returns a mask: True up to and including the first new stop token, or everywhere if none."""
    if stop_token_ids is None:
        return ops.ones_like(token_ids, dtype="bool")
    stops = ops.any(ops.stack([ops.equal(token_ids, i) for i in stop_token_ids]), axis=0)
    stops = ops.cast(ops.logical_and(stops, ops.logical_not(padding_mask)), "int32")
    return ops.equal(ops.cumsum(stops, axis=-1) - stops, 0)
