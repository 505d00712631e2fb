"""Programs of JAX or TensorFlow for prompts and decoding, by batch size and length bucket."""

import contextlib
import functools
import inspect
import platform
import weakref
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_recurrent.backends.constants import MIN_DELAYED_ROWS
from keras_recurrent.devices.jax_processes import gather_to_numpy
from keras_recurrent.dispatch import chosen_name, compile_ahead
from keras_recurrent.generation import beam_search
from keras_recurrent.generation.batch import is_on_cpu, runs_ahead
from keras_recurrent.generation.modes import RUN_EAGERLY, GenerationMode
from keras_recurrent.generation.prompts import bucket, chunk_length
from keras_recurrent.generation.sampling import empty_logprobs, next_tokens
from keras_recurrent.generation.sequence import advance
from keras_recurrent.generation.xla_batch import JaxBatch, XlaBatch, distribute
from keras_recurrent.layers.decoding import decoding_scope
from keras_recurrent.layers.recent_tokens import apply_recent_tokens
from keras_recurrent.layers.weight_copies import copied_weights, copies_scope, make_copy
from keras_recurrent.progress import announce

if keras.config.backend() == "jax":
    import jax

# Methods of `Programs` that are compiled. On TensorFlow, where no program overwrites a cache, the
# others are either not called or need no compilation.
PROGRAMS = ["decode", "logits", "choose", "_prefill_few", "_prefill_chunks"]
PROGRAMS += ["_score_tokens", "_search_beams"]
if keras.config.backend() == "jax":
    PROGRAMS += ["process", "insert", "extract", "set_row", "_add_recent_tokens", "finish", "copy"]
# Maximum number of prompt tokens, including padding, of a program whose matrix products on GPUs all
# use cuBLAS, to shorten its compilation.
FEW_TOKENS = 1024
# Static arguments: each combination of their values is another program.
STATIC = {"features", "keep", "num_tokens", "num_beams", "num_top", "max_length", "variant"}


class Programs:
    """Programs of a language model.

    JAX passes the weights as arguments. Programs of TensorFlow read the variables of the model.
    Float32 copies of bfloat16 weights are arguments on both. JAX overwrites the arguments `state`
    and `logits_buffer`.

    Args:
        model: the language model. With `run_eagerly=True`, its programs run without being compiled.

    Attributes:
        mode: the `GenerationMode` of the last call, or None.
    """

    mode: Any = None

    def __init__(self, model):
        self.model, on_jax = model, keras.config.backend() == "jax"
        self._is_first = on_jax and not model.run_eagerly
        self._uses_xla = not model.run_eagerly and (on_jax or _compiles_on_tensorflow(model))
        for name in () if model.run_eagerly else PROGRAMS:
            setattr(self, name, self._compile(name))

    def _compile(self, name):
        method = getattr(self, name)
        if keras.config.backend() == "jax":
            return _jit(method, has_few_tokens=name == "_prefill_few")
        import tensorflow as tf

        # AutoGraph, which no model needs, takes 40 % of the first call.
        return tf.function(method, jit_compile=self._uses_xla, autograph=False)

    def batch(self, num_slots, keep, reads_tokens=False):
        """Returns a batch; arguments as in `Batch`."""
        cls = JaxBatch if keras.config.backend() == "jax" else XlaBatch
        return cls(self, num_slots, keep, reads_tokens)

    def weights(self):
        """Returns a list of arguments of a program: the weights on JAX, and copies of some."""
        values = [v.value for v in self._passed_weights()]
        return values + [_copy(v.value) for v in self._copied_weights()]

    def _passed_weights(self):
        return self.model.variables if keras.config.backend() == "jax" else []

    def _copied_weights(self):
        """Returns the variables of which programs on CPUs read copies."""
        is_split = keras.distribution.distribution() is not None
        if not self._uses_xla or is_split or not is_on_cpu(self.model):
            return []
        layers = self.model.backbone._flatten_layers()
        return [weight for layer in layers for weight in copied_weights(layer)]

    def variant(self):
        """Returns what a program depends on beyond the shapes of its arguments.

        These are the choice of `implementation` and, on JAX, the blocks that are not fused.
        Programs of TensorFlow depend on the variables that they read, which change, such as in
        `enable_lora`.
        """
        layers: Any = self.model.backbone.unfused_blocks()
        if keras.config.backend() != "jax":
            layers = [(v.path, tuple(v.shape), v.dtype) for v in self.model.variables]
        return chosen_name(), str(layers)  # TensorFlow would flatten a tuple in each call

    def record_mode(self):
        is_eager = self.model.run_eagerly
        name, refused = ("eager", {"program": RUN_EAGERLY}) if is_eager else ("program", {})
        self.mode = GenerationMode(name, refused, self.model.backbone.unfused_blocks())

    def begin(self, cache):
        """Returns a cache, or its shapes, as steps take it; `finish` is the inverse function.

        On JAX, it also stores recent tokens at large batch sizes, where steps write large states
        only every few tokens. In this case, JAX overwrites the given cache.
        """
        backbone, batch_size = self.model.backbone, cache["segment"].shape[0]
        is_large = keras.config.backend() == "jax" and batch_size >= MIN_DELAYED_ROWS
        if self.model.run_eagerly or not is_large or not backbone.takes_fused_steps(batch_size):
            return cache
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in keras.tree.flatten(cache)):
            return jax.eval_shape(backbone.add_recent_tokens, cache)
        return self._add_recent_tokens(cache)

    def _add_recent_tokens(self, state):
        return self.model.backbone.add_recent_tokens(state)

    def finish(self, cache):
        """Returns the cache of a `BatchState` as the backbone takes it."""
        return apply_recent_tokens(cache)

    def copy(self, cache):
        """Copies a cache, which `decode` would otherwise overwrite."""
        on_jax = keras.config.backend() == "jax"
        return keras.tree.map_structure(ops.copy, cache) if on_jax else cache

    def prefill(self, token_ids, lengths, cache=None, max_length=None, batch=None):
        """Returns the cache after the first `lengths` tokens of each sequence, in new arrays.

        Arguments are as in `torch_programs.Programs.prefill`. On JAX, the first step of the `batch`
        is compiled while the first prompt is processed.
        """
        if batch is not None and self._is_first:
            batch.prepare_first_step(cache or self._initial_shapes(len(lengths), max_length))
        self._is_first = False
        padded = np.zeros((len(lengths), bucket(max(1, lengths.max()))), "int32")
        width = min(padded.shape[1], token_ids.shape[1])
        padded[:, :width] = token_ids[:, :width]
        run = self._prefill_few if padded.size <= FEW_TOKENS else self._prefill_chunks
        return run(
            *(distribute(padded), distribute(lengths.astype("int32")), cache, self.weights()),
            max_length=max_length if cache is None else None,
            variant=self.variant(),
        )

    def _initial_shapes(self, batch_size, max_length):
        state = functools.partial(self.model.backbone.get_initial_state, max_length=max_length)
        return jax.eval_shape(functools.partial(state, batch_size))

    def score(self, token_ids, targets, mask, cache, num_top=None):
        """Returns the results of the model's `_score_tokens`, with NumPy arrays of scores."""
        token_ids, targets, mask = map(distribute, (token_ids, targets, mask))
        arrays = token_ids, targets, mask, cache, self.weights()
        *scores, cache = self._score_tokens(*arrays, num_top=num_top, variant=self.variant())
        return *map(gather_to_numpy, scores), cache

    def search(self, cache, inputs, num_beams):
        """Returns the `Hypotheses` of beam search, as `torch_programs.Programs.search`."""
        self.record_mode()
        token, remaining, *others = inputs
        arrays = distribute(token), (distribute(remaining), *map(ops.convert_to_tensor, others))
        found = self._search_beams(
            *(cache, arrays[0], self.weights(), arrays[1]),
            num_beams=num_beams,
            max_length=bucket(int(remaining.max())),
            variant=self.variant(),
        )
        return keras.tree.map_structure(gather_to_numpy, found)

    # Functions of programs, which run while a program is traced.

    @contextlib.contextmanager
    def _scope(self, weights):
        """Context manager in which the variables of the model have these values."""
        if not self.model.run_eagerly:
            announce("Compiling generation, once for a batch size and a range of lengths")
        with contextlib.ExitStack() as scopes:
            if weights is not None:
                passed, copied = self._passed_weights(), self._copied_weights()
                scopes.enter_context(copies_scope(copied, weights[len(passed) :]))
                values = list(zip(passed, weights[: len(passed)], strict=True))
                if values:
                    scopes.enter_context(keras.StatelessScope(values))
                scopes.enter_context(self.model.backbone.constant_block_arguments())
            scopes.enter_context(compile_ahead())
            yield

    def _prefill_chunks(self, token_ids, lengths, cache, weights, max_length, variant):
        backbone, (batch_size, padded_length) = self.model.backbone, token_ids.shape
        size = chunk_length(batch_size, padded_length)
        longest, positions = ops.max(lengths), ops.arange(size, dtype="int32")
        if cache is None:
            cache = backbone.get_initial_state(batch_size, max_length=max_length)

        def any_left(start, cache):
            return start < longest

        def process(start, cache):
            tokens = ops.slice(token_ids, (0, start), (batch_size, size))
            mask = start + positions < lengths[:, None]
            return start + size, backbone.hidden_states(tokens, mask, cache=cache)[1]

        with self._scope(weights):
            return ops.while_loop(any_left, process, (ops.zeros((), "int32"), cache))[1]

    _prefill_few = _prefill_chunks  # with other options of the compiler

    def process(self, state, rows, is_new, initial, token_ids, mask, weights, variant):
        """Processes a chunk `[P, T]` of the prompts in `rows` [P] of a state of the backbone.

        Rows out of range are not written. Where `is_new` [P] is True, the chunk begins after
        `initial`, a state of batch size 1.
        """

        def select(array, initial):
            new = is_new.reshape(-1, *[1] * (array.ndim - 1))
            return jax.numpy.where(new, initial, array.at[rows].get(mode="clip"))

        cache = keras.tree.map_structure(select, state, initial)
        with self._scope(weights):
            _, cache = self.model.backbone.hidden_states(token_ids, mask, cache=cache)
        return keras.tree.map_structure(
            lambda array, value: array.at[rows].set(value, mode="drop"), state, cache
        )

    def _score_tokens(self, token_ids, targets, mask, cache, weights, num_top, variant):
        with self._scope(weights):
            return self.model._score_tokens(token_ids, targets, mask, cache, num_top)

    def _search_beams(self, cache, token, weights, inputs, num_beams, max_length, variant):
        options = *inputs, num_beams, max_length
        with self._scope(weights):
            return beam_search.search(self._step, cache, token, *options)

    def _step(self, token, mask, cache):
        """Returns the logits `[B, vocabulary]` after tokens `[B, 1]`, and the cache."""
        with contextlib.nullcontext() if self.model.run_eagerly else decoding_scope():
            logits, _, cache = self.model.call_with_cache(token, cache, padding_mask=mask)
        return logits[:, 0], cache

    def _apply_model(self, state, keep):
        """Returns the `BatchState` after the last tokens, and the logits `[B, vocabulary]`."""
        mask = state.sequences.active if keep else None
        logits, cache = self._step(state.sequences.token, mask, state.cache)
        return state._replace(cache=cache), logits

    def logits(self, state, logits_buffer, weights, inputs, features, keep, num_tokens, variant):
        """Computes the logits `[B, vocabulary_size]` of the next token, for `choose`.

        First generates `num_tokens - 1` tokens of the sequences without a grammar. Returns the next
        `BatchState`, the logits, and these tokens and their `Logprobs`. The logits overwrite
        `logits_buffer`, the logits of an earlier call or zeros: if their address changed from call
        to call, XLA would update the CUDA graph in each call.
        """
        uniform, arguments = inputs

        def one(t, state, logits, uniform):
            sequences = state.sequences
            # A sequence with a grammar takes part in the first iteration alone.
            waits = ops.logical_and(sequences.has_grammar, t > 0)
            active = ops.logical_and(sequences.active, ops.logical_not(waits))
            running = state._replace(sequences=sequences._replace(active=active))
            running, new = self._apply_model(running, True)
            logits, state = ops.where(waits, logits, new), state._replace(cache=running.cache)
            sampled, logprobs = _sample(features, state, logits, uniform, arguments)
            is_chosen_later = ops.logical_or(sequences.has_grammar, t == num_tokens - 1)
            return _select_rows(is_chosen_later, state, sampled), logits, logprobs

        if num_tokens == 1:
            with self._scope(weights):
                return *self._apply_model(state, keep), (), ()
        inputs = state, logits_buffer, weights, features, uniform, num_tokens
        state, logits, *found = self._repeat(one, *inputs)
        return state, logits, *keras.tree.map_structure(lambda array: array[:, :-1], found)

    def choose(self, state, logits, inputs, features, variant):
        """Chooses a token from logits; returns what `decode` does. The cache of `state` is ()."""
        with self._scope(None):
            return _choose(features, state, logits, inputs)

    def decode(self, state, weights, inputs, features, keep, num_tokens, variant):
        """Generates N tokens; returns the next `BatchState`, the tokens `[B, N]` and `Logprobs`.

        `inputs` are random numbers `[B, N]` or None, and `{name: array}`, the arguments of
        sampling. Without log probabilities, () replaces the `Logprobs`.
        """
        uniform, arguments = inputs

        def one(t, state, logits, uniform):
            state, logits = self._apply_model(state, keep)
            state, logprobs = _sample(features, state, logits, uniform, arguments)
            return state, (), logprobs

        if num_tokens == 1:  # without the buffers of a loop
            with self._scope(weights):
                state, logits = self._apply_model(state, keep)
                return _choose(features, state, logits, inputs)
        state, _, *found = self._repeat(one, state, (), weights, features, uniform, num_tokens)
        return state, *found

    def _repeat(self, one, state, logits, weights, features, uniform, num_tokens):
        """Repeats `one` for each token; returns state, logits, tokens `[B, N]` and `Logprobs`.

        one: a function of the index of the token, state, logits and random numbers [B], which
            returns the next state, logits and the `Logprobs` of the token.
        """
        # XLA on GPUs would wait for any other condition in each iteration.
        has_fixed_count = runs_ahead(self.model)

        def continues(t, state, logits, generated, logprobs):
            if has_fixed_count:
                return t < num_tokens
            return ops.logical_and(t < num_tokens, ops.any(state.sequences.active))

        def store(buffer, value, t):
            return ops.slice_update(buffer, (0, t, 0)[: buffer.ndim], value)

        def step(t, state, logits, generated, logprobs):
            column = None
            if uniform is not None:
                column = ops.slice(uniform, (0, t), (uniform.shape[0], 1))[:, 0]
            state, logits, new = one(t, state, logits, column)
            generated = store(generated, state.sequences.token, t)
            logprobs = keras.tree.map_structure(
                lambda buffer, value: store(buffer, value[:, None], t), logprobs, new
            )
            return t + 1, state, logits, generated, logprobs

        size = state.sequences.token.shape[0], num_tokens
        buffers = ops.zeros(size, "int32"), empty_logprobs(features.num_logprobs, size)
        initial = ops.zeros((), "int32"), state, logits, *buffers
        with self._scope(weights):
            return ops.while_loop(continues, step, initial)[1:]

    def insert(self, state, slot, sequence, cache, row):
        """Overwrites a slot by the `DeviceState` of a sequence and a row of a cache of prompts."""
        cache = _select(cache, row)
        if len(keras.tree.flatten(cache)) != len(keras.tree.flatten(state.cache)):
            cache = self.model.backbone.add_recent_tokens(cache)
        sequences = _set_row(state.sequences, slot, sequence)
        return state._replace(sequences=sequences, cache=_set_row(state.cache, slot, cache))

    def extract(self, cache, slot):
        """Returns the state of a slot as the backbone takes it, of batch size 1."""
        return apply_recent_tokens(_select(cache, slot))

    def set_row(self, state, slot, value):
        """Overwrites row `slot` of an array, or of each array of a state.

        Given a state, `value` is a state of batch size 1.
        """
        return _set_row(state, slot, value)


def _sample(features, state, logits, uniform, arguments):
    """Returns the `BatchState` after one more token of each sequence, and its `Logprobs`."""
    inputs = logits, state.sequences, uniform, state.counts, arguments
    token, counts, logprobs = next_tokens(features, *inputs)
    return state._replace(sequences=advance(state.sequences, token), counts=counts), logprobs


def _choose(features, state, logits, inputs):
    """Returns the `BatchState` after one more token, the tokens `[B, 1]`, and their `Logprobs`."""
    uniform, arguments = inputs
    first = None if uniform is None else uniform[:, 0]
    state, logprobs = _sample(features, state, logits, first, arguments)
    logprobs = keras.tree.map_structure(lambda array: array[:, None], logprobs)
    return state, state.sequences.token, logprobs


def _select_rows(condition, first, second):
    """Returns the rows of the `BatchState` `first` where a mask [B, 1] is True, else of `second`.

    The states have the same cache.
    """
    parts = [state._replace(cache=()) for state in (first, second)]

    def select(a, b):
        return ops.where(condition if a.ndim > 1 else condition[:, 0], a, b)

    return keras.tree.map_structure(select, *parts)._replace(cache=first.cache)


def _jit(function, has_few_tokens):
    names = inspect.signature(function).parameters.keys()
    has_prompts = bool(names & {"token_ids", "slot"})
    options = compiler_options_of_prompts(has_few_tokens) if has_prompts else None
    return jax.jit(
        function,
        static_argnames=names & STATIC,
        donate_argnames=names & {"state", "logits_buffer"},
        keep_unused="logits_buffer" in names,
        compiler_options=options,
    )


def compiler_options_of_prompts(has_few_tokens):
    """Returns the options of XLA for programs that process or insert prompts, without CUDA graphs.

    Each call has other buffers, so that XLA would update every kernel of a graph before the first
    one could run. This took longer than launching the kernels one by one.

    With `has_few_tokens`, all matrix products use cuBLAS. Otherwise, XLA also compiles and times
    other kernels, which takes 2 of the 10 seconds of the first call of HGRN2 1.3B on an H200,
    but makes prefill of 16,384 tokens 4 % faster.
    """
    if jax.default_backend() != "gpu":
        return None
    options: dict = {"xla_gpu_graph_min_graph_size": 2**20}
    return options | ({"xla_gpu_enable_triton_gemm": False} if has_few_tokens else {})


def _set_row(state, slot, value):
    def set_one(array, new):
        return array.at[slot].set(new[0] if np.ndim(new) == array.ndim else new)

    return keras.tree.map_structure(set_one, state, value)


_copies: dict = {}  # {id of an array of weights on JAX: its copy}


def _copy(weights):
    """Returns the copy of the value of a variable.

    An array of JAX is constant, and its copy is reused as long as the array exists. Variables of
    TensorFlow may change: each call returns a new copy.
    """
    copy = _copies.get(id(weights))
    if copy is None:
        copy = make_copy(weights)
        if keras.config.backend() == "jax":
            _copies[id(weights)] = copy
            weakref.finalize(weights, _copies.pop, id(weights), None)
    return copy


def _select(cache, row):
    """Returns the part of a cache for one sequence, of batch size 1."""
    return keras.tree.map_structure(lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1), cache)


def _compiles_on_tensorflow(model):
    compiled = model._compiles_generation
    return _supports_xla(model) if compiled is None else compiled


def _supports_xla(model):
    """Returns True if XLA compiles the model on TensorFlow; also on CPUs, unlike Keras's `fit`."""
    import tensorflow as tf

    layers = model.backbone._flatten_layers()
    return (
        all(layer.supports_jit for layer in layers)
        and platform.system() != "Darwin"
        and not tf.distribute.has_strategy()
    )
