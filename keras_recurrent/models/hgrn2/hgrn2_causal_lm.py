"""HGRN2 as a language model."""

import keras

from keras_recurrent.models.hgrn2.hgrn2_backbone import HGRN2Backbone
from keras_recurrent.models.hgrn2.text import HGRN2CausalLMPreprocessor
from keras_recurrent.models.recurrent_causal_lm import RecurrentCausalLM


@keras.saving.register_keras_serializable(package="keras_recurrent")
class HGRN2CausalLM(RecurrentCausalLM):
    """HGRN2 as a language model.

    An `HGRN2Backbone`, and the logits of the next token. Qin et al. 2024, arXiv:2404.07904. It does
    what a KerasHub causal language model does: `fit` and `evaluate` on strings or tokens,
    `generate`, `score`, `save_to_preset`, LoRA through `backbone.enable_lora`, `quantize("int8")`.
    A step of generation takes the same time and memory at every length of text.

    Args:
        backbone: an `HGRN2Backbone`.
        preprocessor: an `HGRN2CausalLMPreprocessor`; None: inputs are tokens.
        compile: whether to compile with KerasHub's defaults. They suit fine-tuning (Adam at 2e-5):
            compile with an optimizer of your own to train from the start.
        name: string.
        trainable: boolean.

    Call arguments:
        inputs: a dictionary of `token_ids`, `padding_mask` and optionally `segment_ids`, all
            `[B, T]`, as `HGRN2Backbone` takes them.

    Returns:
        Logits `[B, T, vocabulary_size]`, in the compute dtype.

    Raises:
        ValueError: a backbone or preprocessor of another kind, or a tokenizer with tokens that the
            backbone does not know.

    Example: a small HGRN2 learns a text and goes on with it. `"hgrn2_1.3b_100b"` comes with
    weights, from the Hugging Face Hub.

    >>> import keras, keras_recurrent
    >>> model = keras_recurrent.models.HGRN2CausalLM.from_preset("hgrn2_tiny", num_layers=1)
    >>> model.compile(keras.optimizers.Adam(1e-3), model.loss, sampler="greedy")
    >>> history = model.fit(["All happy families are alike."] * 4, batch_size=2, verbose=0)
    >>> text = model.generate("All happy", max_length=20)
    >>> text.startswith("All happy")
    True
    """

    backbone_cls = HGRN2Backbone
    preprocessor_cls = HGRN2CausalLMPreprocessor
