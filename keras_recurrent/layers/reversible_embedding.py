"""Token embedding of a backbone, which also computes the logits."""

import keras
from keras import ops

from keras_recurrent import dispatch
from keras_recurrent.compat import AutocastScope
from keras_recurrent.devices import jax_steps
from keras_recurrent.devices.jax_layouts import apply_layout
from keras_recurrent.layers import decoding, quantized
from keras_recurrent.layers.integer_products import transposed_scope
from keras_recurrent.layers.tokens import Tokens
from keras_recurrent.layers.weight_copies import find_copy
from keras_recurrent.ops.decoding_steps import embedding_step, norm_quantized_linear, soft_cap


@keras.saving.register_keras_serializable(package="keras_recurrent")
class ReversibleEmbedding(keras.layers.ReversibleEmbedding):
    """Keras's `ReversibleEmbedding` with fused decoding steps, and a config without LoRA weights.

    A clone of a language model has two copies of the embedding, in the backbone and for the logits.
    Only the second would get low-rank weights, and Keras cannot build untied embeddings with them.
    The class has the same name as Keras's, which weight files contain.
    """

    def get_config(self):
        config = super().get_config()
        return {name: value for name, value in config.items() if not name.startswith("lora_")}

    def call(self, inputs, reverse=False):
        if reverse:
            outputs = self._fused_logits(inputs)
            if outputs is None:
                outputs = self._logits_by_xla(inputs)
            if outputs is None:
                outputs = super().call(inputs, reverse=True)
            return apply_layout(outputs, "logits")
        outputs = self._split_embedding(inputs)
        return apply_layout(self._look_up(inputs) if outputs is None else outputs, "hidden_states")

    def quantized_call(self, inputs, reverse=False):
        outputs = self._fused_logits(inputs) if reverse else None
        if outputs is not None:
            return outputs
        if not reverse or self.quantization_mode != "int8" or dispatch.BACKEND != "jax":
            return super().quantized_call(inputs, reverse)
        matrix = self._embeddings.value if self.tie_weights else find_copy(self.reverse_embeddings)
        with transposed_scope(matrix):
            return super().quantized_call(inputs, reverse=True)

    def fused_embedding(self, token_ids, scale=None, state=None):
        """Returns scaled embeddings of token ids [B, 1] from one kernel, or None if unsupported.

        With a state, returns `(embeddings, tokens, token_state)`, the last two as from
        `tokens.compute_tokens`; all tokens must be real. On JAX, XLA fuses this without a kernel.
        """
        if dispatch.BACKEND != "torch" or self.mask_zero:
            return None
        token_ids = ops.convert_to_tensor(token_ids)
        changed = self.lora_enabled or self.quantization_mode is not None or "call" in vars(self)
        if changed or not decoding.can_fuse(token_ids):
            return None
        x, kind, position, *after = embedding_step(
            table=ops.convert_to_tensor(self.embeddings),
            token_ids=token_ids[:, 0],
            segment=(state or {}).get("segment"),
            position=(state or {}).get("position"),
            scale=1.0 if scale is None else scale,
            dtype=self.compute_dtype,
        )
        if state is None:
            return x[:, None]
        tokens = Tokens(kind[:, None], None if position is None else position[:, None])
        entries = zip(("segment", "position"), after, strict=True)
        return x[:, None], tokens, {name: entry for name, entry in entries if entry is not None}

    def _look_up(self, token_ids):
        """Returns what Keras's `call` does; gradients of equal tokens are summed in float32.

        Keras sums them in the dtype of the computations. In bfloat16, adding more than 256 equal
        numbers does not increase the sum, but a batch has more of a frequent token.
        """
        with AutocastScope(None):
            if self.mask_zero:
                return super().call(token_ids)
            if not self.lora_enabled:
                return ops.cast(_take_rows(self.embeddings, token_ids), self.compute_dtype)
            low_rank = _take_rows(self.lora_embeddings_a, token_ids)
            low_rank = ops.matmul(low_rank, ops.cast(self.lora_embeddings_b, low_rank.dtype))
            rows = ops.cast(_take_rows(self._embeddings, token_ids), low_rank.dtype)
            rows = rows + (self.lora_alpha / self.lora_rank) * low_rank
            return ops.cast(rows, self.compute_dtype)

    def _split_embedding(self, token_ids):
        """Returns embeddings of token ids [B, 1] in a decoding step if devices share the table.

        Otherwise returns None.
        """
        if token_ids.shape[1] != 1 or not decoding.is_active():
            return None
        if self.lora_enabled or self.mask_zero:
            return None
        x = jax_steps.take_rows(self.embeddings, token_ids)
        return None if x is None else ops.cast(x, self.compute_dtype)

    def _fused_logits(self, hidden_states):
        """Returns the logits of hidden states [B, 1, D], or None without a suitable kernel.

        One kernel multiplies a vector by a quantized matrix, which Keras would convert to floats.
        On torch, another applies the soft cap.
        """
        if keras.distribution.distribution() is not None:
            return None  # XLA splits the product, but not a kernel
        quantized_row = self.quantization_mode is not None
        has_cap = self.logit_soft_cap is not None and dispatch.BACKEND == "torch"
        if not (has_cap or quantized_row) or not decoding.can_fuse(hidden_states):
            return None
        if quantized_row:
            if hidden_states.shape[0] > 1 or quantized.logits_reason(self) is not None:
                return None
            hidden = ops.cast(hidden_states[:, 0], self.compute_dtype)
            (logits,) = norm_quantized_linear(x=hidden, **quantized.logits_weights(self))
        else:
            dtype = self.reverse_dtype or self.compute_dtype
            hidden = ops.cast(hidden_states[:, 0], dtype)
            kernel = ops.transpose(self.embeddings) if self.tie_weights else self.reverse_embeddings
            logits = ops.matmul(hidden, ops.cast(kernel, dtype))
        if self.logit_soft_cap is not None:
            logits = soft_cap(x=logits, cap=self.logit_soft_cap)
        return logits[:, None]

    def _logits_by_xla(self, hidden_states):
        """Returns the logits, or None if Keras's `call` should compute them.

        Reads the float32 copy of the weights if there is one. Without a copy, only tied embeddings
        with a `reverse_dtype` are multiplied here, on JAX and without a transposition: in a loop on
        CPUs, XLA would fuse the transposition with the product and compute both on one core.
        """
        table = self.embeddings if self.tie_weights else self.reverse_embeddings
        copy, dtype = find_copy(table), self.reverse_dtype
        if copy is None and (dtype is None or not self.tie_weights or dispatch.BACKEND != "jax"):
            return None
        dtype = dtype or hidden_states.dtype
        kernel = ops.cast(table, dtype) if copy is None else copy
        hidden_states = ops.cast(ops.cast(hidden_states, dtype), kernel.dtype)
        equation = "...d,vd->...v" if self.tie_weights else "...d,dv->...v"
        logits = ops.cast(ops.einsum(equation, hidden_states, kernel), dtype)
        cap = self.logit_soft_cap
        return logits if cap is None else ops.tanh(logits / cap) * cap

    def quantize(self, mode=None, type_check=True, config=None):
        # Keras rejects subclasses, which might compute something else; this one does not.
        super().quantize(mode, type_check=False, config=config)


def _take_rows(variable, token_ids):
    """Returns rows of a variable, or of its float32 copy, outside of autocast.

    Gradients are summed in float32.
    """
    dtype = keras.backend.standardize_dtype(variable.value.dtype)
    # torch's kernel on GPUs sums in float32.
    if dtype == "float32" or (dispatch.BACKEND == "torch" and variable.value.is_cuda):
        return ops.take(variable, token_ids, axis=0)
    copy = find_copy(variable)
    if copy is not None:
        return ops.take(copy, token_ids, axis=0)
    token_ids, shape = ops.convert_to_tensor(token_ids), variable.shape

    @ops.custom_gradient
    def take(table):
        def gradient(*arguments, upstream=None):
            rows = ops.reshape(arguments[0] if upstream is None else upstream, (-1, shape[1]))
            rows, ids = ops.cast(rows, "float32"), ops.reshape(token_ids, (-1,))
            return ops.cast(ops.segment_sum(rows, ids, num_segments=shape[0]), dtype)

        return ops.take(table, token_ids, axis=0), gradient

    return take(ops.cast(variable, dtype))


def reversible_embedding(
    vocabulary_size, hidden_dim, tie_weights=True, logit_soft_cap=None, dtype=None
):
    """Creates the `token_embedding` of a backbone, which also computes the logits."""
    return ReversibleEmbedding(
        vocabulary_size,
        hidden_dim,
        tie_weights=tie_weights,
        # Logits have about unit variance, because the final norm scales hidden states to unit size.
        embeddings_initializer=keras.initializers.RandomNormal(stddev=hidden_dim**-0.5),
        logit_soft_cap=logit_soft_cap,
        # By default, Keras computes the logits in float32 inside a model, but not outside.
        reverse_dtype=keras.dtype_policies.get(dtype).compute_dtype,
        dtype=dtype,
        name="token_embedding",
    )
