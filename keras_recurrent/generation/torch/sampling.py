"""KerasHub's samplers on torch, without waiting for the device: the same tokens from the same seed.

Keras on torch reads the state of a sampler's generator at every draw. Here it is read once: each
draw adds 1 to it, so all that follow are known.
"""

import threading

import keras
import keras_hub
import torch

from keras_recurrent import dispatch
from keras_recurrent.generation.samplers import is_greedy

# Between reading the state of a sampler's generator and assigning the next one.
_ONE_AT_A_TIME = threading.Lock()


class Choice:
    """The next token of each row, from logits [B, vocabulary], for a sampler.

    `begin` takes the numbers of as many draws as there may be out of the sampler's generator, so
    that other threads get others. `seed` comes before each draw, with its number from 0 on. `end`
    tells how many draws there were.

    Attributes:
        waits_for_nothing: whether a call can be part of a CUDA graph. A sampler of a class that is
            not KerasHub's own chooses by itself, and needs nothing of this.
        generator: of random numbers; None: there are none.
        settings: what the calls depend on beside logits and seed.
    """

    def __init__(self, sampler):
        self._sampler, self._candidates = sampler, _DRAWN.get(type(sampler))
        own = self._candidates is not None or is_greedy(sampler)
        self.waits_for_nothing = own
        self.settings = (type(sampler), str(sampler.get_config())) if own else None
        self.generator = None
        if self._candidates:
            self._state = sampler.seed_generator.state
            self.generator = torch.Generator(self._state.value.device)

    def begin(self, draws):
        """Goes on from where the sampler's generator is now, with room for as many draws."""
        if self.generator is not None:
            with _ONE_AT_A_TIME:
                self._first, self._counter = self._state_now()
                self._end = self._counter + draws
                self._state.assign([self._first, self._end])

    def seed(self, draw):
        if self.generator is not None:
            self.generator.manual_seed((self._first + self._counter + draw) & 0xFFFFFFFF)

    def end(self, draws):
        """Gives back what was not drawn, unless others have drawn since."""
        if self.generator is not None:
            with _ONE_AT_A_TIME:
                if self._state_now() == [self._first, self._end]:
                    self._state.assign([self._first, self._counter + draws])

    def _state_now(self):
        return keras.ops.convert_to_numpy(self._state.value).tolist()

    def __call__(self, logits):
        """Tokens [B]."""
        sampler = self._sampler
        if not self.waits_for_nothing:
            return sampler.get_next_token(sampler.compute_probabilities(logits))
        if self._candidates is None:
            return dispatch.run("argmax", {"x": logits})
        probabilities = torch.softmax(logits.float() / sampler.temperature, dim=-1)
        probabilities, tokens = self._candidates(sampler, probabilities)
        # As Keras and `torch.multinomial` do, of which the latter waits to see whether all numbers
        # are in order.
        probabilities = torch.softmax(probabilities.log(), dim=-1)
        noise = torch.empty_like(probabilities).exponential_(1, generator=self.generator)
        chosen = (probabilities / noise).argmax(dim=-1, keepdim=True)
        return (chosen if tokens is None else tokens.gather(1, chosen))[:, 0]

    def writes(self, logits, token, recent):
        """Whether a kernel has written tokens over `token` [B, 1] and to the end of `recent`.

        The latter is [B, a power of 2]; the first one of each row is dropped.
        """
        greedy = self.waits_for_nothing and self._candidates is None
        write = getattr(dispatch.chosen_module("argmax", {"x": logits}), "write_argmax", None)
        if greedy and write is not None:
            write(logits, token, recent)
        return greedy and write is not None


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
