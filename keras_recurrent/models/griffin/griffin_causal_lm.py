"""Language model with Hawk or Griffin, and its tokenizer and preprocessor."""

import keras

from keras_recurrent.models.griffin.griffin_backbone import GriffinBackbone
from keras_recurrent.models.inherited_docstrings import inherits_docstring
from keras_recurrent.models.recurrent_causal_lm import RecurrentCausalLM
from keras_recurrent.models.recurrent_causal_lm_preprocessor import RecurrentCausalLMPreprocessor
from keras_recurrent.tokenizers.byte_tokenizer import ByteTokenizer


@keras.saving.register_keras_serializable(package="keras_recurrent")
@inherits_docstring
class GriffinTokenizer(ByteTokenizer):
    """Byte tokenizer of Griffin presets. Checkpoints have a `SentencePieceTokenizer`."""

    backbone_cls = GriffinBackbone


@keras.saving.register_keras_serializable(package="keras_recurrent")
@inherits_docstring
class GriffinCausalLMPreprocessor(RecurrentCausalLMPreprocessor):
    backbone_cls = GriffinBackbone
    tokenizer_cls = GriffinTokenizer


@keras.saving.register_keras_serializable(package="keras_recurrent")
@inherits_docstring
class GriffinCausalLM(RecurrentCausalLM):
    """Language model with Hawk or Griffin.

    A `GriffinBackbone`, and logits of the next token computed by its embedding's weights. De et al.
    2024, arXiv:2402.19427. With recurrent blocks and local attention, time and memory of a decoding
    step do not depend on the length of the text; global attention caches the keys and values of the
    whole text.

    Example: a small Hawk learns a text and continues it.

    >>> import keras, keras_recurrent
    >>> model = keras_recurrent.models.GriffinCausalLM.from_preset("hawk_tiny", num_layers=1)
    >>> model.compile(keras.optimizers.Adam(1e-3), model.loss, sampler="greedy")
    >>> history = model.fit(["All happy families are alike."] * 4, batch_size=2, verbose=0)
    >>> text = model.generate("All happy", max_length=20)
    >>> text.startswith("All happy")
    True

    Without a preprocessor, a prompt is an array of tokens with padding at its right for the answer:

    >>> import numpy as np
    >>> model = keras_recurrent.models.GriffinCausalLM(model.backbone)
    >>> token_ids = np.array([[1, 68, 111, 0, 0, 0]])
    >>> prompt = {"token_ids": token_ids, "padding_mask": token_ids > 0}
    >>> model.generate(prompt, stop_token_ids=None)["token_ids"].shape
    (1, 6)
    """

    backbone_cls = GriffinBackbone
    preprocessor_cls = GriffinCausalLMPreprocessor
