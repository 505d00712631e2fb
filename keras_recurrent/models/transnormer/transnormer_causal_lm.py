"""TransNormerLLM as a language model."""

import keras

from keras_recurrent.models.recurrent_causal_lm import RecurrentCausalLM
from keras_recurrent.models.transnormer.text import TransNormerCausalLMPreprocessor
from keras_recurrent.models.transnormer.transnormer_backbone import TransNormerBackbone


@keras.saving.register_keras_serializable(package="keras_recurrent")
class TransNormerCausalLM(RecurrentCausalLM):
    """TransNormerLLM as a language model.

    A `TransNormerBackbone`, and the logits of the next token from weights beside its embedding's.
    Qin et al. 2023 (arXiv:2307.14995) and 2024 (arXiv:2405.17381). It does what a KerasHub causal
    language model does: `fit` and `evaluate` on strings or tokens, `generate`, `score`,
    `save_to_preset`, LoRA through `backbone.enable_lora`, `quantize("int8")`. A token takes the
    same time at every length of text, to learn and to write.

    Args:
        backbone: a `TransNormerBackbone`.
        preprocessor: a `TransNormerCausalLMPreprocessor`; None: inputs are tokens.
        compile: whether to compile with KerasHub's defaults. They suit fine-tuning (Adam at 2e-5):
            compile with an optimizer of your own to train from the start.
        name: string.
        trainable: boolean.

    Call arguments:
        inputs: a dictionary of `token_ids`, `padding_mask` and optionally `segment_ids`, all
            `[B, T]`, as `TransNormerBackbone` takes them.

    Returns:
        Logits `[B, T, vocabulary_size]`, in the compute dtype.

    Raises:
        ValueError: a backbone or preprocessor of another kind, or a tokenizer with tokens that the
            backbone does not know.

    Example: a small TransNormerLLM learns a text and goes on with it.

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
