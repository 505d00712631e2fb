"""Checks of a model's backbone and preprocessor."""


def check_parts(cls, backbone, preprocessor, kind):
    """Raises an error for an unsuitable backbone, preprocessor or tokenizer of a model.

    cls: the class of the model. kind: KerasHub's base class of preprocessors for such models.
    """
    if not isinstance(backbone, cls.backbone_cls):
        raise ValueError(
            f"`backbone` must be a `{cls.backbone_cls.__name__}`; got a "
            f"`{type(backbone).__name__}`."
        )
    if preprocessor is None:
        return
    family = getattr(preprocessor, "backbone_cls", None) or type(backbone)
    other = not issubclass(family, cls.backbone_cls) and not isinstance(backbone, family)
    if other or not isinstance(preprocessor, kind):
        raise ValueError(
            f"`preprocessor` must be a `{cls.preprocessor_cls.__name__}`, or None for inputs that "
            f"are tokens; got a `{type(preprocessor).__name__}`."
        )
    _check_vocabulary(backbone, preprocessor)


def _check_vocabulary(backbone, preprocessor):
    tokenizer = getattr(preprocessor, "tokenizer", None)
    if tokenizer is None:
        return
    try:
        size = tokenizer.vocabulary_size()
    except ValueError:
        return  # a saved tokenizer, whose file is loaded after the model is made
    if size > backbone.vocabulary_size:
        raise ValueError(
            f"`preprocessor`: its tokenizer has {size} tokens, the backbone knows "
            f"{backbone.vocabulary_size}. Give the backbone a larger `vocabulary_size`, or pass "
            "`preprocessor=None` and train on tokens."
        )
