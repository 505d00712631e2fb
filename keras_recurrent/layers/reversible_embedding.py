"""The token embedding of a backbone, which also makes the logits."""

import keras

from keras_recurrent.devices.jax_layouts import apply_layout
from keras_recurrent.layers import one_token


@keras.saving.register_keras_serializable(package="keras_recurrent")
class ReversibleEmbedding(keras.layers.ReversibleEmbedding):
    """Keras's, whose configuration leaves out low-rank weights, as a backbone's does.

    A clone of a language model has the embedding inside the backbone and for the logits. Only the
    latter would get low-rank weights, and Keras cannot build untied ones with them. The class has
    the name of Keras's, by which files of weights find it.
    """

    def get_config(self):
        config = super().get_config()
        return {name: value for name, value in config.items() if not name.startswith("lora_")}

    def call(self, inputs, reverse=False):
        outputs = one_token.logits(inputs, self) if reverse else None
        if outputs is None:
            outputs = super().call(inputs, reverse)
        return apply_layout(outputs, "logits" if reverse else "hidden_states")

    def quantized_call(self, inputs, reverse=False):
        outputs = one_token.logits(inputs, self) if reverse else None
        return super().quantized_call(inputs, reverse) if outputs is None else outputs

    def quantize(self, mode=None, type_check=True, config=None):
        # Keras refuses subclasses, which might compute something else; this one does not.
        super().quantize(mode, type_check=False, config=config)


def reversible_embedding(
    vocabulary_size, hidden_dim, tie_weights=True, logit_soft_cap=None, dtype=None
):
    """The `token_embedding` of a backbone, which also makes the logits."""
    return ReversibleEmbedding(
        vocabulary_size,
        hidden_dim,
        tie_weights=tie_weights,
        # So that logits have about unit variance: the last norm makes hidden states of unit size.
        embeddings_initializer=keras.initializers.RandomNormal(stddev=hidden_dim**-0.5),
        logit_soft_cap=logit_soft_cap,
        # Without this, Keras computes the logits in float32 inside a model, but not outside.
        reverse_dtype=keras.dtype_policies.get(dtype).compute_dtype,
        dtype=dtype,
        name="token_embedding",
    )
