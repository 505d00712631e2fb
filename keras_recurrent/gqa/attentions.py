"""Grouped-query versions of the cached attention layers in KerasHub's models.

Each takes the arguments of the layer that it replaces. Its cache is [B, 2, S, G, K] instead of
[B, 2, S, N, K]: smaller by N / G. `num_key_value_heads` is G. Query head n uses group n // (N / G)
(Ainslie et al. 2023, arXiv:2305.13245, figure 2).
"""

import keras
import keras_hub
from keras import ops

from keras_recurrent.compat import BloomAttention, GPTNeoXAttention, T5MultiHeadAttention


class GroupedAttention:
    """Mixin of the grouped versions of a layer: the argument `num_key_value_heads`."""

    def __init__(self, *args, num_key_value_heads, **kwargs):
        super().__init__(*args, **kwargs)
        self.num_key_value_heads = num_key_value_heads

    def get_config(self):
        return super().get_config() | {"num_key_value_heads": self.num_key_value_heads}  # type: ignore[misc]


@keras.saving.register_keras_serializable(package="keras_recurrent")
class CachedGroupedQueryAttention(GroupedAttention, keras_hub.layers.CachedMultiHeadAttention):
    """Grouped `CachedMultiHeadAttention`, for GPT-2, OPT, BART and `TransformerDecoder`."""

    def build(self, query_shape, value_shape, key_shape=None):
        key_shape = value_shape if key_shape is None else key_shape
        heads, groups = self.num_heads, self.num_key_value_heads
        self._query_dense = self._projection("query", heads, self.key_dim, query_shape)
        self._key_dense = self._projection("key", groups, self.key_dim, key_shape)
        self._value_dense = self._projection("value", groups, self.value_dim, value_shape)
        self._build_attention(4)
        self._output_dense = keras.layers.EinsumDense(
            "btnv,nvd->btd",
            output_shape=(None, *(self._output_shape or query_shape[-1:])),
            bias_axes="d" if self.use_bias else None,
            name="attention_output",
            **self._get_common_kwargs_for_sublayer(),
        )
        self._output_dense.build((None, None, heads, self.value_dim))

    def _projection(self, name, heads, size, input_shape):
        layer = keras.layers.EinsumDense(
            "btd,dnk->btnk",
            output_shape=(None, heads, size),
            bias_axes="nk" if self.use_bias else None,
            name=name,
            **self._get_common_kwargs_for_sublayer(),
        )
        layer.build(input_shape)
        return layer

    def _compute_attention(
        self,
        query,
        key,
        value,
        attention_mask=None,
        training=None,
        return_attention_scores=False,
    ):
        repeats = self.num_heads // self.num_key_value_heads
        output, scores = super()._compute_attention(
            _fold_queries(query, self.num_key_value_heads),
            key,
            value,
            attention_mask=_fold_mask(attention_mask, repeats),
            training=training,
            return_attention_scores=return_attention_scores,
        )
        if scores is not None:
            # [B, G, T · repeats, S]: move the time axis for `_unfold_outputs`.
            scores = ops.transpose(scores, (0, 2, 1, 3))
            scores = ops.transpose(_unfold_outputs(scores, self.num_heads), (0, 2, 1, 3))
        return _unfold_outputs(output, self.num_heads), scores


@keras.saving.register_keras_serializable(package="keras_recurrent")
class GroupedBloomAttention(GroupedAttention, BloomAttention):
    """Grouped attention of Bloom, with ALiBi, a linear bias per query head (arXiv:2108.12409)."""

    def build(self, inputs_shape):
        hidden_dim = inputs_shape[-1]
        self._head_dim = hidden_dim // self.num_heads
        groups = self.num_key_value_heads
        self._query_dense = self._projection("query_dense", self.num_heads, inputs_shape)
        self._key_dense = self._projection("key_dense", groups, inputs_shape)
        self._value_dense = self._projection("value_dense", groups, inputs_shape)
        self._alibi_layer = keras_hub.layers.AlibiBias(dtype=self.dtype_policy)
        self._output_dense = keras.layers.Dense(
            hidden_dim, name="output_dense", **_dense_arguments(self)
        )
        self._output_dense.build(inputs_shape)
        self._dropout_layer = keras.layers.Dropout(
            self.dropout, dtype=self.dtype_policy, name="dropout"
        )
        self._softmax = keras.layers.Softmax(dtype="float32", name="softmax")

    def _projection(self, name, heads, input_shape):
        output_shape = (heads, self._head_dim)
        return _build_einsum(self, name, "btd,dnk->btnk", output_shape, input_shape)

    def call(self, hidden_states, attention_mask=None, cache=None, cache_update_index=None):
        batch, length, hidden_dim = ops.shape(hidden_states)
        query = self._query_dense(hidden_states)
        key, value, cache = _update_cache(
            cache,
            cache_update_index,
            lambda: (self._key_dense(hidden_states), self._value_dense(hidden_states)),
        )
        scores = self._alibi_layer(_attention_scores(query, key) * self._head_dim**-0.5)
        output = _attend(self, scores, value, attention_mask)
        output = ops.reshape(output, (batch, length, hidden_dim))
        output = self._dropout_layer(self._output_dense(output))
        return output if cache is None else (output, cache)


@keras.saving.register_keras_serializable(package="keras_recurrent")
class GroupedGPTNeoXAttention(GroupedAttention, GPTNeoXAttention):
    """Grouped attention of GPT-NeoX, with rotary positions on the first part of each head.

    GPT-NeoX has one kernel for queries, keys and values; here queries have a separate kernel.
    """

    def build(self, input_shape):
        groups, size = self.num_key_value_heads, self.attn_head_size
        self._query_dense = _build_einsum(
            self, "query", "btd,dnk->btnk", (self.num_heads, size), input_shape
        )
        self._key_value_dense = _build_einsum(
            self, "key_value", "btd,dnk->btnk", (groups, 2 * size), input_shape
        )
        self._output_dense = _build_einsum(
            self, "attention_output", "btd,dk->btk", (self.hidden_dim,), input_shape
        )
        self._softmax = keras.layers.Softmax(dtype="float32", name="attention_softmax")
        self._dropout_layer = keras.layers.Dropout(
            self.dropout, dtype=self.dtype_policy, name="attention_dropout"
        )

    def call(
        self,
        hidden_states,
        attention_mask=None,
        cache=None,
        cache_update_index=None,
        training=None,
    ):
        batch, length, _ = ops.shape(hidden_states)
        start = 0 if cache_update_index is None else cache_update_index
        query = self._rotate(self._query_dense(hidden_states), start)
        key, value, cache = _update_cache(
            cache,
            cache_update_index,
            lambda: ops.split(self._key_value_dense(hidden_states), 2, axis=-1),
        )
        # As in KerasHub, the cache has keys before rotation; the first is at position 0.
        scores = _attention_scores(query, self._rotate(key, 0)) * self.attn_head_size**-0.5
        output = _attend(self, scores, value, attention_mask, training)
        output = self._output_dense(ops.reshape(output, (batch, length, self.hidden_dim)))
        return output, cache

    def _rotate(self, x, start):
        rotated = self.rotary_embedding_layer(x[..., : self.rotary_dim], start_index=start)
        return ops.concatenate((rotated, x[..., self.rotary_dim :]), axis=-1)

    def split_fused(self, kernel):
        """Splits a fused kernel or bias [..., N, 3 K] into queries, and keys with values."""
        return kernel[..., : self.attn_head_size], kernel[..., self.attn_head_size :]

    def get_config(self):
        config = super().get_config()
        del config["max_sequence_length"]  # KerasHub does not use it
        return config


@keras.saving.register_keras_serializable(package="keras_recurrent")
class GroupedT5Attention(GroupedAttention, T5MultiHeadAttention):
    """Grouped self- or cross-attention of T5's decoder, with relative positions."""

    def __init__(self, *, num_key_value_heads, **kwargs):
        super().__init__(num_key_value_heads=num_key_value_heads, **kwargs)
        for projector in (self.key_projector, self.value_projector):  # neither is built yet
            projector.units = num_key_value_heads * self.key_value_dim

    def call(
        self,
        hidden_states,
        mask=None,
        key_value_states=None,
        position_bias=None,
        cache=None,
        cache_update_index=None,
        training=False,
    ):
        batch, length, _ = ops.shape(hidden_states)
        source = hidden_states if key_value_states is None else key_value_states

        def split_heads(states, heads):
            return ops.reshape(states, (batch, -1, heads, self.key_value_dim))

        query = split_heads(self.query_projector(hidden_states), self.num_heads)
        key, value, cache = _update_cache(
            cache,
            cache_update_index,
            lambda: (
                split_heads(self.key_projector(source), self.num_key_value_heads),
                split_heads(self.value_projector(source), self.num_key_value_heads),
            ),
        )
        # T5 does not scale scores. The first layer of a stack makes the bias, including the mask.
        scores = _attention_scores(query, key)
        if position_bias is None:
            position_bias = self._bias(length, ops.shape(key)[1], cache_update_index)
            if mask is not None:
                mask = ops.cast(ops.expand_dims(mask, 1), position_bias.dtype)
                position_bias = position_bias + (1.0 - mask) * -1e9
        weights = ops.softmax(scores + ops.cast(position_bias, scores.dtype), axis=-1)
        output = _mix_values(self.dropout_layer(weights, training=training), value)
        output = self.output_projector(ops.reshape(output, (batch, length, self.inner_dim)))
        return output, position_bias, cache

    def _bias(self, query_length, key_length, start):
        if not self.use_relative_attention_bias:
            shape = (1, self.num_heads, query_length, key_length)
            return ops.zeros(shape, self.compute_dtype)
        return self.compute_bias(query_length, key_length, 0 if start is None else start)

    def get_config(self):
        return super().get_config() | t5_arguments(self)


def t5_arguments(layer):
    """Returns the constructor arguments of a T5 attention layer, which has no `get_config`."""
    return {
        "is_decoder": layer.is_decoder,
        "hidden_dim": layer.hidden_dim,
        "key_value_dim": layer.key_value_dim,
        "num_heads": layer.num_heads,
        "dropout": layer.dropout_layer.rate,
        "use_relative_attention_bias": layer.use_relative_attention_bias,
    }


def _build_einsum(layer, name, equation, output_shape, input_shape):
    """Returns a built projection of a Bloom or GPT-NeoX attention layer."""
    dense = keras.layers.EinsumDense(
        equation,
        output_shape=(None, *output_shape),
        bias_axes="nk" if len(output_shape) > 1 else "k",
        name=name,
        **_dense_arguments(layer),
    )
    dense.build(input_shape)
    return dense


def _dense_arguments(layer):
    return {
        "kernel_initializer": _copy_initializer(layer.kernel_initializer),
        "bias_initializer": _copy_initializer(layer.bias_initializer),
        "dtype": layer.dtype_policy,
    }


def _copy_initializer(initializer):
    """Copies an initializer: one object shared by two weights would draw equal numbers."""
    return type(initializer).from_config(initializer.get_config())


def _fold_queries(query, groups):
    """[B, T, N, K] → [B, T · N / G, G, K]: the heads of a group become queries of one head.

    Any attention kernel then reads keys and values once per group, without repeating them.
    """
    batch, length, heads, size = ops.shape(query)
    query = ops.reshape(query, (batch, length, groups, heads // groups, size))
    query = ops.transpose(query, (0, 1, 3, 2, 4))
    return ops.reshape(query, (batch, length * (heads // groups), groups, size))


def _fold_mask(mask, repeats):
    """[B, T, S] → [B, T · repeats, S], like the queries; [B, 1, S] applies to all queries."""
    if mask is None or mask.shape[1] == 1:
        return mask
    return ops.repeat(mask, repeats, axis=1)


def _unfold_outputs(output, heads):
    """[B, T · N / G, G, V] → [B, T, N, V], the inverse of `_fold_queries`."""
    batch, rows, groups, size = ops.shape(output)
    repeats = heads // groups
    output = ops.reshape(output, (batch, rows // repeats, repeats, groups, size))
    output = ops.transpose(output, (0, 1, 3, 2, 4))
    return ops.reshape(output, (batch, rows // repeats, heads, size))


def _attention_scores(query, key):
    """q · k for each query head: [B, T, N, K], [B, S, G, K] → [B, N, T, S]."""
    batch, length, heads, size = ops.shape(query)
    groups = key.shape[2]
    query = ops.reshape(query, (batch, length, groups, heads // groups, size))
    scores = ops.einsum("btgrk,bsgk->bgrts", query, key)
    return ops.reshape(scores, (batch, heads, length, ops.shape(key)[1]))


def _attend(layer, scores, value, mask, training=None):
    """Returns the outputs of the heads of Bloom or GPT-NeoX; mask: [B, T, S], or None."""
    mask = None if mask is None else ops.expand_dims(mask, 1)
    weights = layer._dropout_layer(layer._softmax(scores, mask), training=training)
    return _mix_values(ops.cast(weights, layer.compute_dtype), value)


def _mix_values(weights, value):
    """Σ weight · v for each query head: [B, N, T, S], [B, S, G, V] → [B, T, N, V]."""
    batch, heads, length, positions = ops.shape(weights)
    groups = value.shape[2]
    weights = ops.reshape(weights, (batch, groups, heads // groups, length, positions))
    output = ops.einsum("bgrts,bsgv->btgrv", weights, value)
    return ops.reshape(output, (batch, length, heads, value.shape[3]))


def _update_cache(cache, index, project):
    """Writes new keys and values to a cache [B, 2, S, G, K]; returns keys, values and the cache.

    Args:
        cache: the array. None: returns the new keys and values.
        index: the position to write to. None: the cache is not changed.
        project: a function without arguments that returns the new keys and values, [B, T, G, K].
    """
    if cache is None:
        if index is not None:
            raise ValueError(f"`cache_update_index` is {index}, but there is no `cache`.")
        return *project(), None
    key, value = cache[:, 0], cache[:, 1]
    if index is not None:
        new_key, new_value = project()
        start = (0, index, 0, 0)
        key = ops.slice_update(key, start, ops.cast(new_key, key.dtype))
        value = ops.slice_update(value, start, ops.cast(new_value, value.dtype))
        cache = ops.stack((key, value), axis=1)
    return key, value, cache
