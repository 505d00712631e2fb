"""Runs decoding steps on torch: as a CUDA graph, else compiled, else as traced.

If a module has a hook, or with `run_eagerly=True`, each step runs eagerly through the layers, which
call the hook.
"""

import collections
import contextlib
import threading
from typing import Any

import keras
import torch

from keras_recurrent.backends.constants import MIN_DELAYED_ROWS
from keras_recurrent.backends.torch._hooks import hook_reason
from keras_recurrent.dispatch import chosen_name
from keras_recurrent.generation.modes import RUN_EAGERLY, record_mode
from keras_recurrent.generation.torch.chunks import Chunks
from keras_recurrent.generation.torch.cuda_graph import CapturedStep, GraphPool
from keras_recurrent.generation.torch.rows import Rows
from keras_recurrent.generation.torch.step import Chunk, Step
from keras_recurrent.layers.decoding import unfused_blocks

# Traced steps of a model, one for each batch size and capacity of its cache, and chunks.
MAX_STEPS = 16


class Runner:
    """Traced steps and CUDA graphs of a model, by the shapes of its cache and weights.

    Args:
        model: the language model.
    """

    def __init__(self, model):
        self._model, self._compiled = model, model._compiles_generation
        self._eager_reason = RUN_EAGERLY if model.run_eagerly else None
        self._steps: collections.OrderedDict = collections.OrderedDict()
        self._graphs, self._lock = GraphPool(), threading.Lock()

    @contextlib.contextmanager
    def decode(self, token, cache, sampler, sequences=None):
        """Context manager that yields a decoder, a `_GraphDecoder` or `_FunctionDecoder`.

        Args:
            token: integers [B, 1], the last token of each sequence.
            cache: the cache before it, which may be overwritten.
            sampler: the `sampling.TokenSampler`.
            sequences: the `loop.ActiveSequences`. None: the state of all sequences is updated.
        """
        delays_writes = len(token) >= MIN_DELAYED_ROWS and self._graph_reason(token.device) is None
        step = self._step(cache, sequences is not None, delays_writes=delays_writes)
        flat = step.flatten_cache(cache)
        with self._fastest(step, token, flat, sampler, sequences) as (graph, run):
            if graph:
                del cache, flat  # the graph has copies
                yield _GraphDecoder(step, graph)
            else:
                yield _FunctionDecoder(step, run, token, flat, sampler, sequences)

    @contextlib.contextmanager
    def step_function(self):
        """Context manager that yields the step of `beam_search.search`.

        The shapes of its first call are those of all calls. A call may overwrite its cache.
        """
        step: Any = None
        run: Any = None
        with contextlib.ExitStack() as stack:

            def step_function(token, mask, cache):
                nonlocal step, run
                if step is None:
                    step = self._step(cache)
                    fastest = self._fastest(step, token, step.flatten_cache(cache))
                    graph, run = stack.enter_context(fastest)
                    run = graph.run if graph else run
                logits, *flat = run(token, step.flatten_cache(cache))
                return logits, step.cache(flat)

            yield step_function

    def chunks(self, cache, num_prompts):
        """Returns a `Chunks` of at most `num_prompts` prompts, from an initial cache of one."""
        reason = self._graph_reason(cache["segment"].device)
        return Chunks(self._model, self._step, reason, num_prompts, cache)

    def _step(self, cache, masked=False, chunk=None, delays_writes=False):
        """Returns the `Step` for a cache, or for a number of tokens the `Chunk`."""
        tensors = [*keras.tree.flatten(cache), *(v.value for v in self._model.variables)]
        eager_reason = self._eager_reason or hook_reason(_modules(self._model))
        delays_writes = delays_writes and not eager_reason
        unfused = tuple(unfused_blocks(self._model))
        signature = ((t.shape, t.dtype, t.device) for t in tensors)
        key = eager_reason, unfused, chosen_name(), masked, chunk, delays_writes, *signature
        with self._lock:
            if key not in self._steps:
                options = masked, eager_reason, delays_writes
                self._steps[key] = (
                    Chunk(self._model, cache, chunk, eager_reason)
                    if chunk
                    else Step(self._model, cache, self._compiled, *options)
                )
            self._steps.move_to_end(key)
            while len(self._steps) > MAX_STEPS:
                _, step = self._steps.popitem(last=False)
                self._graphs.drop(step)
            return self._steps[key]

    @contextlib.contextmanager
    def _fastest(self, step, token, flat, sampler=None, sequences=None):
        """Context manager that yields `(graph, None)` or `(None, function)`.

        The graph is a `CapturedStep` that starts from `token` and `flat`, reserved for one call;
        the function takes a token and a flat cache. The graph also samples the next token if there
        is a sampler.
        """
        prepared, graph, key = step.prepared(), None, None
        reason = self._graph_reason(token.device) or step.not_captured_reason
        if reason is None:
            weights = step.weights()
            # The step comes first, since `GraphPool.drop` compares it.
            key = step, *(t.data_ptr() for t in weights), sampler and sampler.settings
            key = *key, sequences and sequences.stops.shape
            graph = self._graphs.acquire(key)
            inputs = token, flat, sampler, sequences
            try:
                graph = graph or CapturedStep(step.traced, weights, prepared, *inputs)
            except torch.OutOfMemoryError as error:  # memory may suffice in a later call
                reason = f"another CUDA graph did not fit into memory: {error}"
            except RuntimeError as error:
                reason = step.not_captured_reason = f"torch could not capture the step: {error}"
        if graph is None:
            mask = (sequences.active,) if sequences else ()
            yield None, self._function(step, prepared, token, [*mask, *flat], reason)
            return
        record_mode(self._model, "cuda_graph")
        graph.begin(prepared, token, flat, sampler, sequences)
        del prepared, flat, inputs  # the graph has copies
        yield graph, None
        self._graphs.release(key, graph)

    def _function(self, step, prepared, token, flat, graph_reason):
        fastest = step.fastest_function(*prepared, token, *flat)
        compiler_reason = step.not_compiled_reason(token.device)
        reasons = {
            "cuda_graph": graph_reason,
            "compiled": compiler_reason,
            "traced": step.not_traced_reason,
        }
        if step.not_traced_reason:
            mode = "eager"
        else:
            mode = "traced" if compiler_reason else "compiled"
        record_mode(self._model, mode, {name: reason for name, reason in reasons.items() if reason})

        def run(token, flat):
            step.count += 1
            return fastest(*prepared, token, *flat)

        return run

    def _graph_reason(self, device):
        """Reason no CUDA graph can be captured, or None."""
        if device.type != "cuda":
            return f"the model must be on an NVIDIA GPU; it is on {device.type!r}"
        if self._compiled is False:
            return "`compile` got `jit_compile=False`"
        if torch.cuda.is_current_stream_capturing():
            return "another capture is in progress"
        return None


class _GraphDecoder:
    """Decodes by replaying a CUDA graph."""

    def __init__(self, step, graph):
        self.step, self._graph = step, graph
        self.sampler, self.sequences = graph.sampler, graph.sequences
        self._rows = Rows(graph.cache, graph.stacks)

    @property
    def token(self):
        """The token [B, 1] that the next step reads."""
        return self._graph.token

    def rows(self):
        """Returns the `Rows` of the cache."""
        return self._rows

    def next_token(self):
        """Returns the next tokens [B, 1], which the next call may overwrite."""
        self.sampler.prepare()
        self._graph.replay()
        return self._graph.token

    def generate(self, generated, start, stop):
        """Stores the next tokens in columns start to stop of `generated`, at most `RECENT`."""
        for t in range(start, stop):
            token = self.next_token()
            if self._graph.recent is None:
                generated[:, t : t + 1] = token
        if self._graph.recent is not None:
            generated[:, start:stop] = self._graph.recent[:, start - stop :]

    def cache(self):
        """Returns a copy of the cache after all tokens but the last."""
        return self.step.cache(t.clone() for t in self._graph.cache)


class _FunctionDecoder:
    """Decodes by calling a function of a token and the tensors of a cache."""

    def __init__(self, step, run, token, flat, sampler, sequences):
        self.step, self._run, self.sampler = step, run, sampler
        self._token, self._flat, self.sequences = token, flat, sequences

    @property
    def token(self):
        """The token [B, 1] that the next step reads."""
        return self._token

    def rows(self):
        """Returns the `Rows` of the cache, until the next step."""
        return Rows(self._flat)

    def next_token(self):
        """Returns the next tokens [B, 1]."""
        self.sampler.prepare()
        mask = (self.sequences.active,) if self.sequences else ()
        logits, *self._flat = self._run(self._token, [*mask, *self._flat])
        sampled = self.sampler(logits).to(self._token.dtype)[:, None]
        if self.sequences:
            sampled = self.sequences.advance(self._token, sampled)
        self._token = sampled
        return self._token

    def generate(self, generated, start, stop):
        """Stores the next tokens in columns start to stop of `generated`."""
        for t in range(start, stop):
            generated[:, t : t + 1] = self.next_token()

    def cache(self):
        """Returns a copy of the cache after all tokens but the last."""
        return self.step.cache(t.clone() for t in self._flat)


def _modules(model):
    """Yields the torch modules of a model once each: its layers and their submodules."""
    visited, pending = {None}, list(model._flatten_layers())
    while pending:
        module = pending.pop()
        if module not in visited:
            visited.add(module)
            pending.extend(module._modules.values())
            yield module
