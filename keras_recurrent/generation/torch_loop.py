"""Reading prompts and writing after them on torch, step by step in Python.

Each row has a place of its own, as in `loop.py`. The loop waits for the device only to see, every
few tokens, whether all rows have stopped.
"""

import keras
import numpy as np
import torch

from keras_recurrent.generation.lengths import LONGEST_PIECE, bucket
from keras_recurrent.generation.torch_sampling import Choice

LOOKS_EVERY = 16  # tokens


def write(model, ways, token_ids, lengths, stop_token_ids):
    """Rows with new tokens.

    Args:
        model: the language model, whose sampler chooses.
        ways: its `torch_ways.Ways`.
        token_ids: a NumPy array, integers `[B, T]`, prompts at the left.
        lengths: a NumPy array `[B]`, their lengths, at least 1.
        stop_token_ids: a tuple of integers, or None.

    Returns:
        `(token_ids [B, T], lengths [B])`, NumPy arrays.
    """
    room = token_ids.shape[1] - lengths
    longest = int(room.max())
    if longest == 0:
        return token_ids, lengths
    prompts = keras.ops.convert_to_tensor(token_ids)
    device = prompts.device
    cache = read(model, prompts, lengths - 1)
    last = token_ids[np.arange(len(lengths)), lengths - 1][:, None]
    token = keras.ops.convert_to_tensor(last)
    choice = Choice(model.sampler)
    stops = torch.as_tensor(stop_token_ids or (), dtype=token.dtype, device=device)
    full_at = torch.as_tensor(room, device=device)
    stopped = torch.zeros_like(full_at, dtype=torch.bool)
    written = token.new_zeros(len(lengths), longest)
    with ways.tokens(token, cache, choice) as next_token:
        for t in range(longest):
            written[:, t : t + 1] = next_token(t)
            if stop_token_ids and (t + 1) % LOOKS_EVERY == 0:
                latest = written[:, t + 1 - LOOKS_EVERY : t + 1]
                stopped |= torch.isin(latest, stops).any(dim=1)
                if bool((stopped | (full_at <= t + 1)).all()):
                    break

    token_ids, new = token_ids.copy(), written.cpu().numpy()
    ends = np.isin(new, stop_token_ids or ())
    counts = np.where(ends.any(axis=1), ends.argmax(axis=1) + 1, longest)
    counts = np.minimum(counts, room).astype(lengths.dtype)
    for row, (start, count) in enumerate(zip(lengths, counts, strict=True)):
        token_ids[row, start : start + count] = new[row, :count]
    choice.end(int(counts.max()))
    return token_ids, lengths + counts


def read(model, token_ids, lengths):
    """The cache after the first `lengths` (a NumPy array [B]) tokens of each row."""
    cache = model.backbone.get_initial_state(len(lengths), max_length=bucket(token_ids.shape[1]))
    rows = torch.as_tensor(lengths, device=token_ids.device)[:, None]
    for start in range(0, int(lengths.max()), LONGEST_PIECE):
        stop = min(start + LONGEST_PIECE, int(lengths.max()))
        mask = None
        if stop > lengths.min():
            mask = torch.arange(start, stop, device=token_ids.device) < rows
        _, cache = model.backbone.hidden_states(token_ids[:, start:stop], mask, cache=cache)
    return cache
