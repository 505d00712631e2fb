"""The parts that a model is made of: a backbone, and a preprocessor that suits it."""


def check_parts(cls, backbone, preprocessor, kind):
    """Raises for a backbone or a preprocessor of another class, or a tokenizer with more tokens.

    Args:
        cls: the class of the model, which has `backbone_cls` and `preprocessor_cls`.
        backbone: what the model got.
        preprocessor: what the model got; None: its inputs are tokens.
        kind: the class of KerasHub of which every preprocessor for such a model is.

    Raises:
        ValueError: names the part.
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
            f"`preprocessor` must be a `{cls.preprocessor_cls.__name__}`, or None where inputs "
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
        return  # a saved tokenizer, which gets its file after the model is made
    if size > backbone.vocabulary_size:
        raise ValueError(
            f"`preprocessor`: its tokenizer has {size} tokens, the backbone knows "
            f"{backbone.vocabulary_size}. Give the backbone a larger `vocabulary_size`, or pass "
            "`preprocessor=None` and train on tokens of your own."
        )
