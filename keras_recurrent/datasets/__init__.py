"""Packed text for training, and synthetic tasks that measure a model's memory."""

import importlib

from keras_recurrent.datasets.associative_recall import associative_recall
from keras_recurrent.datasets.induction_heads import induction_heads
from keras_recurrent.datasets.list_ops import list_ops
from keras_recurrent.datasets.phone_book import phone_book
from keras_recurrent.datasets.selective_copying import selective_copying

__all__ = [
    "PackedText",
    "associative_recall",
    "induction_heads",
    "list_ops",
    "phone_book",
    "selective_copying",
]


def __getattr__(name):
    if name != "PackedText":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return importlib.import_module("keras_recurrent.datasets.packed_text").PackedText
    except ModuleNotFoundError as error:
        if error.name != "grain":
            raise
        raise ImportError("`PackedText` reads text with grain: pip install grain") from error


def __dir__():
    return sorted([*globals(), *__all__])
