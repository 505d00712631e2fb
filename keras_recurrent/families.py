"""Classes of a family of models, by which Keras and KerasHub find them."""

from typing import Any

import keras


class FamilyMember:
    """Mixin of the base classes of tokenizers, preprocessors and tasks.

    A class of a family names the class that it uses: a tokenizer its `backbone`, a preprocessor its
    `tokenizer`, and a task its `preprocessor`, as in
    `class GriffinCausalLM(RecurrentCausalLM, preprocessor=GriffinCausalLMPreprocessor)`. It is
    registered with Keras, and gets `backbone_cls`, by which KerasHub finds it, and `tokenizer_cls`
    or `preprocessor_cls`. Subclasses without such an argument are not registered.
    """

    backbone_cls: Any
    tokenizer_cls: Any
    preprocessor_cls: Any

    def __init_subclass__(cls, *, backbone=None, tokenizer=None, preprocessor=None, **kwargs):
        super().__init_subclass__(**kwargs)
        if tokenizer is not None:
            cls.tokenizer_cls, backbone = tokenizer, tokenizer.backbone_cls
        if preprocessor is not None:
            cls.preprocessor_cls, backbone = preprocessor, preprocessor.backbone_cls
        if backbone is not None:
            cls.backbone_cls = backbone
            keras.saving.register_keras_serializable(package="keras_recurrent")(cls)
