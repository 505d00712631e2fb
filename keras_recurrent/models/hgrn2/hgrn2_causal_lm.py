"""Language model with HGRN2."""

import keras

from keras_recurrent.models.hgrn2.hgrn2_backbone import HGRN2Backbone
from keras_recurrent.models.hgrn2.text import HGRN2CausalLMPreprocessor
from keras_recurrent.models.recurrent_causal_lm import RecurrentCausalLM


@keras.saving.register_keras_serializable(package="keras_recurrent")
class HGRN2CausalLM(RecurrentCausalLM):
    """Language model with HGRN2.

    An `HGRN2Backbone`, and logits of the next token. Qin et al. 2024, arXiv:2404.07904. The class
    supports KerasHub's causal language model API: `fit` and `evaluate` on strings or tokens,
    `generate`, `score`, `save_to_preset`, LoRA by `backbone.enable_lora`, and `quantize("int8")`.
    Time and memory of a decoding step do not depend on the length of the text, except in hybrids
    with attention to all tokens.

    Args:
        backbone: an `HGRN2Backbone`.
        preprocessor: an `HGRN2CausalLMPreprocessor`; None: inputs are tokens.
        compile: boolean, compiles with KerasHub's defaults, which suit fine-tuning (Adam at 2e-5).
            To train from scratch, compile with another optimizer.
        name: string.
        trainable: boolean.

    Call arguments:
        inputs: a dictionary of `token_ids`, `padding_mask` and optionally `segment_ids`, all
            `[B, T]`, as `HGRN2Backbone` takes them.

    Returns:
        Logits `[B, T, vocabulary_size]`, in the compute dtype.

    Raises:
        ValueError: the backbone or preprocessor is of another class, or the tokenizer has more
            tokens than the backbone.

    Example: a small HGRN2 learns a text and continues it. `"hgrn2_1.3b_100b"` has weights on the
    Hugging Face Hub.

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
