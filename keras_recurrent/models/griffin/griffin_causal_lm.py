"""Hawk and Griffin as language models."""

import keras

from keras_recurrent.models.griffin.griffin_backbone import GriffinBackbone
from keras_recurrent.models.griffin.text import GriffinCausalLMPreprocessor
from keras_recurrent.models.recurrent_causal_lm import RecurrentCausalLM


@keras.saving.register_keras_serializable(package="keras_recurrent")
class GriffinCausalLM(RecurrentCausalLM):
    """Hawk and Griffin as language models.

    A `GriffinBackbone`, and the logits of the next token from its embedding's own weights.
    De et al. 2024, arXiv:2402.19427. It does what a KerasHub causal language model does: `fit` and
    `evaluate` on strings or tokens, `generate`, `score`, `save_to_preset`, LoRA through
    `backbone.enable_lora`, `quantize("int8")`. With recurrent blocks and local attention, a step of
    generation takes the same time and memory at every length of text; global attention keeps the
    keys and values of all of it.

    Args:
        backbone: a `GriffinBackbone`.
        preprocessor: a `GriffinCausalLMPreprocessor`; None: inputs are tokens.
        compile: whether to compile with KerasHub's defaults. They suit fine-tuning (Adam at 2e-5):
            compile with an optimizer of your own to train from the start.
        name: string.
        trainable: boolean.

    Call arguments:
        inputs: a dictionary of `token_ids`, `padding_mask` and optionally `segment_ids`, all
            `[B, T]`, as `GriffinBackbone` takes them.

    Returns:
        Logits `[B, T, vocabulary_size]`, in the compute dtype.

    Raises:
        ValueError: a backbone or preprocessor of another kind, or a tokenizer with tokens that the
            backbone does not know.

    Example: a small Hawk learns a text and goes on with it.

    >>> import keras, keras_recurrent
    >>> model = keras_recurrent.models.GriffinCausalLM.from_preset("hawk_tiny", num_layers=1)
    >>> model.compile(keras.optimizers.Adam(1e-3), model.loss, sampler="greedy")
    >>> history = model.fit(["All happy families are alike."] * 4, batch_size=2, verbose=0)
    >>> text = model.generate("All happy", max_length=20)
    >>> text.startswith("All happy")
    True

    Without a preprocessor, a prompt is a row of tokens with room for more, all at its left:

    >>> import numpy as np
    >>> model = keras_recurrent.models.GriffinCausalLM(model.backbone)
    >>> token_ids = np.array([[1, 68, 111, 0, 0, 0]])
    >>> prompt = {"token_ids": token_ids, "padding_mask": token_ids > 0}
    >>> model.generate(prompt, stop_token_ids=None)["token_ids"].shape
    (1, 6)
    """

    backbone_cls = GriffinBackbone
    preprocessor_cls = GriffinCausalLMPreprocessor
