"""Decoding steps on torch, traced once and then run without Keras.

Computations that depend only on weights, such as casts and the lower bounds of HGRN2, are a
separate graph that runs once per call. A step of a model with hooks is not traced: the graph would
repeat their effects during tracing, or omit them.
"""

import contextlib
import threading

import keras
import optree
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from keras_recurrent.backends.torch._states import inplace_states
from keras_recurrent.dispatch import compile_ahead
from keras_recurrent.generation.recent_tokens import apply_recent_tokens
from keras_recurrent.layers.decoding import decoding_scope
from keras_recurrent.progress import announce

MAX_GROWN = 2**20  # bytes of a stored result that is larger than the weights it depends on
tracing = threading.RLock()  # tracing in Keras and torch uses global state of the process
COMPILED_AFTER = 2000  # tokens; the traced graph takes as long for these as torch's compiler


class Step:
    """Decoding step of one token of each sequence.

    Args:
        model: the language model.
        cache: a cache with the shapes of all later calls.
        compiled: True compiles with torch's compiler at the first token, None after
            `COMPILED_AFTER` tokens, False never.
        masked: boolean, True if the step takes a mask, boolean [B, 1], between token and cache. The
            cache of a sequence is unchanged where it is False.
        not_traced_reason: reason to run each step through the layers, or None.
        delays_writes: boolean, True if fused steps write large states only every few tokens. The
            step then takes a cache with recent tokens: see `flatten_cache` and `cache`.

    Attributes:
        groups: the result of `group_equal` for the tensors of the step's cache. Groups of recent
            tokens follow the groups of the given cache.
        unfused: the `unfused_blocks` of the model at the latest use.
    """

    unfused: dict
    _num_tokens = 1

    def __init__(self, model, cache, compiled, masked, not_traced_reason=None, delays_writes=False):
        backbone, batch_size = model.backbone, cache["segment"].shape[0]
        self.vocabulary_size = backbone.vocabulary_size
        self._delays_writes = delays_writes and backbone.takes_fused_steps(batch_size)
        first = optree.tree_leaves(cache)
        if self._delays_writes:
            cache = backbone.add_recent_tokens(cache)
        self.groups = group_equal(optree.tree_leaves(cache), first)
        self._model, self._structure = model, optree.tree_structure(cache)
        self._use_compiler, self._lock, self.count = compiled, threading.Lock(), 0
        self.masked = masked
        self.not_traced_reason = not_traced_reason
        self._compiled = None
        self._no_compiler_reason: str | None = None
        self.not_captured_reason: str | None = not_traced_reason
        if not_traced_reason:
            self._prepare, self.traced = (lambda *weights: weights), self._run_layers
            return
        flat = [t.clone() for t in optree.tree_leaves(cache)]  # a step overwrites its cache
        size = flat[0].shape[0], self._num_tokens
        token = torch.ones(size, dtype=torch.int32, device=flat[0].device)
        weights = self.weights()
        mask = (torch.ones_like(token, dtype=torch.bool),) if masked else ()
        with tracing, torch.no_grad(), compile_ahead():
            traced = make_fx(self._call)(weights, token, *mask, *flat)
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

    def fastest_function(self, *inputs):
        """Returns the step compiled for these inputs, or as traced."""
        if self.not_compiled_reason(inputs[-1].device):
            return self.traced
        # Inductor's documented entry for graphs not made by Dynamo. The import takes seconds.
        import torch._inductor as inductor
        from torch._inductor.exc import InvalidCxxCompiler

        with self._lock:
            if self._compiled is None and self._no_compiler_reason is None:
                announce("Compiling generation, once for a batch size and a range of lengths")
                try:
                    with tracing, torch.no_grad():
                        graph = make_fx(self.traced, _SINGLE_ROW)(*inputs)
                        self._compiled = inductor.compile(graph, list(inputs))
                except InvalidCxxCompiler as error:
                    self._no_compiler_reason = f"torch found no C++ compiler: {error}"
        return self._compiled or self.traced


class Chunk(Step):
    """Function of a chunk of tokens [B, T], their mask and a cache, which returns the next cache.

    Args:
        model, cache, not_traced_reason: as in `Step`.
        num_tokens: integer T.
    """

    def __init__(self, model, cache, num_tokens, not_traced_reason=None):
        self._num_tokens = num_tokens
        super().__init__(model, cache, False, True, not_traced_reason)

    def _call(self, weights, tokens, mask, *cache):
        mapping = list(zip(self._model.variables, weights, strict=True))
        with keras.StatelessScope(mapping):
            _, after = self._model.backbone.hidden_states(tokens, mask, cache=self._pack(cache))
        return tuple(t.contiguous() for t in optree.tree_leaves(after))


def group_equal(tensors, first):
    """Groups the indices of tensors by shape and dtype; returns a list of lists.

    first: tensors whose groups precede the groups of all other tensors.
    """
    first, groups = {id(t) for t in first}, ({}, {})
    for index, t in enumerate(tensors):
        groups[id(t) not in first].setdefault((t.shape, t.dtype), []).append(index)
    return [*groups[0].values(), *groups[1].values()]


def _single_row_mm(a, b):
    """Computes a matrix product of one row as a sum, which torch's compiler makes memory-bound.

    The library's matrix product takes up to twice as long on a CPU, most if b is transposed, like
    the embedding. Only float32: in other dtypes the products would be rounded before the sum.
    """
    if a.shape[0] != 1 or a.dtype != torch.float32 or b.dtype != torch.float32:
        return NotImplemented
    if b.stride(0) == 1:
        return (b.t() * a).sum(-1)[None]
    return (a.t() * b).sum(0, keepdim=True)


_SINGLE_ROW = {torch.ops.aten.mm.default: _single_row_mm}


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
        is_grown = size > MAX_GROWN and size > sum(map(_num_bytes, sources[node]))
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
