"""How a step on torch runs: as a CUDA graph, else compiled, else as it was traced.

Where a user's hooks see the calls of layers, each step runs through these.
"""

import collections
import contextlib
import threading

import keras
import torch

from keras_recurrent.backends.torch._hooks import hook_reason
from keras_recurrent.dispatch import chosen_name
from keras_recurrent.generation.torch.cuda_graph import Captured, Graphs
from keras_recurrent.generation.torch.step import Step
from keras_recurrent.generation.ways import record_mode
from keras_recurrent.layers.decoding import unfused_blocks

KEPT = 8  # traced steps of a model, for as many batch sizes and rooms


class Ways:
    """The traced steps of a model and their graphs, by the shapes of the cache and the weights.

    Args:
        model: the language model.
        compiled: what `model.compile` got as `jit_compile`, None for "auto".
    """

    def __init__(self, model, compiled):
        self._model, self._compiled = model, compiled
        self._steps: collections.OrderedDict = collections.OrderedDict()
        self._graphs, self._lock = Graphs(), threading.Lock()

    @contextlib.contextmanager
    def tokens(self, token, cache, choice, rows=None):
        """A `Walk` from `token` [B, 1] and `cache`, which it may write over.

        Args:
            choice: the `sampling.Choice` of the next tokens.
            rows: the `loop.Rows` that say which rows go on; None: all do.
        """
        step, flat = self._step(cache, rows is not None), _contiguous(cache)
        with self._way(step, token, flat, choice, rows) as (graph, run):
            yield (
                _Replayed(step, graph, choice)
                if graph
                else _Run(step, run, token, flat, choice, rows)
            )

    @contextlib.contextmanager
    def network(self):
        """A function of a token [B, 1] and a cache, for a sampler with a loop of its own.

        It returns logits [B, vocabulary], hidden states [B, hidden_dim] and the next cache.
        """
        of_batch: dict = {}
        with contextlib.ExitStack() as stack:

            def begin(token, cache):
                step, flat = self._step(cache), _contiguous(cache)
                graph, run = stack.enter_context(self._way(step, token, flat))
                return step, graph.copies if graph else run

            def network(token, cache):
                if len(token) not in of_batch:
                    of_batch[len(token)] = begin(token, cache)
                step, run = of_batch[len(token)]
                # The sampler may go on from the same cache again; a step may write over it.
                flat = [t.clone() for t in keras.tree.flatten(cache)]
                logits, hidden, *flat = run(token, flat)
                return logits, hidden, step.packed(flat)

            yield network

    def _step(self, cache, masked=False):
        tensors = [*keras.tree.flatten(cache), *(v.value for v in self._model.variables)]
        seen = hook_reason(_modules(self._model))
        unfused = tuple(unfused_blocks(self._model))
        key = seen, unfused, chosen_name(), masked, *((t.shape, t.dtype, t.device) for t in tensors)
        with self._lock:
            if key not in self._steps:
                self._steps[key] = Step(self._model, cache, self._compiled, masked, seen)
            self._steps.move_to_end(key)
            while len(self._steps) > KEPT:
                _, step = self._steps.popitem(last=False)
                self._graphs.forget(step)
            return self._steps[key]

    @contextlib.contextmanager
    def _way(self, step, token, flat, choice=None, rows=None):
        """A CUDA graph that begins here, for the length of a call, and None; or None and a function
        of a token and a flat cache.

        With KerasHub's samplers a graph makes the next token, too, by numbers that `choice` seeds.
        """
        if choice is not None and not choice.waits_for_nothing:
            choice = None
        prepared, graph, key = step.prepared(), None, None
        refused = self._refused(token.device) or step.not_captured
        if refused is None:
            weights = step.weights()
            # Graphs are forgotten by the step, which comes first.
            key = step, *(t.data_ptr() for t in weights), choice and choice.settings
            key = *key, rows and rows.stops.shape
            graph = self._graphs.take(key)
            try:
                graph = graph or Captured(step.traced, weights, prepared, token, flat, choice, rows)
            except torch.OutOfMemoryError as error:  # there may be room at another call
                refused = f"a graph of its own did not fit into memory: {error}"
            except RuntimeError as error:
                refused = step.not_captured = f"torch could not capture the step: {error}"
        if graph is None:
            mask = (rows.active,) if rows else ()
            yield None, self._without_graph(step, prepared, token, [*mask, *flat], refused)
            return
        record_mode(self._model, "cuda_graph")
        if choice is not None:
            choice.generator = graph.generator
        graph.begin(prepared, token, flat, rows)
        yield graph, None
        self._graphs.give(key, graph)

    def _without_graph(self, step, prepared, token, flat, refused):
        fastest = step.fastest(*prepared, token, *flat)
        slower = step.not_compiled(token.device)
        reasons = {"cuda_graph": refused, "compiled": slower, "traced": step.not_traced}
        way = "eager" if step.not_traced else "traced" if slower else "compiled"
        record_mode(self._model, way, {other: why for other, why in reasons.items() if why})

        def run(token, flat):
            step.count += 1
            return fastest(*prepared, token, *flat)

        return run

    def _refused(self, device):
        if device.type != "cuda":
            return f"the model is on the device {device.type!r}, not on an NVIDIA GPU"
        if self._compiled is False:
            return "`compile` got `jit_compile=False`"
        if torch.cuda.is_current_stream_capturing():
            return "another capture is under way"
        return None


class _Replayed:
    """Tokens by a CUDA graph."""

    def __init__(self, step, graph, choice):
        self._step, self._graph, self._choice = step, graph, choice

    def next_token(self):
        """The next token [B, 1] of each row, which the next call may overwrite."""
        self._graph.replay()
        if not self._graph.chooses:
            self._graph.set_token(self._choice(self._graph.logits))
        return self._graph.token

    def write(self, written, start, stop):
        """The next tokens into the columns from start to stop, at most `RECENT`, of `written`."""
        for t in range(start, stop):
            self._choice.seed(t)
            token = self.next_token()
            if self._graph.recent is None:
                written[:, t : t + 1] = token
        if self._graph.recent is not None:
            written[:, start:stop] = self._graph.recent[:, start - stop :]

    def cache(self):
        """What each row has seen: all but the last token. Nothing overwrites it."""
        return self._step.packed(t.clone() for t in self._graph.cache)


class _Run:
    """Tokens by a function of a token and the tensors of a cache."""

    def __init__(self, step, run, token, flat, choice, rows):
        self._step, self._run, self._choice = step, run, choice
        self._token, self._flat, self._rows = token, flat, rows

    def next_token(self):
        """The next token [B, 1] of each row."""
        mask = (self._rows.active,) if self._rows else ()
        logits, _, *self._flat = self._run(self._token, [*mask, *self._flat])
        chosen = self._choice(logits).to(self._token.dtype)[:, None]
        self._token = self._rows.advance(self._token, chosen) if self._rows else chosen
        return self._token

    def write(self, written, start, stop):
        """The next tokens into the columns from start to stop of `written`."""
        for t in range(start, stop):
            self._choice.seed(t)
            written[:, t : t + 1] = self.next_token()

    def cache(self):
        """What each row has seen: all but the last token. Nothing overwrites it."""
        return self._step.packed(t.clone() for t in self._flat)


def _modules(model):
    """The modules of torch in a model, its layers and what is in these, each once."""
    found, waiting = {None}, list(model._flatten_layers())
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting.extend(module._modules.values())
            yield module


def _contiguous(cache):
    return [t.contiguous() for t in keras.tree.flatten(cache)]
