"""Choice of tokens by `SamplingParams` in NumPy float64, for one sequence.

Written from the docstring of `SamplingParams`, apart from the package's programs.
"""

import numpy as np


def log_softmax(logits):
    logits = logits - logits.max()
    return logits - np.log(np.exp(logits).sum())


def choose(params, logits, uniform, prompt, generated, stops):
    """Returns the next token and its margin: the distance of `uniform` from another token."""
    logits = change_logits(params, logits, prompt, generated, stops)
    if params.temperature == 0:
        ranked = np.sort(logits)
        return int(logits.argmax()), ranked[-1] - ranked[-2]
    probabilities = np.exp(log_softmax(logits / params.temperature))
    kept = probabilities >= params.min_p * probabilities.max()
    order = np.argsort(-probabilities, kind="stable")
    order = order[kept[order]]
    if params.top_k > 0:
        order = order[: params.top_k]
    share = probabilities[order] / probabilities[order].sum()
    if params.top_p < 1:
        before = np.cumsum(share) - share
        order = order[before < params.top_p]
    ids = np.sort(order)
    cumulative = np.cumsum(probabilities[ids]) / probabilities[ids].sum()
    return int(ids[np.searchsorted(cumulative, uniform, "right")]), abs(cumulative - uniform).min()


def change_logits(params, logits, prompt, generated, stops):
    logits = np.array(logits, "float64")
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    if len(generated) < params.min_new_tokens:
        logits[list(stops)] = -np.inf
    for token in {*prompt, *generated}:
        is_positive = logits[token] > 0
        logits[token] *= params.repetition_penalty ** (-1 if is_positive else 1)
    for token in set(generated):
        logits[token] -= params.frequency_penalty * generated.count(token)
        logits[token] -= params.presence_penalty
    return logits


def uniform(seed, count):
    """Returns the random numbers of a sequence with a `seed`."""
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))
    return np.minimum(generator.random(count, "float32"), np.float32(1 - 2**-23))
