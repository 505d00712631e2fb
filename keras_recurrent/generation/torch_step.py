"""A step of generation on torch, traced once past Keras and then run without it.

What depends on weights alone, such as their casts and HGRN2's lower bounds, is a graph of its own
that runs once a call.
"""

import collections
import threading

import keras
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from keras_recurrent.dispatch import chosen_name

COMPILED_AFTER = 2000  # tokens: torch's compiler takes as long as the traced graph for so many
KEPT = 8  # steps that a model keeps, for as many batch sizes and rooms

_tracing = threading.Lock()


class Steps:
    """The traced steps of a model, by the shapes of the cache and of the weights.

    Args:
        model: the language model.
        compiled: True: torch's compiler is asked for at once; None: once a step has been taken
            `COMPILED_AFTER` times; False: never.
    """

    def __init__(self, model, compiled):
        self._model, self._compiled = model, compiled
        self._steps: collections.OrderedDict = collections.OrderedDict()
        self._lock = threading.Lock()

    def of(self, cache):
        """The `Step` for such a cache."""
        tensors = [*keras.tree.flatten(cache), *_values(self._model)]
        key = chosen_name(), *((t.shape, t.dtype, t.device) for t in tensors)
        with self._lock:
            if key not in self._steps:
                self._steps[key] = Step(self._model, cache, self._compiled)
            self._steps.move_to_end(key)
            while len(self._steps) > KEPT:
                self._steps.popitem(last=False)
            return self._steps[key]


class Network:
    """A function of a token [B, 1] and a cache, for the length of one call of `generate`.

    It returns logits [B, vocabulary], hidden states [B, hidden_dim] and the next cache.
    """

    def __init__(self, steps):
        self._steps, self._of_batch = steps, {}

    def __call__(self, token, cache):
        batch = token.shape[0]
        if batch not in self._of_batch:
            self._of_batch[batch] = self._steps.of(cache).with_weights()
        return self._of_batch[batch](token, cache)


class Step:
    """One token of each row through the network."""

    def __init__(self, model, cache, compiled):
        self._model, self._structure = model, keras.tree.map_structure(lambda t: None, cache)
        self._wanted, self._lock, self.count = compiled, threading.Lock(), 0
        self._compiled = None
        self.not_compiled: str | None = None  # why
        flat = keras.tree.flatten(cache)
        token = torch.ones((flat[0].shape[0], 1), dtype=torch.int32, device=flat[0].device)
        weights = _values(model)
        # Keras and torch both trace by what is global to a thread or to the process.
        with _tracing, torch.no_grad():
            traced = make_fx(self._call)(weights, token, *flat)
        self._prepare, self._traced = _split(traced, len(weights))

    def _call(self, weights, token, *cache):
        mapping = list(zip(self._model.variables, weights, strict=True))
        with keras.StatelessScope(mapping):
            logits, hidden, cache = self._model.call_with_cache(token, self._packed(cache))
        # Contiguous as the cache was: what is compiled takes tensors of these strides alone.
        flat = (t.contiguous() for t in keras.tree.flatten(cache))
        return logits[:, 0].contiguous(), hidden[:, 0].contiguous(), *flat

    def _packed(self, flat):
        return keras.tree.pack_sequence_as(self._structure, list(flat))

    def with_weights(self):
        """A function of a token [B, 1] and a cache, by the weights as they now are.

        It returns logits [B, vocabulary], hidden states [B, hidden_dim] and the next cache.
        """
        prepared = self._prepare(*_values(self._model))
        run = None

        def step(token, cache):
            nonlocal run
            flat = [t.contiguous() for t in keras.tree.flatten(cache)]
            run = run or self._fastest(*prepared, token, *flat)
            self.count += 1
            logits, hidden, *flat = run(*prepared, token, *flat)
            return logits, hidden, self._packed(flat)

        return step

    def _fastest(self, *inputs):
        """The graph as it was traced, or compiled."""
        if self._wanted is False or not (self._wanted or self.count >= COMPILED_AFTER):
            return self._traced
        # Documented: it compiles graphs that Dynamo has not made. It takes seconds to import.
        import torch._inductor as inductor
        from torch._inductor.exc import InvalidCxxCompiler

        if inputs[-1].device.type != "cpu":
            self.not_compiled = "torch's compiler is used on CPUs alone"
            return self._traced
        with self._lock:
            if self._compiled is None and self.not_compiled is None:
                try:
                    with torch.no_grad():
                        self._compiled = inductor.compile(self._traced, list(inputs))
                except InvalidCxxCompiler as error:
                    self.not_compiled = f"torch's compiler found no compiler for C++: {error}"
        return self._compiled or self._traced


def _values(model):
    return [v.value for v in model.variables]


def _split(traced, num_weights):
    """Two graphs, what depends on the first inputs alone, the weights, and all else.

    The first takes the weights; the second what the first returns, then the other inputs.
    """
    nodes = list(traced.graph.nodes)
    inputs = [n for n in nodes if n.op == "placeholder"]
    later = set(inputs[num_weights:])
    for node in nodes:
        if later.intersection(node.all_input_nodes) or node.op == "output":
            later.add(node)
    used = [n for n in nodes if n not in later and later.intersection(n.users)]

    before, after = torch.fx.Graph(), torch.fx.Graph()
    copies: dict = {}
    for node in nodes:
        if node not in later:
            copies[node] = before.node_copy(node, copies.__getitem__)
    before.output([copies[n] for n in used])
    copies = {n: after.placeholder(n.name) for n in used}
    for node in nodes:
        if node in later:
            copies[node] = after.node_copy(node, copies.__getitem__)
    return torch.fx.GraphModule(traced, before), torch.fx.GraphModule(traced, after)
