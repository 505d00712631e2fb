"""Packed text from files for training."""

try:
    from keras_recurrent.datasets.packed_text import PackedText
except ModuleNotFoundError as error:
    if error.name != "grain":
        raise
    raise ImportError("`PackedText` reads text with grain: pip install grain") from error

__all__ = ["PackedText"]
