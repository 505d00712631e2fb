"""KerasHub's samplers on torch, without waiting for the device.

They sample the same tokens as KerasHub from the same seed. Keras on torch copies the state of a
sampler's generator from the device at every draw. Here it is copied once: each draw adds 1 to it,
so all later states are known.
"""

import threading

import keras
import keras_hub
import torch

from keras_recurrent import dispatch
from keras_recurrent.generation.samplers import is_greedy, sampler_settings

# Held from reading the state of a sampler's generator to assigning the next one.
_state_lock = threading.Lock()


class TokenSampler:
    """Samples the next token of each sequence from logits [B, vocabulary].

    `begin` reserves random numbers of the sampler's generator for a maximum number of draws, so
    that other threads draw different ones. `seed` precedes each draw, with its index from 0. `end`
    releases the random numbers that were not used.

    Args:
        sampler: a sampler of KerasHub, or of another class, which is called as it is: `begin`,
            `seed` and `end` have no effect.

    Attributes:
        is_capturable: boolean, True if a call can be captured in a CUDA graph, as with KerasHub's
            samplers that only sample from probabilities.
        generator: the random number generator. None: calls are deterministic or not capturable.
        settings: properties of the sampler that captured calls depend on.
    """

    def __init__(self, sampler):
        self._sampler, self.settings = sampler, sampler_settings(sampler)
        self._candidates = _CANDIDATES.get(type(sampler)) if self.settings else None
        is_argmax = self.settings is not None and is_greedy(sampler)
        self.is_capturable = self._candidates is not None or is_argmax
        self.generator = None
        if self._candidates:
            self._state = sampler.seed_generator.state
            self.renew_generator()

    def renew_generator(self):
        """Replaces the generator: after a failed capture, torch refuses to draw from it."""
        if self._candidates:
            self.generator = torch.Generator(self._state.value.device)

    def begin(self, draws):
        """Reserves random numbers for at most `draws` draws."""
        if self.generator is not None:
            with _state_lock:
                self._base_seed, self._counter = self._read_state()
                self._end = self._counter + draws
                self._state.assign([self._base_seed, self._end])

    def seed(self, draw):
        """Seeds the generator for the draw of this index."""
        if self.generator is not None:
            self.generator.manual_seed((self._base_seed + self._counter + draw) & 0xFFFFFFFF)

    def end(self, draws):
        """Releases the unused random numbers, unless the generator was used since `begin`.

        draws: the number of draws that were made.
        """
        if self.generator is not None:
            with _state_lock:
                if self._read_state() == [self._base_seed, self._end]:
                    self._state.assign([self._base_seed, self._counter + draws])

    def _read_state(self):
        return keras.ops.convert_to_numpy(self._state.value).tolist()

    def __call__(self, logits):
        """Returns tokens [B]."""
        sampler = self._sampler
        if not self.is_capturable:
            return sampler.get_next_token(sampler.compute_probabilities(logits))
        if self._candidates is None:
            return dispatch.run("argmax", {"x": logits})
        probabilities = torch.softmax(logits.float() / sampler.temperature, dim=-1)
        probabilities, tokens = self._candidates(sampler, probabilities)
        # As Keras and `torch.multinomial`, which waits for the device to validate probabilities.
        probabilities = torch.softmax(probabilities.log(), dim=-1)
        noise = torch.empty_like(probabilities).exponential_(1, generator=self.generator)
        sampled = (probabilities / noise).argmax(dim=-1, keepdim=True)
        return (sampled if tokens is None else tokens.gather(1, sampled))[:, 0]

    def store_argmax(self, logits, token, recent):
        """Stores greedy tokens with one kernel, if there is one for this sampler and device.

        Args:
            logits: [B, vocabulary].
            token: integers [B, 1], overwritten with the new tokens.
            recent: integers [B, R] with R a power of 2. Each row drops its first token and appends
                the new one.

        Returns:
            True if the tokens were stored.
        """
        is_argmax = self.is_capturable and self._candidates is None
        write = getattr(dispatch.chosen_module("argmax", {"x": logits}), "write_argmax", None)
        if is_argmax and write is not None:
            write(logits, token, recent)
        return is_argmax and write is not None


def _all_tokens(sampler, probabilities):
    return probabilities, None


def _top_k(sampler, probabilities):
    return torch.topk(probabilities, sampler.k, sorted=False)


def _top_p(sampler, probabilities):
    k = probabilities.shape[1] if sampler.k is None else sampler.k
    best, tokens = torch.topk(probabilities, k, sorted=True)
    dropped = torch.cumsum(best, dim=-1)[:, :-1] > sampler.p  # p is reached before the token
    return torch.cat((best[:, :1], best[:, 1:].masked_fill(dropped, 0)), dim=1), tokens


# {class of sampler: function of the sampler and probabilities [B, vocabulary] that returns the
# probabilities of the candidates [B, K] and their tokens, None for all tokens in order}
_CANDIDATES = {
    keras_hub.samplers.TopKSampler: _top_k,
    keras_hub.samplers.TopPSampler: _top_p,
    keras_hub.samplers.RandomSampler: _all_tokens,
}
