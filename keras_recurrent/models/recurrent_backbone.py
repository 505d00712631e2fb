"""What the networks of all families share: from tokens to hidden states, and their cache."""

import keras
import keras_hub
from keras import ops

from keras_recurrent.layers.checks import check_positive_integer
from keras_recurrent.layers.streaming import Tokens, segment_of
from keras_recurrent.models.segments import SegmentsOptional
from keras_recurrent.ops.token_kind import token_kind


class RecurrentBackbone(SegmentsOptional, keras_hub.models.Backbone):
    """Base class of the networks: token ids in, the hidden states before the logits out.

    An embedding, residual blocks that stream (see `keras_recurrent.layers.StreamingLayer`), and a
    last norm. A family makes these in its constructor and hands them to this one; it adds its
    configuration, `default_lora_layer_names` and `get_layout_map`.

    Args:
        token_embedding: a `keras.layers.ReversibleEmbedding`, which also makes the logits.
        transformer_layers: a list of blocks, each a `StreamingLayer`.
        final_norm: a layer.
        embedding_scale: float that multiplies the embeddings; None: 1.
        dtype, name, trainable: as in `keras_hub.models.Backbone`.

    Call arguments:
        inputs: a dictionary of `token_ids` `[B, T]`, `padding_mask` `[B, T]` (True or 1 at real
            tokens; padding may stand anywhere in a row and changes nothing), and optionally
            `segment_ids` `[B, T]`, at least 0, one number for each of several documents in a row,
            which then know nothing of each other.

    Returns:
        `[B, T, hidden_dim]`, in the compute dtype.
    """

    def __init__(
        self,
        token_embedding,
        transformer_layers,
        final_norm,
        embedding_scale=None,
        dtype=None,
        name=None,
        trainable=True,
    ):
        # === Layers ===
        self.token_embedding = token_embedding
        self.transformer_layers = transformer_layers
        self.final_norm = final_norm
        self.embedding_scale = embedding_scale

        # === Functional model ===
        inputs = {
            key: keras.Input((None,), dtype="int32", name=key)
            for key in ("token_ids", "padding_mask", "segment_ids")
        }
        outputs, _ = self.hidden_states(
            inputs["token_ids"],
            padding_mask=ops.cast(inputs["padding_mask"], "bool"),
            segment_ids=inputs["segment_ids"],
        )
        super().__init__(
            inputs=inputs, outputs=outputs, dtype=dtype, name=name, trainable=trainable
        )

    @classmethod
    def from_preset(cls, preset, load_weights=None, **kwargs):
        """A backbone by the name of its sizes, or from a directory of `save_to_preset`.

        As in the `from_preset` of its language model, with the backbone's arguments alone.

        Example:

        >>> import keras_recurrent
        >>> backbone = keras_recurrent.models.GriffinBackbone.from_preset("hawk_tiny")
        >>> backbone.count_params()
        921088
        """
        from keras_recurrent.checkpoints import loading  # only when asked for

        loader, load_weights, kwargs = loading.resolve_backbone(cls, preset, load_weights, kwargs)
        return super().from_preset(loader, load_weights, **kwargs)

    def hidden_states(
        self, token_ids, padding_mask=None, segment_ids=None, cache=None, intercept=None
    ):
        """The hidden states of tokens, from embedding to last norm.

        Args:
            token_ids: integers `[B, T]`.
            padding_mask: boolean `[B, T]`; None: all tokens are real.
            segment_ids: integers `[B, T]`; None: one document a row, or the one before goes on.
            cache: the blocks' states to go on from; None: nothing was seen, and no cache returns.
            intercept: a function of activations and a number, -1 for the embeddings and i for the
                output of block i; the network goes on with what it returns.

        Returns:
            `(hidden states [B, T, hidden_dim], cache)`.

        Raises:
            ValueError: a cache of another number of blocks, or of other shapes.
        """
        if cache is not None and len(cache) != len(self.transformer_layers):
            raise ValueError(
                f"`cache` must hold a state for each of {len(self.transformer_layers)} blocks, as "
                f"`get_initial_state(batch_size)` makes it; got {len(cache)}."
            )
        intercept = intercept or (lambda x, i: x)
        x = self.token_embedding(token_ids)
        if self.embedding_scale is not None:
            x = ops.multiply(x, self.embedding_scale)
        x = intercept(x, -1)
        states = []
        arguments = self.block_arguments(x)
        # As to layers inside one: Keras would attach a `mask` to all that follows, and rescale the
        # loss by it.
        kind = self._token_kind(token_ids, padding_mask, segment_ids, cache)
        tokens = Tokens(padding_mask, segment_ids, kind).of_sublayer()
        for i, (block, further) in enumerate(zip(self.transformer_layers, arguments, strict=True)):
            if cache is None:
                x = block(x, **tokens, **further)
            else:
                x, state = block(x, **tokens, **further, initial_state=cache[i], return_state=True)
                states.append(state)
            x = intercept(x, i)
        return self.final_norm(x), None if cache is None else tuple(states)

    def _token_kind(self, token_ids, padding_mask, segment_ids, cache):
        """One for all blocks: their states are of the same tokens."""
        state, segment = None, None
        if cache is not None:
            state = cache[0]
            self.transformer_layers[0].check_state(state, token_ids.shape[0])
            segment = segment_of(state)
        return token_kind(token_ids, padding_mask, segment_ids, segment, initial_state=state)

    def block_arguments(self, embeddings):
        """A dictionary of further call arguments for each block: what a family's blocks share."""
        return [{} for _ in self.transformer_layers]

    def get_initial_state(self, batch_size, max_length=None):
        """The generation cache in which nothing was seen: a tuple of the blocks' states.

        Args:
            batch_size: integer, rows.
            max_length: integer, the most tokens that a row will have. Blocks of attention keep the
                keys and values of that many, or of their window where it is shorter, and need to
                be told where there is no window. A recurrent block's state has one size.

        Raises:
            ValueError: a number that is no integer from 1 on, or no `max_length` where a block
                needs it.
        """
        for name, number in (("batch_size", batch_size), ("max_length", max_length)):
            if isinstance(number, (int, float, str)):  # not a tensor, as in a graph
                check_positive_integer(name, number)
        return tuple(
            block.get_initial_state(batch_size, max_length) for block in self.transformer_layers
        )

    def export_to_transformers(self, path, dtype=None, max_shard_size=5):
        """Writes the network as a checkpoint; see the method of the language model."""
        from keras_recurrent.checkpoints.export import export  # only when asked for

        export(self, path, dtype=dtype, max_shard_size=max_shard_size)

    def rematerialized_call(self, layer_call, *args, **kwargs):
        return layer_call  # its blocks recompute, the whole would keep nothing

    def enable_lora(self, rank, target_layer_names=None):
        """Freezes all weights but new low-rank ones beside some kernels, as in KerasHub."""
        super().enable_lora(rank, target_layer_names)
        # KerasHub leaves the biases beside those kernels to train, but never saves them.
        for layer in self._flatten_layers(include_self=False):
            if getattr(layer, "lora_enabled", False) and layer.bias is not None:
                layer.bias.trainable = False


def check_sizes(**sizes):
    """Raises for a size that is no integer from 1 on, before any layer is made of it."""
    for name, size in sizes.items():
        check_positive_integer(name, size)


def reversible_embedding(
    vocabulary_size, hidden_dim, tie_weights=True, logit_soft_cap=None, dtype=None
):
    """The `token_embedding` of a backbone, which also makes the logits."""
    return keras.layers.ReversibleEmbedding(
        vocabulary_size,
        hidden_dim,
        tie_weights=tie_weights,
        # Logits of about unit variance: the last norm leaves states of unit size.
        embeddings_initializer=keras.initializers.RandomNormal(stddev=hidden_dim**-0.5),
        logit_soft_cap=logit_soft_cap,
        # By itself, Keras computes logits in float32 inside a model, though not outside.
        reverse_dtype=keras.dtype_policies.get(dtype).compute_dtype,
        dtype=dtype,
        name="token_embedding",
    )


def layout_map_with_axes(device_mesh, model_parallel_dim_name, data_parallel_dim_name):
    """An empty `keras.distribution.LayoutMap`, once the mesh has axes of these names.

    Raises:
        ValueError: `device_mesh` is no mesh or lacks one of the axes.
    """
    if not isinstance(device_mesh, keras.distribution.DeviceMesh):
        raise ValueError(
            "`device_mesh` must be a `keras.distribution.DeviceMesh`. Received: "
            f"{type(device_mesh).__name__}"
        )
    for argument, name in (
        ("data_parallel_dim_name", data_parallel_dim_name),
        ("model_parallel_dim_name", model_parallel_dim_name),
    ):
        if name not in device_mesh.axis_names:
            raise ValueError(
                f"`{argument}` must be an axis of `device_mesh`, one of "
                f"{device_mesh.axis_names}. Received: {name!r}"
            )
    return keras.distribution.LayoutMap(device_mesh)
