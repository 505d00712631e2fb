"""Generation without a cache: each new token costs a plain forward pass over the whole rows.

Written apart from the samplers' loops, for the tests to compare with. Each function also returns
the least margin of its decisions: where it is well above rounding, tokens must be equal.
"""

import keras
import numpy as np

from keras_recurrent.generation.samplers import as_sampling_params
from tests.generation import numpy_sampling
from tests.models.tiny import forward


def logits_before(model, prompt, index):
    """The logits of the token at `index`, from the tokens before it."""
    places = np.arange(prompt.shape[1])
    real = np.broadcast_to(places < index, prompt.shape)
    return forward(model, prompt, real)[:, index - 1]


def log_softmax(logits):
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def all_stopped(prompt, given, stop_ids):
    return bool(stop_ids) and (np.isin(prompt, stop_ids) & ~given).any(axis=1).all()


def sample(model, sampler, prompt, given, stop_ids=()):
    """Greedy, top-k, top-p and random samplers of KerasHub.

    Each row goes on from its own end, until it is full or has a stop token.
    """
    prompt, margin = prompt.copy(), np.inf
    rows, lengths = np.arange(len(prompt)), given.sum(axis=1)
    done, params = lengths == prompt.shape[1], as_sampling_params(sampler)
    seeds = [[getattr(sampler, "seed", None) or 0, 0, row] for row in rows]
    uniform = np.stack([numpy_sampling.uniform(seed, prompt.shape[1]) for seed in seeds])
    t = 0
    while not done.all():
        real = np.arange(prompt.shape[1]) < lengths[:, None]
        logits = forward(model, prompt, real)[rows, lengths - 1]
        for row in rows[~done]:
            arguments = params, logits[row], uniform[row, t], (), [], stop_ids
            prompt[row, lengths[row]], row_margin = numpy_sampling.choose(*arguments)
            margin = min(margin, row_margin)
        token = prompt[rows, np.minimum(lengths, prompt.shape[1] - 1)]
        lengths, t = lengths + ~done, t + 1
        done |= (lengths == prompt.shape[1]) | np.isin(token, stop_ids)
    return prompt, margin


def beam(model, num_beams, prompt, given, stop_ids=()):
    """Beam search after prompts of equal length."""
    batch, length = prompt.shape
    beams = np.repeat(prompt[:, None], num_beams, axis=1)
    scores = np.full((batch, num_beams), -1e9)
    scores[:, 0] = 0
    margin = np.inf
    for index in range(given[0].sum(), length):
        flat = beams.reshape(-1, length)
        if all_stopped(flat, np.repeat(given, num_beams, axis=0), stop_ids):
            break
        logits = logits_before(model, flat, index)
        candidates = scores[..., None] + log_softmax(logits).reshape(batch, num_beams, -1)
        vocabulary = candidates.shape[-1]
        candidates = candidates.reshape(batch, -1)
        order = np.argsort(-candidates, axis=1)
        ranked = np.take_along_axis(candidates, order, axis=1)[:, : num_beams + 1]
        margin = min(margin, -np.diff(ranked, axis=1).max())
        chosen = order[:, :num_beams]
        scores = np.take_along_axis(candidates, chosen, axis=1)
        beams = np.take_along_axis(beams, (chosen // vocabulary)[..., None], axis=1)
        beams[..., index] = chosen % vocabulary
    best = scores.argmax(axis=1)
    return beams[np.arange(batch), best], margin


def contrastive(model, k, alpha, prompt, given, stop_ids=()):
    """Contrastive search: probable tokens whose hidden state is unlike all those before."""
    batch, length = prompt.shape
    prompt, margin = prompt.copy(), np.inf
    for index in range(given.sum(axis=1).min(), length):
        if all_stopped(prompt, given, stop_ids):
            break
        log_probabilities = log_softmax(logits_before(model, prompt, index))
        order = np.argsort(-log_probabilities, axis=1)
        ranked = np.take_along_axis(log_probabilities, order, axis=1)
        candidates = order[:, :k]
        scores = np.empty((batch, k))
        for j in range(k):
            tried = prompt.copy()
            tried[:, index] = np.where(given[:, index], prompt[:, index], candidates[:, j])
            hidden = hidden_states(model, tried, index + 1)
            hidden /= np.linalg.norm(hidden, axis=-1, keepdims=True)
            likeness = np.einsum("bti,bi->bt", hidden[:, :index], hidden[:, index]).max(axis=1)
            scores[:, j] = (1 - alpha) * np.exp(ranked[:, j]) - alpha * likeness
        best = np.sort(scores, axis=1)
        free = ~given[:, index]
        if free.any():
            gap = np.minimum(best[:, -1] - best[:, -2], ranked[:, k - 1] - ranked[:, k])
            margin = min(margin, gap[free].min())
        token = candidates[np.arange(batch), scores.argmax(axis=1)]
        prompt[:, index] = np.where(given[:, index], prompt[:, index], token)
    return prompt, margin


def hidden_states(model, token_ids, length):
    """The hidden states of the first `length` tokens of rows, by a plain call."""
    real = np.broadcast_to(np.arange(token_ids.shape[1]) < length, token_ids.shape)
    x = {"token_ids": token_ids.astype("int32"), "padding_mask": real.astype("int32")}
    return keras.ops.convert_to_numpy(model.backbone.predict_on_batch(x)).astype("float64")
