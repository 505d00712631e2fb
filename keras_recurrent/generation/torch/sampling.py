"""The choice of tokens on torch, in buffers that a CUDA graph may own."""

import functools
import threading

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from keras_recurrent import dispatch
from keras_recurrent.generation.sampling import Features, Logprobs, next_tokens

# Number of latest tokens of each sequence that are stored, to be fetched at once; a power of 2.
RECENT = 16

tracing = threading.RLock()  # tracing in Keras and torch uses global state of the process


class TokenSampler:
    """Chooses the next token of each sequence from logits [B, vocabulary].

    Args:
        sampling: the `Sampling` of the call.
        stops: integers [S], the stop tokens, on the device of the model.
        vocabulary_size: integer.

    Attributes:
        settings: properties that captured calls depend on, beyond the shape of the logits.
        buffers: `{name: tensor}`, which calls read and overwrite.
    """

    def __init__(self, sampling, stops, vocabulary_size):
        self._sampling, self._features = sampling, sampling.features
        self.settings = self._features, len(stops)
        self.buffers: dict[str, torch.Tensor] = {}
        self._num_tokens = 0  # number of tokens so far
        if self._features == Features():
            return
        device, features = stops.device, self._features
        arguments = sampling.arguments
        self._arguments = sorted(arguments)
        tensors = {name: torch.as_tensor(arguments[name], device=device) for name in arguments}
        tensors["stops"] = stops[None].clone()
        tensors["index"] = torch.zeros(1, dtype=torch.int64, device=device)
        batch_size = sampling.batch_size
        zeros = functools.partial(torch.zeros, device=device)
        if features.is_random:
            tensors["uniform"] = zeros(batch_size, RECENT)
        if features.has_penalties:
            tensors["counts"] = zeros(batch_size, vocabulary_size, dtype=torch.int32)
        if features.num_logprobs is not None:
            top = batch_size, RECENT, features.num_logprobs
            tensors["chosen"], tensors["top"] = zeros(top[:2]), zeros(top)
            tensors["token_ids"] = zeros(top, dtype=torch.int32)
        self.buffers = tensors

    def copy(self):
        """Returns a sampler with copies of the buffers."""
        copy = TokenSampler.__new__(TokenSampler)
        vars(copy).update(vars(self))
        copy.buffers = {name: tensor.clone() for name, tensor in self.buffers.items()}
        return copy

    def set(self, other):
        """Starts as another sampler of the same settings, with its buffers copied in place."""
        self._sampling, self._num_tokens = other._sampling, other._num_tokens
        for name, buffer in self.buffers.items():
            buffer.copy_(other.buffers[name])

    def prepare(self):
        """Runs on the host before each token: stores the random numbers of the next ones."""
        if "uniform" in self.buffers and self._num_tokens % RECENT == 0:
            self.buffers["uniform"].copy_(torch.as_tensor(self._sampling.uniform(RECENT)))
        self._num_tokens += 1

    def logprobs(self, count):
        """Returns a copy of the `Logprobs` of the latest tokens, or ().

        count: integer, number of tokens, since the last multiple of `RECENT` tokens at most.
        """
        if "chosen" not in self.buffers:
            return ()
        stop = (self._num_tokens - 1) % RECENT + 1
        names = Logprobs._fields
        return Logprobs(*(self.buffers[name][:, stop - count : stop].clone() for name in names))

    def __call__(self, logits):
        """Returns tokens [B]."""
        if not self.buffers:
            return dispatch.run("argmax", {"x": logits})
        buffers, index = self.buffers, self.buffers["index"]
        uniform, count = buffers.get("uniform"), index.to(torch.int32).expand(len(logits))
        if uniform is not None:
            uniform = uniform.index_select(1, index % RECENT)[:, 0]
        arguments = {name: buffers[name] for name in self._arguments}
        inputs = logits, buffers["stops"], count, uniform, buffers.get("counts"), arguments
        token, *new = choose_tokens(self._features, *inputs)
        index.add_(1)
        if "counts" in buffers:
            buffers["counts"].copy_(new.pop(0))
        slot = (index - 1) % RECENT
        for name, value in zip(Logprobs._fields, new, strict=False):
            buffers[name].index_copy_(1, slot, value[:, None])
        return token

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
        is_argmax = self._features == Features()
        write = getattr(dispatch.chosen_module("argmax", {"x": logits}), "write_argmax", None)
        if is_argmax and write is not None:
            write(logits, token, recent)
        return is_argmax and write is not None


def choose_tokens(features, logits, stops, count, uniform, counts, arguments):
    """Runs `next_tokens` as a graph of torch, traced once for each shape, without Keras.

    Args:
        features, logits, stops, count, uniform, counts, arguments: as in `next_tokens`.

    Returns:
        A list: the tokens [B], the new counts unless they are None, and the three tensors of the
        `Logprobs` if there are any.
    """
    inputs = logits, stops, count, uniform, counts, *arguments.values()
    choose = _traced(features, tuple(arguments), *map(_spec, inputs))
    return choose(*(t for t in inputs if t is not None))


def _spec(tensor):
    return None if tensor is None else (tuple(tensor.shape), tensor.dtype, tensor.device)


@functools.lru_cache(maxsize=32)
def _traced(features, names, *specs):
    """Returns the graph of `choose_tokens`.

    Args:
        features: the `Features`.
        names: names of the arguments.
        *specs: shape, dtype and device of the other inputs; None for one that is not used.
    """
    is_used = [spec is not None for spec in specs]

    def choose(*tensors):
        given = iter(tensors)
        inputs: list = [next(given) if used else None for used in is_used]
        arguments = dict(zip(names, inputs[5:], strict=True))
        logits, stops, count, uniform, counts = inputs[:5]
        tensors = logits, stops, count, uniform, counts
        token, counts, logprobs = next_tokens(features, *tensors, arguments)
        return token, *(() if counts is None else (counts,)), *logprobs

    used = filter(None, specs)
    examples = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in used]
    with tracing, torch.no_grad():
        graph = make_fx(choose)(*examples)
    graph.graph.eliminate_dead_code()  # such as the log sum of `top_logits`
    graph.recompile()
    return graph
