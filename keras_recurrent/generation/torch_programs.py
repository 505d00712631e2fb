"""Prompt processing and decoding steps of a language model on torch.

A step is traced once and then runs without Keras, as a CUDA graph if possible, else compiled, else
as traced. Computations that depend only on weights, such as casts and the lower bounds of HGRN2,
are a separate graph that runs once per call. With `run_eagerly=True`, or if a module has a hook,
steps run eagerly through the layers, which call the hook. In a traced step, Python's part of a hook
would run during tracing alone.
"""

import collections
import contextlib
import math
import threading
from typing import Any

import keras
import optree
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from keras_recurrent.backends.constants import MIN_DELAYED_ROWS
from keras_recurrent.backends.torch._states import inplace_states
from keras_recurrent.dispatch import chosen_name, compile_ahead
from keras_recurrent.generation import beam_search
from keras_recurrent.generation.modes import RUN_EAGERLY, GenerationMode
from keras_recurrent.generation.prompts import max_chunk_length, max_sequences
from keras_recurrent.generation.torch_batch import (
    Decoder,
    TorchBatch,
    copy_all,
    group_equal,
    tracing,
)
from keras_recurrent.generation.torch_graphs import CapturedDecoder, Chunks, DecoderPool
from keras_recurrent.layers.decoding import decoding_scope
from keras_recurrent.layers.recent_tokens import apply_recent_tokens
from keras_recurrent.layers.torch_calls import hook_reason, modules_of
from keras_recurrent.progress import announce

# Traced steps of a model, one for each batch size and capacity of its cache, and chunks.
MAX_STEPS = 16
MAX_STORED_GROWTH = 2**20  # bytes of a stored result that is larger than the weights it depends on
COMPILED_AFTER = 2000  # tokens; the traced graph takes as long for these as torch's compiler


class Programs:
    """Traced steps and CUDA graphs of a model, by the shapes of its cache and weights.

    Attributes:
        mode: the `GenerationMode` of the last call, or None.
    """

    mode: Any = None

    def __init__(self, model):
        self.model, self._compiled = model, model._compiles_generation
        self._eager_reason = RUN_EAGERLY if model.run_eagerly else None
        self._steps: collections.OrderedDict = collections.OrderedDict()
        self._pool, self._lock = DecoderPool(), threading.Lock()
        self._has_kernels = False  # True after the kernels of a prompt were compiled

    @torch.no_grad()
    def prefill(self, token_ids, lengths, cache=None, max_length=None, batch=None):
        """Returns the cache after the first `lengths` tokens of each sequence, in new tensors.

        If many sequences are processed in groups and there is a `batch`, the cache of each group is
        written to it, and the result is None.

        Args:
            token_ids: integers `[B, T]`, a NumPy array.
            lengths: integers `[B]`, a NumPy array.
            cache: the cache before these tokens. None: the first chunk starts without a state, as a
                forward pass; attention computes it faster than a chunk after an empty cache.
            max_length: integer or None, the `max_length` of a new cache.
            batch: the `Batch` that continues from the cache, or None. The kernels of its first
                step are compiled together with those of the first prompt.
        """
        count, size, whole = len(lengths), max_sequences(lengths.max()), None
        if size >= count:
            return self._process(token_ids, lengths, cache, max_length, batch)

        def write(rows, state):
            nonlocal whole
            if whole is None:
                whole = keras.tree.map_structure(lambda t: t.new_empty(count, *t.shape[1:]), state)
            copy_all([t[rows] for t in optree.tree_leaves(whole)], optree.tree_leaves(state))

        # Processes groups of sequences, so that only the states of one group exist twice.
        write = write if batch is None else batch.write
        for start in range(0, count, size):
            rows = slice(start, start + size)
            before = cache and keras.tree.map_structure(lambda t, rows=rows: t[rows], cache)
            inputs = token_ids[rows], lengths[rows], before, max_length
            write(rows, self._process(*inputs, batch))
        return whole

    def _process(self, token_ids, lengths, cache, max_length, batch):
        """As `prefill`, but processes all sequences together."""
        given = cache

        def process(tokens, mask):
            options = {"return_cache": True, "max_length": max_length}
            return self.model.backbone.hidden_states(tokens, mask, cache=cache, **options)[1]

        for chunk in self._chunks(token_ids, lengths):
            if not self._has_kernels:
                with compile_ahead() as compiles_only:
                    if compiles_only:
                        after = process(*chunk)
                        if batch is not None:
                            batch.prepare_first_step(after)
                self._has_kernels = True
            cache = process(*chunk)
        if cache is None:
            return self.model.backbone.get_initial_state(len(lengths), max_length=max_length)
        if given is None:
            return cache
        addresses = {t.data_ptr() for t in keras.tree.flatten(given)}
        return keras.tree.map_structure(
            lambda t: t.clone() if t.data_ptr() in addresses else t, cache
        )

    def _chunks(self, token_ids, lengths):
        """Yields the tokens and mask of each chunk of the first `lengths` tokens."""
        token_ids = keras.ops.convert_to_tensor(token_ids)
        ends = torch.as_tensor(lengths, device=token_ids.device)[:, None]
        size = max_chunk_length(len(lengths))
        for start in range(0, int(lengths.max()), size):
            stop = min(start + size, int(lengths.max()))
            mask = None
            if stop > lengths.min():
                mask = torch.arange(start, stop, device=token_ids.device) < ends
            yield token_ids[:, start:stop], mask

    @torch.no_grad()
    def score(self, token_ids, targets, mask, cache, num_top=None):
        """Returns the results of the model's `_score_tokens`, with NumPy arrays of scores."""
        arrays = map(keras.ops.convert_to_tensor, (token_ids, targets, mask))
        *scores, cache = self.model._score_tokens(*arrays, cache, num_top)
        return *(array.cpu().numpy() for array in scores), cache

    @torch.no_grad()
    def search(self, cache, inputs, num_beams):
        """Returns the `Hypotheses` of beam search, NumPy arrays.

        inputs: NumPy arrays, the arguments of `beam_search.search` from `token` on.
        """
        size, decoder = int(inputs[1].max()), None
        inputs = [*map(keras.ops.convert_to_tensor, inputs), num_beams, size]

        def step(token, mask, cache):
            nonlocal decoder
            if decoder is None:
                decoder = self.decoder(cache, {"token": token}, None)
            logits, cache = decoder.logits_of(token, decoder.step.flatten_cache(cache))
            return logits, decoder.step.cache(cache)

        found = beam_search.search(step, cache, *inputs)
        self.release(decoder)
        return keras.tree.map_structure(keras.ops.convert_to_numpy, found)

    def chunks(self, cache, num_prompts):
        """Returns `Chunks` of `num_prompts` prompts, from an initial cache; None without graphs."""
        if self._graph_reason(cache["segment"].device) is not None:
            return None
        return Chunks(self, num_prompts, cache)

    def decoder(self, cache, tensors, features, tokens_per_step=1, masked=False):
        """Returns a decoder for one call, which first fills the cache by `Decoder.write`.

        The call uses the decoder until `release`.

        Args:
            cache: a cache of one or more sequences, whose number may differ from the decoder's.
            tensors, tokens_per_step: as in `Decoder`.
            features: the `Features` of the first steps. None: the decoder only computes logits.
            masked: boolean, True if the cache of a sequence is unchanged after its end.
        """
        device = tensors["token"].device
        reason = self._graph_reason(device)
        size = len(tensors["token"])
        step = self.decoding_step(cache, size, masked, is_sampled=features is not None)
        prepared = step.prepared()
        reason, weights = reason or step.not_captured_reason, step.weights()
        if reason is None:
            key = step, *[t.data_ptr() for t in weights], tokens_per_step, features is None
            decoder = self._pool.acquire(key, step.cache_bytes, device)
            try:
                if decoder is None:
                    inputs = weights, prepared, tensors, tokens_per_step, key
                    decoder = CapturedDecoder(step, *inputs)
                    decoder.capture(features)
            except torch.OutOfMemoryError as error:  # memory may suffice in a later call
                reason = f"another CUDA graph did not fit into memory: {error}"
            except RuntimeError as error:
                reason = step.not_captured_reason = f"torch could not capture the step: {error}"
            else:
                self.mode = GenerationMode("cuda_graph", {}, step.unfused)
                decoder.begin(prepared, tensors, features)
                return decoder
        run = step.fastest_function(prepared, device)
        self._record_mode(step, device, reason)
        return Decoder(step, run, prepared, tensors, tokens_per_step)

    def batch(self, num_slots, keep, reads_tokens=False):
        """Returns a batch; arguments as in `Batch`."""
        return TorchBatch(self, num_slots, keep, reads_tokens)

    def release(self, decoder):
        """Makes a decoder available to other calls, at the end of a call without an error."""
        if isinstance(decoder, CapturedDecoder):
            self._pool.release(decoder)

    def decoding_step(self, cache, batch_size, masked, is_sampled=True):
        """Returns the `Step` of a decoder; is_sampled: False if `decoder` gets no `features`."""
        delays_writes = is_sampled and self._graph_reason(cache["segment"].device) is None
        delays_writes = delays_writes and batch_size >= MIN_DELAYED_ROWS
        return self.step(cache, batch_size, masked, delays_writes=delays_writes)

    def step(self, cache, batch_size, masked=False, chunk=None, delays_writes=False):
        """Returns the `Step` for a cache, or the `Chunk` if `chunk` is its number of tokens."""
        weights = [v.value for v in self.model.variables]
        eager_reason = self._eager_reason or hook_reason(modules_of(self.model))
        delays_writes = delays_writes and not eager_reason
        unfused = self.model.backbone.unfused_blocks()
        signature = [(t.shape[1:], t.dtype, t.device) for t in keras.tree.flatten(cache)]
        signature += [(t.shape, t.dtype, t.device) for t in weights]
        options = batch_size, masked, chunk, delays_writes
        key = eager_reason, tuple(unfused), chosen_name(), *options, *signature
        with self._lock:
            if key not in self._steps:
                inputs = self.model, cache, batch_size
                self._steps[key] = (
                    Chunk(*inputs, chunk, eager_reason)
                    if chunk
                    else Step(*inputs, self._compiled, masked, eager_reason, delays_writes)
                )
            self._steps.move_to_end(key)
            while len(self._steps) > MAX_STEPS:
                _, step = self._steps.popitem(last=False)
                self._pool.drop(step)
            self._steps[key].unfused = unfused
            return self._steps[key]

    def _record_mode(self, step, device, graph_reason):
        reasons = {
            "cuda_graph": graph_reason,
            "compiled": step.not_compiled_reason(device),
            "traced": step.not_traced_reason,
        }
        refused = {name: reason for name, reason in reasons.items() if reason}
        fastest = next(name for name in (*reasons, "eager") if name not in refused)
        self.mode = GenerationMode(fastest, refused, step.unfused)

    def _graph_reason(self, device):
        """Reason no CUDA graph can be captured, or None."""
        if device.type != "cuda":
            return f"the model must be on an NVIDIA GPU; it is on {device.type!r}"
        if self._compiled is False:
            return "`compile` got `jit_compile=False`"
        if torch.cuda.is_current_stream_capturing():
            return "another capture is in progress"
        return None


class Step:
    """Decoding step of one token of each sequence.

    Args:
        cache: a cache, whose tensors have the shapes of all later calls except for the first axis.
        compiled: True compiles with torch's compiler at the first token, None after
            `COMPILED_AFTER` tokens, False never.
        masked: boolean, True if the step takes a mask, boolean [B, 1], between token and cache. The
            cache of a sequence is unchanged where it is False.
        not_traced_reason: reason to run each step through the layers, or None.
        delays_writes: boolean, True if fused steps write large states only every few tokens. The
            step then takes a cache with recent tokens: see `flatten_cache` and `cache`.

    Attributes:
        cache_shapes: a list of the `(shape, dtype)` of the tensors of the step's cache.
        groups: the result of `group_equal` for the tensors of the step's cache. Groups of recent
            tokens follow the groups of the given cache.
        unfused: the `unfused_blocks` of the backbone at the latest use.
    """

    unfused: dict
    _num_tokens = 1

    def __init__(
        self,
        model,
        cache,
        batch_size,
        compiled,
        masked,
        not_traced_reason=None,
        delays_writes=False,
    ):
        backbone = model.backbone
        self.vocabulary_size = backbone.vocabulary_size
        self._delays_writes = delays_writes and backbone.takes_fused_steps(batch_size)
        cache = make_example(cache, batch_size)
        first = optree.tree_leaves(cache)
        if self._delays_writes:
            cache = backbone.add_recent_tokens(cache)
        flat, self._structure = optree.tree_flatten(cache)
        self.groups = group_equal(flat, first)
        self._model, self.cache_shapes = model, [(t.shape, t.dtype) for t in flat]
        self._use_compiler, self._lock, self.count = compiled, threading.Lock(), 0
        self.masked = masked
        self.not_traced_reason = not_traced_reason
        self._compiled = None
        self._no_compiler_reason: str | None = None
        self.not_captured_reason: str | None = not_traced_reason
        if not_traced_reason:
            self._prepare, self.traced = (lambda *weights: weights), self._run_layers
            return
        weights, inputs = self.weights(), self._example_inputs(flat)
        with tracing, torch.no_grad(), compile_ahead():
            table = _SINGLE_BFLOAT16_ROW if flat[0].device.type == "cpu" else None
            traced = make_fx(self._call, table)(weights, *inputs)
        self._prepare, self.traced = _split(_inline_scalars(traced), len(weights))

    def weights(self):
        return [v.value for v in self._model.variables]

    def prepared(self):
        """Returns the tensors that depend only on weights, for the current weights."""
        return self._prepare(*self.weights())

    def _call(self, weights, token, *cache):
        mapping = list(zip(self._model.variables, weights, strict=True))
        mask, cache = (cache[0], cache[1:]) if self.masked else (None, cache)
        fused = contextlib.nullcontext() if self.not_traced_reason else decoding_scope()
        with keras.StatelessScope(mapping), fused, inplace_states():
            logits, _, after = self._model.call_with_cache(
                token, self._pack(cache), padding_mask=mask
            )
        # Contiguous like the given cache: a compiled step only takes tensors of these strides.
        flat = (t.contiguous() for t in optree.tree_leaves(after))
        return logits[:, 0].contiguous(), *flat

    def _run_layers(self, *inputs):
        count = len(self._model.variables)
        return self._call(inputs[:count], *inputs[count:])

    def flatten_cache(self, cache):
        """Returns the contiguous tensors of a cache, as the step takes them."""
        if self._delays_writes:
            cache = self._model.backbone.add_recent_tokens(cache)
        return [t.contiguous() for t in optree.tree_leaves(cache)]

    def cache(self, flat):
        """Returns the cache of tensors that the step takes or returns."""
        return apply_recent_tokens(self._pack(flat), torch.cat)

    @property
    def cache_bytes(self):
        return sum(size.numel() * dtype.itemsize for size, dtype in self.cache_shapes)

    def allocate_cache(self, device):
        """Returns tensors of zeros for the step's cache."""
        return [torch.zeros(size, dtype=dtype, device=device) for size, dtype in self.cache_shapes]

    def _example_inputs(self, cache):
        """Returns valid inputs of a step after the weights, from the tensors of its cache."""
        size = len(cache[0]), self._num_tokens
        token = torch.ones(size, dtype=torch.int32, device=cache[0].device)
        mask = (torch.ones_like(token, dtype=torch.bool),) if self.masked else ()
        return token, *mask, *cache

    def _pack(self, flat):
        return optree.tree_unflatten(self._structure, flat)

    def not_compiled_reason(self, device):
        """Reason the next token does not run in a compiled step, or None."""
        if device.type != "cpu":
            return "torch's compiler is only used on CPUs"
        if self.not_traced_reason:
            return self.not_traced_reason
        if self._use_compiler is False:
            return "`compile` got `jit_compile=False`"
        if not self._use_compiler and self.count < COMPILED_AFTER:
            return (
                f"compiled after {COMPILED_AFTER} tokens; `compile(jit_compile=True)` compiles at "
                "the first"
            )
        return self._no_compiler_reason

    def fastest_function(self, prepared, device):
        """Returns the compiled step, or the traced step if it cannot or need not be compiled."""
        if self.not_compiled_reason(device):
            return self.traced
        # Inductor's documented entry for graphs not made by Dynamo. The import takes seconds.
        import torch._inductor as inductor
        from torch._inductor.exc import InvalidCxxCompiler

        with self._lock:
            if self._compiled is None and self._no_compiler_reason is None:
                announce("Compiling generation, once for a batch size and a range of lengths")
                inputs = *prepared, *self._example_inputs(self.allocate_cache(device))
                try:
                    with tracing, torch.no_grad():
                        graph = make_fx(self.traced, _SINGLE_ROW)(*inputs)
                        self._compiled = inductor.compile(graph, list(inputs))
                except InvalidCxxCompiler as error:
                    self._no_compiler_reason = f"torch found no C++ compiler: {error}"
        return self._compiled or self.traced


class Chunk(Step):
    """Function of tokens `[B, T]`, their mask and a cache, which returns the next cache."""

    def __init__(self, model, cache, batch_size, num_tokens, not_traced_reason=None):
        self._num_tokens = num_tokens
        super().__init__(model, cache, batch_size, False, True, not_traced_reason)

    def _call(self, weights, tokens, mask, *cache):
        mapping = list(zip(self._model.variables, weights, strict=True))
        with keras.StatelessScope(mapping):
            _, after = self._model.backbone.hidden_states(tokens, mask, cache=self._pack(cache))
        return tuple(t.contiguous() for t in optree.tree_leaves(after))


def make_example(cache, batch_size):
    """Returns a cache of zeros, in which tensors of one shape and dtype share their memory.

    A step is traced with it: values have no effect, and a whole cache may not fit into memory.
    """
    shared: dict = {}

    def example(t):
        shape = batch_size, *t.shape[1:]
        if (shape, t.dtype) not in shared:
            shared[shape, t.dtype] = t.new_zeros(shape)
        return shared[shape, t.dtype].view(shape)

    return optree.tree_map(example, cache)


def _single_row_mm(a, b):
    """Computes a matrix product of one row in a compiled step, or returns NotImplemented.

    On an AMD EPYC, the library's product in float32 takes twice as long as a sum that reads b once;
    on an Intel Xeon, it takes 0.7 times as long as `_sum_rows`.
    """
    if a.shape[0] != 1 or a.dtype != torch.float32 or b.dtype != torch.float32:
        return NotImplemented
    if b.is_contiguous():
        return _sum_rows(a, b)
    return (b.t() * a).sum(-1)[None] if b.stride(0) == 1 else NotImplemented


def _single_row_bfloat16_mm(a, b):
    """Computes a bfloat16 matrix product of one row, or returns NotImplemented.

    oneDNN would rearrange a contiguous b for each product, which takes longer than a product in
    float32. It does not rearrange a transposed b, such as the embedding.
    """
    if a.shape[0] != 1 or a.dtype != torch.bfloat16 or not b.is_contiguous():
        return NotImplemented
    return _sum_rows(a, b)


def _sum_rows(a, b):
    """Returns the product of `[1, N]` and a contiguous `[N, M]`, a weighted sum of the rows of b.

    `embedding_bag` reads b once and sums in float32. Each bag sums one block of columns, in one
    thread.
    """
    num_rows, num_columns = b.shape
    bags = math.gcd(num_columns, 1 << (torch.get_num_threads() - 1).bit_length())
    sums = torch.nn.functional.embedding_bag(
        torch.arange(bags * num_rows, dtype=torch.int32).view(num_rows, bags).t(),
        b.detach().view(bags * num_rows, num_columns // bags),
        per_sample_weights=a.expand(bags, num_rows),
        mode="sum",
    )
    return sums.view(1, num_columns)


_SINGLE_ROW = {torch.ops.aten.mm.default: _single_row_mm}
_SINGLE_BFLOAT16_ROW = {torch.ops.aten.mm.default: _single_row_bfloat16_mm}


def _inline_scalars(traced):
    """Replaces factors that are constant 0-d tensors by Python numbers, bit-identically.

    For a 0-d tensor, torch runs a kernel for arbitrary strides and dtypes, which takes four times
    as long on a GPU.
    """
    for node in traced.graph.nodes:
        if node.target is not torch.ops.aten.mul.Tensor:
            continue
        x, factor = node.args
        if getattr(factor, "target", None) is not torch.ops.aten.lift_fresh_copy.default:
            continue
        constant = getattr(traced, str(factor.args[0].target), None)
        if constant is None or constant.ndim or not constant.is_floating_point():
            continue
        value = x.meta["val"]
        if value.ndim and value.is_floating_point():
            # torch casts the constant to the dtype of x on a GPU, but not on a CPU.
            constant = constant if constant.device.type == "cpu" else constant.to(value.dtype)
            node.args = x, constant.item()
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


def _num_bytes(node):
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def _split(traced, num_weights):
    """Splits a graph into the part that depends only on weights, its first inputs, and the rest.

    The first graph takes the weights. The second takes the results of the first, then the other
    inputs. In each step, it recomputes large results that take more memory than the weights they
    depend on, such as `float32` copies of `int8` weights.
    """
    nodes = list(traced.graph.nodes)
    inputs = [n for n in nodes if n.op == "placeholder"]
    sources: dict = {n: {n} for n in inputs}  # the inputs that a node depends on
    for node in nodes[len(inputs) :]:
        sources[node] = set().union(*(sources[n] for n in node.all_input_nodes))
    later = {n for n in nodes if n.op == "output" or sources[n].intersection(inputs[num_weights:])}
    in_step = set(later)
    for node in reversed(nodes):
        size = _num_bytes(node)
        is_grown = size > MAX_STORED_GROWTH and size > sum(map(_num_bytes, sources[node]))
        if is_grown and in_step.intersection(node.users):
            in_step.add(node)
    used = [n for n in nodes if n not in in_step and in_step.intersection(n.users)]

    before, after = torch.fx.Graph(), torch.fx.Graph()
    copies: dict = {}
    for node in nodes:
        if node not in later:
            copies[node] = before.node_copy(node, copies.__getitem__)
    before.output([copies[n] for n in used])
    before.eliminate_dead_code()
    copies = {n: after.placeholder(n.name) for n in used}
    for node in nodes:
        if node in in_step:
            copies[node] = after.node_copy(node, copies.__getitem__)
    return torch.fx.GraphModule(traced, before), torch.fx.GraphModule(traced, after)
