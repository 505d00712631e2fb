"""Language model with TransNormerLLM."""

import keras

from keras_recurrent.models.recurrent_causal_lm import RecurrentCausalLM
from keras_recurrent.models.transnormer.text import TransNormerCausalLMPreprocessor
from keras_recurrent.models.transnormer.transnormer_backbone import TransNormerBackbone


@keras.saving.register_keras_serializable(package="keras_recurrent")
class TransNormerCausalLM(RecurrentCausalLM):
    """Language model with TransNormerLLM.

    A `TransNormerBackbone`, and logits of the next token computed by separate weights. Qin et al.
    2023 (arXiv:2307.14995) and 2024 (arXiv:2405.17381). The class supports KerasHub's causal
    language model API: `fit` and `evaluate` on strings or tokens, `generate`, `score`,
    `save_to_preset`, LoRA by `backbone.enable_lora`, and `quantize("int8")`. The time per token in
    training and in decoding does not depend on the length of the text.

    Args:
        backbone: a `TransNormerBackbone`.
        preprocessor: a `TransNormerCausalLMPreprocessor`; None: inputs are tokens.
        compile: boolean, compiles with KerasHub's defaults, which suit fine-tuning (Adam at 2e-5).
            To train from scratch, compile with another optimizer.
        name: string.
        trainable: boolean.

    Call arguments:
        inputs: a dictionary of `token_ids`, `padding_mask` and optionally `segment_ids`, all
            `[B, T]`, as `TransNormerBackbone` takes them.

    Returns:
        Logits `[B, T, vocabulary_size]`, in the compute dtype.

    Raises:
        ValueError: the backbone or preprocessor is of another class, or the tokenizer has more
            tokens than the backbone.

    Example: a small TransNormerLLM learns a text and continues it.

    >>> import keras, keras_recurrent
    >>> model = keras_recurrent.models.TransNormerCausalLM.from_preset("tnl_tiny", num_layers=1)
    >>> model.compile(keras.optimizers.Adam(1e-3), model.loss, sampler="greedy")
    >>> history = model.fit(["All happy families are alike."] * 4, batch_size=2, verbose=0)
    >>> text = model.generate("All happy", max_length=20)
    >>> text.startswith("All happy")
    True
    """

    backbone_cls = TransNormerBackbone
    preprocessor_cls = TransNormerCausalLMPreprocessor
