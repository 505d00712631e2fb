"""KerasHub's samplers on torch, without waiting for the device: the same tokens from the same seed.

Keras on torch reads the state of a sampler's generator at every draw. Here it is read once: each
draw adds 1 to it, so all that follow are known.
"""

import keras
import keras_hub
import torch


def make_choice(sampler):
    """Two functions: `(logits [B, vocabulary], number of the draw) -> tokens [B]`, and one that
    tells the sampler how many draws there were.

    A sampler of a class that is not KerasHub's own chooses by itself, and needs no telling.
    """
    if type(sampler) is keras_hub.samplers.GreedySampler:
        return lambda logits, draw: _probabilities(sampler, logits).argmax(dim=-1), _tell_nothing
    if type(sampler) in _DRAWN:
        return _drawn(sampler)

    def by_itself(logits, draw):
        return sampler.get_next_token(sampler.compute_probabilities(logits))

    return by_itself, _tell_nothing


def _tell_nothing(draws):
    pass


def _probabilities(sampler, logits):
    return torch.softmax(logits.float() / sampler.temperature, dim=-1)


def _drawn(sampler):
    state = sampler.seed_generator.state
    first, counter = keras.ops.convert_to_numpy(state.value).tolist()
    generator = torch.Generator(state.value.device)
    candidates = _DRAWN[type(sampler)]

    def choose(logits, draw):
        probabilities, tokens = candidates(sampler, _probabilities(sampler, logits))
        # As Keras and `torch.multinomial` do, of which the latter waits to see whether all numbers
        # are in order.
        probabilities = torch.softmax(probabilities.log(), dim=-1)
        generator.manual_seed((first + counter + draw) & 0xFFFFFFFF)
        noise = torch.empty_like(probabilities).exponential_(1, generator=generator)
        chosen = (probabilities / noise).argmax(dim=-1, keepdim=True)
        return (chosen if tokens is None else tokens.gather(1, chosen))[:, 0]

    return choose, lambda draws: state.assign([first, counter + draws])


def _all(sampler, probabilities):
    return probabilities, None


def _top_k(sampler, probabilities):
    return torch.topk(probabilities, sampler.k, sorted=False)


def _top_p(sampler, probabilities):
    k = probabilities.shape[1] if sampler.k is None else sampler.k
    best, tokens = torch.topk(probabilities, k, sorted=True)
    dropped = torch.cumsum(best, dim=-1)[:, :-1] > sampler.p  # before a token, p is reached
    return torch.cat((best[:, :1], best[:, 1:].masked_fill(dropped, 0)), dim=1), tokens


_DRAWN = {
    keras_hub.samplers.TopKSampler: _top_k,
    keras_hub.samplers.TopPSampler: _top_p,
    keras_hub.samplers.RandomSampler: _all,
}
