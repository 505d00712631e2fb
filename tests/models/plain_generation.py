"""Generation without a cache: a forward pass over whole sequences for each new token.

A reference for the decoding loops, written independently. Each function also returns the least
margin of its decisions: if the margin is well above rounding, tokens must be equal.
"""

import numpy as np

from keras_recurrent.generation.sampling import as_sampling_params
from tests.generation import numpy_sampling
from tests.models.tiny import forward


def log_softmax(logits):
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def sample(model, sampler, prompt, given):
    """Greedy, top-k, top-p and random samplers of KerasHub.

    Each sequence continues after its prompt until it is full.
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
            arguments = params, logits[row], uniform[row, t], (), [], ()
            prompt[row, lengths[row]], row_margin = numpy_sampling.choose(*arguments)
            margin = min(margin, row_margin)
        lengths, t = lengths + ~done, t + 1
        done = lengths == prompt.shape[1]
    return prompt, margin


def beam(model, num_beams, prompt, given, stop_ids=(), limits=None, penalty=1.0, early=False):
    """Beam search as transformers defines it.

    Returns:
        For each prompt, a list of `(score, new tokens)`, the best first; and the margin.
    """
    limits = np.full(len(prompt), prompt.shape[1]) if limits is None else limits
    lengths = given.sum(axis=1)
    free = limits - lengths
    searches = [beam_search(num_beams, n, stop_ids, penalty, early) for n in free]
    running = {row: next(searches[row]) for row in np.flatnonzero(free)}
    found = {row: ([(0.0, [])], np.inf) for row in np.flatnonzero(free == 0)}
    texts = np.repeat(prompt[:, None], num_beams, axis=1)
    for count in range(prompt.shape[1]):
        for row, beams in running.items():
            for text, (_, tokens) in zip(texts[row], beams, strict=False):
                text[lengths[row] : lengths[row] + count] = tokens
        real = np.arange(prompt.shape[1]) < (lengths + count)[:, None]
        logits = forward(model, texts.reshape(-1, prompt.shape[1]), np.repeat(real, num_beams, 0))
        logits = logits.reshape(*texts.shape, -1)
        for row in list(running):
            log_p = log_softmax(logits[row, :, lengths[row] + count - 1].astype("float64"))
            try:
                running[row] = searches[row].send(log_p)
            except StopIteration as end:
                found[row] = end.value
                del running[row]
        if not running:
            break
    found, margins = zip(*(found[row] for row in range(len(prompt))), strict=True)
    return list(found), min(margins)


def beam_search(num_beams, free_length, stop_ids, penalty, early):
    """Yields running beams, receives their log probabilities; returns ended beams and a margin."""
    margin, running, ended = [np.inf], [(0.0, [])], []

    def best(scored):
        scored = sorted(scored, key=lambda pair: -pair[0])[: num_beams + 1]
        margin.extend(-np.diff([score for score, _ in scored]))
        return scored[:num_beams]

    for count in range(1, free_length + 1):
        steps = yield running
        candidates = [
            (score + log_p, [*tokens, token])
            for step, (score, tokens) in zip(steps, running, strict=False)
            for token, log_p in enumerate(step)
        ]
        for score, tokens in best(candidates):
            if tokens[-1] in stop_ids or count == free_length:
                ended.append((score / count**penalty, tokens))
        running = best(pair for pair in candidates if pair[1][-1] not in stop_ids)
        ended = best(ended)
        if len(ended) < num_beams or count == free_length:
            continue
        if early is True:
            break
        hoped = free_length if early == "never" and penalty > 0 else count
        gap = running[0][0] / hoped**penalty - ended[-1][0]
        margin.append(abs(gap))
        if gap <= 0:
            break
    return ended, min(margin)
