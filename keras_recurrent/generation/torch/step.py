"""A step of generation on torch, traced once past Keras and then run without it.

What depends on weights alone, such as their casts and HGRN2's lower bounds, is a graph of its own
that runs once a call. A step that a user's hooks shall see is not traced: a graph would keep what
they did then, or leave them out.
"""

import contextlib
import threading

import keras
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from keras_recurrent.backends.torch._states import inplace_states
from keras_recurrent.layers.decoding import decoding_scope

COMPILED_AFTER = 2000  # tokens: torch's compiler takes as long as the traced graph for so many

_tracing = threading.Lock()


class Step:
    """One token of each row through the network.

    Args:
        model: the language model.
        cache: a cache of the shapes that all shall have.
        compiled: True: torch's compiler is asked for at once; None: once a step has been taken
            `COMPILED_AFTER` times; False: never.
        masked: whether the step takes a mask, boolean [B, 1], between token and cache, and leaves
            the cache of a row alone where it is False.
        not_traced: why each step runs through the layers; None: it is traced.
    """

    def __init__(self, model, cache, compiled, masked, not_traced=None):
        self._model, self._structure = model, keras.tree.map_structure(lambda t: None, cache)
        self._wanted, self._lock, self.count = compiled, threading.Lock(), 0
        self._masked = masked
        self.not_traced = not_traced
        self._compiled = None
        self._no_compiler: str | None = None
        self.not_captured: str | None = not_traced  # why torch could make no CUDA graph of it
        if not_traced:
            self._prepare, self.traced = (lambda *weights: weights), self._through_layers
            return
        flat = [t.clone() for t in keras.tree.flatten(cache)]  # a step writes over its cache
        token = torch.ones((flat[0].shape[0], 1), dtype=torch.int32, device=flat[0].device)
        weights = self.weights()
        mask = (torch.ones_like(token, dtype=torch.bool),) if masked else ()
        # Keras and torch both trace by what is global to a thread or to the process.
        with _tracing, torch.no_grad():
            traced = make_fx(self._call)(weights, token, *mask, *flat)
        self._prepare, self.traced = _split(_with_numbers(traced), len(weights))

    def weights(self):
        return [v.value for v in self._model.variables]

    def prepared(self):
        """What depends on weights alone, from the weights as they now are."""
        return self._prepare(*self.weights())

    def _call(self, weights, token, *cache):
        mapping = list(zip(self._model.variables, weights, strict=True))
        mask, cache = (cache[0], cache[1:]) if self._masked else (None, cache)
        fused = contextlib.nullcontext() if self.not_traced else decoding_scope()
        with keras.StatelessScope(mapping), fused, inplace_states():
            logits, hidden, cache = self._model.call_with_cache(
                token, self.packed(cache), padding_mask=mask
            )
        # Contiguous as the cache was: what is compiled takes tensors of these strides alone.
        flat = (t.contiguous() for t in keras.tree.flatten(cache))
        return logits[:, 0].contiguous(), hidden[:, 0].contiguous(), *flat

    def _through_layers(self, *inputs):
        count = len(self._model.variables)
        return self._call(inputs[:count], *inputs[count:])

    def packed(self, flat):
        return keras.tree.pack_sequence_as(self._structure, list(flat))

    def not_compiled(self, device):
        """Why torch's compiler does not take the next token; None if it does."""
        if device.type != "cpu":
            return "it is asked on CPUs alone"
        if self.not_traced:
            return self.not_traced
        if self._wanted is False:
            return "`compile` got `jit_compile=False`"
        if not self._wanted and self.count < COMPILED_AFTER:
            return f"it begins after {COMPILED_AFTER} tokens; `compile(jit_compile=True)` asks now"
        return self._no_compiler

    def fastest(self, *inputs):
        """The graph compiled, or as it was traced."""
        if self.not_compiled(inputs[-1].device):
            return self.traced
        # Documented: it compiles graphs that Dynamo has not made. It takes seconds to import.
        import torch._inductor as inductor
        from torch._inductor.exc import InvalidCxxCompiler

        with self._lock:
            if self._compiled is None and self._no_compiler is None:
                try:
                    with torch.no_grad():
                        rows = make_fx(self.traced, _OF_ONE_ROW)(*inputs)
                        self._compiled = inductor.compile(rows, list(inputs))
                except InvalidCxxCompiler as error:
                    self._no_compiler = f"it found no compiler for C++: {error}"
        return self._compiled or self.traced


def _mm_of_one_row(a, b):
    """A product of one row as a sum, which torch's compiler reads at the speed of memory.

    The library's product of matrices takes up to twice as long on a CPU, most where b is
    transposed, as the embedding is. Other dtypes would be rounded on the way.
    """
    if a.shape[0] != 1 or a.dtype != torch.float32 or b.dtype != torch.float32:
        return NotImplemented
    if b.stride(0) == 1:
        return (b.t() * a).sum(-1)[None]
    return (a.t() * b).sum(0, keepdim=True)


_OF_ONE_ROW = {torch.ops.aten.mm.default: _mm_of_one_row}


def _with_numbers(traced):
    """Multiplies by a number where the graph has a constant of no dimension, to the same bits.

    Of a tensor and another one of no dimension, torch runs a kernel for any strides and dtypes,
    which takes four times as long on a GPU.
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
            # On a GPU torch casts the constant to the dtype of x first, on a CPU it does not.
            constant = constant if constant.device.type == "cpu" else constant.to(value.dtype)
            node.args = x, constant.item()
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


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
