"""Base class of the networks of all families, from tokens to hidden states, and their cache."""

import contextlib
import threading

import keras
from keras import ops

from keras_recurrent.checkpoints.export import export
from keras_recurrent.checks.arguments import (
    check_boolean,
    check_positive_integer,
    check_positive_integers,
)
from keras_recurrent.checks.shapes import (
    check_per_token,
    check_rank_known,
    check_sizes_of_state,
    check_state,
)
from keras_recurrent.devices.jax_layouts import (
    apply_state_layout,
    axis_size,
    check_layout,
    get_weight_axis,
    make_layout_map,
)
from keras_recurrent.dispatch import BACKEND, uses_triton_kernels
from keras_recurrent.inherited_docstrings import InheritedDocstring
from keras_recurrent.layers import LocalAttention, decoding
from keras_recurrent.layers.base import InnerCalls
from keras_recurrent.layers.remat import no_further_remat
from keras_recurrent.layers.reversible_embedding import ReversibleEmbedding, reversible_embedding
from keras_recurrent.layers.tokens import compute_tokens, initial_token_state, token_state_spec
from keras_recurrent.models.network import Network
from keras_recurrent.models.residual_block import can_chain_steps, chain_steps
from keras_recurrent.models.segments import SegmentsOptional
from keras_recurrent.training.torch_training import TorchTraining

if BACKEND == "torch":
    from keras_recurrent.backends.torch._states import permission, store_states

# Arguments of families that the base class takes, too; see `make_arguments`.
STORED = ("embedding_scale", "output_scale", "max_position_embeddings")
# Key of `weight_layout` for the linear layers of keys and values.
KEYS_AND_VALUES = "block.*(k_proj|v_proj)/kernel"
# Its attribute `pair` is a backbone and the result of its `block_arguments`, inside of
# `constant_block_arguments`. torch.compile can trace it, unlike a ContextVar.
_constants = threading.local()


class RecurrentBackbone(SegmentsOptional, TorchTraining, InnerCalls, InheritedDocstring, Network):
    """Base class of the networks: from token ids to the hidden states before the logits.

    A network is an embedding, residual blocks (see `keras_recurrent.layers.StreamingLayer`) and a
    final norm. The constructor of a family calls `store_arguments(cls, locals())`, and passes the
    result of `make_arguments` to this class. A family also defines `make_mixer`, and
    `weight_layout` if it has further weights to split. The first arguments below, up to
    `layer_norm_epsilon`, are those that constructors of families share.

    Args:
        vocabulary_size: integer, the number of tokens.
        num_layers: integer, the number of residual blocks.
        hidden_dim: integer, the width D of the residual stream.
        intermediate_dim: integer, the width inside the layers that mix channels.
        num_query_heads: integer, the number of query heads in blocks of attention.
        head_dim: integer, the size of a head in blocks of attention.
        num_key_value_heads: integer, the number of key and value heads in blocks of attention,
            which must divide `num_query_heads`.
        rope_max_wavelength: number, the base of the rotary positions' wavelengths.
        tie_word_embeddings: boolean. True: the embedding's weights compute the logits. False:
            logits have separate weights.
        layer_norm_epsilon: float, ε of all norms.
        token_embedding: a `keras.layers.ReversibleEmbedding`, which also computes the logits.
        transformer_layers: a list of blocks, each a `StreamingLayer`. The attribute has the name
            that KerasHub uses.
        final_norm: a layer.
        embedding_scale: float, factor of the embeddings. None: 1.
        output_scale: number, factor of the final norm's output. None: 1.
        max_num_tokens: integer, the largest number of tokens of a sequence, with its padding and
            all documents of a packed one. Longer ones raise an error, with the reason of
            `too_long_reason`. None: no limit.
        max_position_embeddings: integer, the number of tokens up to which positions were trained.
            Generation of longer sequences warns. None: no warning.
        dtype: a dtype, policy or its name; `"mixed_bfloat16"` computes in bfloat16 but keeps
            weights, gates of recurrences and states in float32.
        name: string.
        trainable: boolean.

    Linear layers and convolutions are initialized LeCun-normal.

    Call arguments:
        inputs: a dictionary of `token_ids` `[B, T]`, `padding_mask` `[B, T]` (True or 1 at real
            tokens; padding may be at any position and does not change the results), and optionally
            `segment_ids` `[B, T]`, at least 0, one number for each document of a packed sequence.
            Documents do not affect each other; see `keras_recurrent.layers.StreamingLayer`.

    Returns:
        `[B, T, hidden_dim]`, in the compute dtype.

    Raises:
        ValueError: a size is below 1, a number or boolean has another type, or heads or block types
            are not as described above.
    """

    # Arguments that do not change weights, so that `from_preset` takes them for loaded weights.
    free_arguments: tuple[str, ...] = ()

    def __init__(
        self,
        token_embedding,
        transformer_layers,
        final_norm,
        embedding_scale=None,
        output_scale=None,
        max_num_tokens=None,
        max_position_embeddings=None,
        dtype=None,
        name=None,
        trainable=True,
    ):
        check_positive_integer("max_position_embeddings", max_position_embeddings, or_none=True)
        policy = keras.dtype_policies.get(dtype)
        if policy.quantization_mode is not None:
            raise ValueError(
                f"`dtype` must not be a quantized policy; got {policy.name!r}. Create or load the "
                "model without it, then call `model.quantize(...)`."
            )
        # === Layers ===
        self.token_embedding = token_embedding
        self.transformer_layers = transformer_layers
        self.final_norm = final_norm
        self.embedding_scale = embedding_scale
        self.output_scale = output_scale
        self.max_num_tokens = max_num_tokens
        self.max_position_embeddings = max_position_embeddings
        self.uses_position = any(block.uses_position for block in transformer_layers)
        self.keeps_state = all(block.keeps_state for block in transformer_layers)

        # === Functional model ===
        inputs = {name: token_input(name) for name in ("token_ids", "padding_mask")}
        outputs = self.call_with_segments(**inputs, segment_ids=None)
        super().__init__(
            inputs=inputs, outputs=outputs, dtype=dtype, name=name, trainable=trainable
        )

    def make_arguments(self, block_cls, values):
        """Returns the arguments of this class for the stored arguments of a family.

        They are the layers, which this method makes, the stored arguments of this class, and
        `dtype`, `name` and `trainable`.

        Args:
            block_cls: the class of the residual blocks, whose norm is also the final norm.
            values: the `locals()` of the family's constructor.
        """
        dtype = values["dtype"]
        stored = {name: getattr(self, name) for name in self._argument_names}
        is_tied = stored.get("tie_word_embeddings", True)
        check_boolean("tie_word_embeddings", is_tied)
        # Only blocks are recomputed under a `keras.RematScope`.
        with no_further_remat():
            token_embedding = reversible_embedding(
                *(self.vocabulary_size, self.hidden_dim, is_tied),
                logit_soft_cap=stored.get("final_logit_soft_cap"),
                dtype=dtype,
            )
            mixers = [
                self.make_mixer(i, dtype=dtype, name="temporal_block")
                for i in range(self.num_layers)
            ]
        shared = self.stored("intermediate_dim", "layer_norm_epsilon")
        blocks = [
            block_cls(mixer, name=f"block_{i}", dtype=dtype, **{**shared, **self.block_options(i)})
            for i, mixer in enumerate(mixers)
        ]
        with no_further_remat():
            final_norm = blocks[0].make_norm("final_norm")
        return {
            "token_embedding": token_embedding,
            "transformer_layers": blocks,
            "final_norm": final_norm,
            **{name: value for name, value in stored.items() if name in STORED},
            **{name: values[name] for name in ("dtype", "name", "trainable")},
        }

    def make_mixer(self, i, **kwargs):
        """Returns the layer that mixes tokens in block i; `kwargs` are its dtype and its name.

        Returns None if the block does not mix tokens.
        """
        raise NotImplementedError

    def block_options(self, i):
        """Returns arguments of block i that differ from those of other blocks."""
        return {}

    def make_attention(self, i, **kwargs):
        """Returns the attention of block i, with the stored numbers of heads."""
        attention = LocalAttention(
            self.num_query_heads, num_key_value_heads=self.num_key_value_heads, **kwargs
        )
        self.check_split(
            i,
            q_proj={"num_query_heads": self.num_query_heads},
            k_proj={"num_key_value_heads": self.num_key_value_heads},
        )
        return attention

    def check_split(self, i, **sizes):
        """Raises an error if the active distribution cannot split layers that mix tokens.

        Args:
            i: integer, the index of the block.
            **sizes: `{linear layer: {argument: number of units of its output}}`.
        """
        for layer, units in sizes.items():
            path = f"block_{i}/temporal_block/{layer}/kernel"
            check_layout(path, hidden_dim=self.hidden_dim, **units)

    def call_with_segments(self, token_ids, padding_mask, segment_ids):
        return self.hidden_states(token_ids, padding_mask, segment_ids)[0]

    def _bypasses_graph(self, inputs):
        # On torch, the graph would call blocks by Keras's `__call__`; `inner` avoids it.
        on_torch = BACKEND == "torch" and isinstance(inputs, dict)
        return super()._bypasses_graph(inputs) or (on_torch and inputs.keys() == self.input.keys())

    def embed(self, token_ids):
        """Returns the inputs of the first block, the scaled embeddings of tokens.

        Args:
            token_ids: integers `[B, T]`.

        Returns:
            `[B, T, hidden_dim]`, in the compute dtype.
        """
        x = self._fused_embedding(token_ids)
        if x is not None:
            return x
        x = self.token_embedding(token_ids)
        return x if self.embedding_scale is None else x * self.embedding_scale

    def _fused_embedding(self, token_ids, state=None):
        """Returns the embeddings of a decoding step by `fused_embedding`, or None.

        The result is None for more than one token, and if the class overrides the layer or `embed`.
        """
        is_base = type(self).embed is RecurrentBackbone.embed
        is_base = is_base and type(self.token_embedding) is ReversibleEmbedding
        if token_ids.shape[1] != 1 or not is_base:
            return None
        return self.token_embedding.fused_embedding(token_ids, self.embedding_scale, state)

    def hidden_states(
        self,
        token_ids,
        padding_mask=None,
        segment_ids=None,
        cache=None,
        intercept=None,
        *,
        return_cache=None,
        max_length=None,
    ):
        """Computes the hidden states of tokens, from the embedding to the (scaled) final norm.

        Args:
            token_ids: integers `[B, T]`, arbitrary at padding.
            padding_mask: boolean or integer `[B, T]`, False or 0 at padding. None: no padding.
            segment_ids: integers `[B, T]`, at least 0, as in
                `keras_recurrent.layers.StreamingLayer`. None: one document per sequence, or the
                continuation of the document in the cache.
            cache: a cache, as from `get_initial_state`. None: starts from the initial state, which
                is faster without one.
            intercept: a function of activations and an index, -1 for the embeddings and i for the
                output of block i. Its result replaces the activations.
            return_cache: boolean, whether to return the next cache. None: if `cache` is given.
            max_length: integer, as in `get_initial_state`, for the cache that a call without a
                `cache` returns.

        Returns:
            `(hidden states [B, T, hidden_dim], cache)`; the latter is None without `return_cache`.

        Raises:
            ValueError: the mask or the segments have another shape or dtype, the cache has another
                structure or other shapes, or `max_length` is missing or above `max_num_tokens`.
        """
        check_rank_known(type(self).__name__, "token_ids", token_ids)
        self.check_num_tokens(token_ids.shape[1])
        for name, tensor in (("padding_mask", padding_mask), ("segment_ids", segment_ids)):
            if tensor is not None:
                check_per_token(type(self).__name__, name, tensor, token_ids.shape)
        return_cache = cache is not None if return_cache is None else return_cache
        if cache is not None:
            if not decoding.is_active():  # the cache of a step may have recent tokens
                check_state(cache, self.cache_spec(token_ids.shape[0]), "cache")
        elif return_cache:
            self._check_max_length(max_length)
        if padding_mask is not None:
            padding_mask = ops.cast(padding_mask, "bool")
            # Ids at padding, such as -100, must be valid for the embedding, too.
            token_ids = ops.where(padding_mask, token_ids, ops.zeros_like(token_ids))
        step = None
        if cache is not None and padding_mask is None and segment_ids is None:
            step = self._fused_embedding(token_ids, cache)
        # Computed once for all blocks. Blocks get no `mask`, which Keras would propagate to the
        # outputs and use to rescale the loss.
        if step is None:
            tokens, token_state = compute_tokens(
                *(token_ids, padding_mask, segment_ids, cache),
                uses_position=self.uses_position,
                return_state=return_cache,
            )
            if max_length is not None:
                tokens = tokens._replace(slots=ops.zeros((0, max_length), "int8"))
            x = self.embed(token_ids)
        else:
            x, tokens, token_state = step
        backbone, arguments = getattr(_constants, "pair", (None, []))
        if backbone is not self:
            arguments = self.block_arguments(x)
        if cache is not None and intercept is None and can_chain_steps(self, x):
            x, states = chain_steps(self.transformer_layers, x, tokens, cache["blocks"], arguments)
        else:
            intercept = intercept or (lambda x, i: x)
            x, states = intercept(x, -1), []
            for i, constant in enumerate(arguments):
                further = {**constant, "tokens": tokens, "return_state": return_cache}
                state = cache and cache["blocks"][i]
                x = self.inner(self.transformer_layers[i], x, initial_state=state, **further)
                if return_cache:
                    x, after = x
                    if BACKEND == "torch" and permission.inplace:
                        after = store_states(state, after)
                    states.append(after)
                x = intercept(x, i)
        x = self.final_norm(x)
        if self.output_scale is not None:
            x = x * self.output_scale
        if not return_cache:
            return x, None
        return x, apply_state_layout({"blocks": tuple(states), **token_state})

    def _check_max_length(self, max_length):
        """Raises an error for a `max_length` of a new cache that is missing or too large."""
        check_sizes_of_state(1, max_length)
        self.check_num_tokens(max_length)
        for block in self.transformer_layers:
            if max_length is None and not block.keeps_state:
                raise block.no_bound()

    @classmethod
    def get_layout_map(
        cls, device_mesh, model_parallel_dim_name="model", data_parallel_dim_name="batch", **heads
    ):
        """Returns the layout of weights and states for `keras.distribution.ModelParallel`.

        The model axis splits heads, the channels of recurrent blocks and the `intermediate_dim` of
        the layers that mix channels. It splits key and value heads of attention if it divides their
        number, and otherwise replicates them. The data axis splits the batch, and the other
        dimension of weights, which are gathered for use (FSDP, or ZeRO-3). A mesh of (8, 1) is
        FSDP, a mesh of (1, 8) is tensor parallelism, and others combine both. States and caches are
        split by sequences and heads or channels. Small weights, such as norms, are replicated.

        Heads and channels are independent, so a block communicates only at the residual stream, and
        for norms over all heads. There are two exceptions: The real and imaginary parts of
        Griffin's `recurrence="cg_lru"` are on different devices and are exchanged. If the model
        axis does not divide the number of groups of Mamba-2, devices share groups, whose keys and
        queries are gathered.

        A third axis, named "sequence", is for sequences that do not fit on one device (sequence
        parallelism). It splits each sequence, whose length it must divide; see
        `keras_recurrent.devices.jax_layouts`.
        If the data axis has one device, weights are split along this axis instead. Attention
        without a window is not supported with this axis.

        Args:
            device_mesh: a `keras.distribution.DeviceMesh`.
            model_parallel_dim_name: string, the mesh axis for the model. Its size must divide
                `vocabulary_size`, `intermediate_dim`, the number of heads, Griffin's `lru_width`
                and `num_blocks`, and Mamba-2's `2 * num_mamba_groups * mamba_state_dim`.
            data_parallel_dim_name: string, the mesh axis for the data. Its size must divide
                `hidden_dim`.
            **heads: for networks with attention, `num_key_value_heads`, integer, the number of its
                key and value heads, by default 1. For `LightningHybridBackbone` also
                `attention_layers`, indices of the blocks of attention: if the model axis does not
                divide `num_key_value_heads`, only their keys and values are replicated. None, the
                default: keys and values of all blocks are then replicated.

        Returns:
            A `keras.distribution.LayoutMap`.

        Raises:
            ValueError: `device_mesh` is not a mesh or lacks an axis of these names. A backbone
                raises it before making weights if an axis does not divide the size that it splits.

        Example:

        ```python
        mesh = keras.distribution.DeviceMesh(
            (1, 8), ("batch", "model"), keras.distribution.list_devices()
        )
        distribution = keras.distribution.ModelParallel(
            layout_map=HGRN2Backbone.get_layout_map(mesh), batch_dim_name="batch"
        )
        with distribution.scope():
            model = HGRN2CausalLM.from_preset("hgrn2_1.3b_100b")
        ```
        """
        data, model = data_parallel_dim_name, model_parallel_dim_name
        layout_map = make_layout_map(device_mesh, model, data)
        data, num_devices = get_weight_axis(device_mesh, data), axis_size(device_mesh, model)
        for path, axes in cls.weight_layout(data, model, num_devices, **heads).items():
            layout_map[path] = axes
        return layout_map

    @staticmethod
    def weight_layout(data, model, num_devices, num_key_value_heads=1):
        """Returns the mesh axes that split the weights in blocks and the logits' weights.

        Most families use the same names for linear layers and recurrences. A family with other
        weights to split extends or replaces this layout.

        Args:
            data: string, the mesh axis for the data.
            model: string, the mesh axis for the model.
            num_devices: integer, the size of that axis.
            num_key_value_heads: integer, as in `get_layout_map`.

        Returns:
            `{regular expression of paths: tuple of one axis or None for each dimension}`.
        """
        keys = None if num_key_value_heads % num_devices else model
        split = "(q|f|i|u|b|c|z|x|dt|gate|up)_proj|linear_x|linear_y"
        gates = "block.*(rg_lru|cg_lru)/(recurrence_gate|input_gate)/(kernel|bias)"
        return {
            "token_embedding/reverse_embeddings": (data, model),
            f"block.*({split})/kernel": (data, model),
            f"block.*({split})/bias": (model,),
            KEYS_AND_VALUES: (data, keys),
            "block.*(k_proj|v_proj)/bias": (keys,),
            "block.*(linear_out|o_proj|down_proj)/kernel": (model, data),
            "block.*conv1d/kernel": (None, model),
            "block.*conv1d/bias": (model,),
            "block.*(rg_lru|cg_lru)/(a_logit|theta)": (model,),
            gates: (model, None, None),
        }

    def check_num_tokens(self, num_tokens):
        """Raises an error for a sequence of too many tokens; None is an unknown number."""
        limit = self.max_num_tokens
        if limit is not None and num_tokens is not None and num_tokens > limit:
            raise ValueError(
                f"`{type(self).__name__}` takes sequences of at most {limit} tokens, with those in "
                "a cache, and counts all documents and the padding of a sequence together; got "
                f"{num_tokens}. {self.too_long_reason()}"
            )

    def too_long_reason(self):
        """Returns the reason of `max_num_tokens`, and the alternative, for an error message."""
        raise NotImplementedError

    def block_arguments(self, embeddings):
        """Returns a dictionary of further call arguments per block, such as its lower bound.

        They depend on the dtype of the embeddings and on weights, not on tokens.
        """
        return [{} for _ in self.transformer_layers]

    @contextlib.contextmanager
    def constant_block_arguments(self):
        """Context manager that computes `block_arguments` once, for all calls of the network in it.

        If the loop of an XLA program called `block_arguments`, XLA would compute the arguments in
        each iteration.
        """
        embeddings = ops.zeros((1, 1, self.hidden_dim), self.compute_dtype)
        before = getattr(_constants, "pair", (None, []))
        _constants.pair = self, self.block_arguments(embeddings)
        try:
            yield
        finally:
            _constants.pair = before

    def cache_spec(self, batch_size=None):
        """Returns the structure of a generation cache, as `KerasTensor`s."""
        blocks = tuple(block.own_state_spec(batch_size) for block in self.transformer_layers)
        return {"blocks": blocks, **token_state_spec(batch_size, self.uses_position)}

    def get_initial_state(self, batch_size, max_length=None):
        """Returns the initial generation cache.

        It is a dict of `blocks`, a tuple with the state of each block, `segment` `[B]`, and, if a
        block uses positions, `position` `[B]`. The first axis of all arrays is the batch. See
        `keras_recurrent.layers.StreamingLayer`.

        Args:
            batch_size: integer, number of sequences.
            max_length: integer, maximum number of tokens of a sequence. Attention blocks cache keys
                and values of that many tokens, or of their window if it is shorter. Blocks without
                a window need the argument. Beyond this length, attention loses the oldest tokens.
                The size of a recurrent state does not depend on it.

        Raises:
            ValueError: a number is not an integer of at least 1, or `max_length` is missing or
                above `max_num_tokens`.
        """
        check_sizes_of_state(batch_size, max_length)
        self.check_num_tokens(max_length)
        blocks = tuple(
            block.own_initial_state(batch_size, max_length) for block in self.transformer_layers
        )
        token_state = initial_token_state(batch_size, self.uses_position)
        return apply_state_layout({"blocks": blocks, **token_state})

    def takes_fused_steps(self, batch_size):
        """Returns True if decoding steps of `batch_size` sequences are fused in all blocks."""
        with decoding.decoding_scope():
            x = ops.zeros((batch_size, 1, self.hidden_dim), self.compute_dtype)
            return can_chain_steps(self, x)

    def unfused_blocks(self):
        """Returns `{name: reason}` of blocks without a fused decoding step.

        The dictionary is empty where decoding does not call Triton kernels.
        """
        if not uses_triton_kernels(self.variables[0].value):
            return {}
        reasons = ((block.name, block.unfused_reason()) for block in self.transformer_layers)
        return {name: reason for name, reason in reasons if reason is not None}

    def add_recent_tokens(self, cache):
        """Returns a cache with recent tokens, for fused steps of many sequences.

        These steps store the latest tokens, and write large states only every few tokens.
        """
        states = zip(self.transformer_layers, cache["blocks"], strict=True)
        return {**cache, "blocks": tuple(block.add_recent_tokens(state) for block, state in states)}

    def export_to_transformers(self, path, dtype=None, max_shard_size=5):
        """Exports the network to a checkpoint; see the method of the language model."""
        export(self, path, dtype=dtype, max_shard_size=max_shard_size)

    def rematerialized_call(self, layer_call, *args, **kwargs):
        # Only blocks are rematerialized; doing it for the whole model would recompute everything.
        return layer_call


def token_input(name):
    """Returns an input of the functional model, integers `[B, T]`."""
    return keras.Input((None,), dtype="int32", name=name)


def check_network_sizes(vocabulary_size, num_layers, hidden_dim, intermediate_dim, *, has_mlp=True):
    """Raises an error for sizes below 1 and those that the active distribution cannot split.

    Without `has_mlp`, `intermediate_dim` may be None, for a network that does not mix channels.
    """
    sizes = {"hidden_dim": hidden_dim, "intermediate_dim": intermediate_dim}
    if intermediate_dim is None and not has_mlp:
        del sizes["intermediate_dim"]
    check_positive_integers(vocabulary_size=vocabulary_size, num_layers=num_layers, **sizes)
    check_layout(
        "token_embedding/embeddings", vocabulary_size=vocabulary_size, hidden_dim=hidden_dim
    )
    check_layout("block_0/mlp/gate_proj/kernel", **sizes)


def expand_block_types(block_types, num_layers, *choices):
    """Returns the type of each block, one of `choices`, from a name or a pattern."""
    # A string is one type, not a pattern of its letters.
    pattern = (block_types,) if isinstance(block_types, str) else tuple(block_types)
    if not pattern or not set(pattern) <= set(choices):
        known = ", ".join(map(repr, choices))
        raise ValueError(f"`block_types` must be a pattern of {known}; got {block_types!r}.")
    return tuple(pattern[i % len(pattern)] for i in range(num_layers))
