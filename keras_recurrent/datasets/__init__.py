"""Packed text from files for training."""

import importlib

__all__ = ["PackedText"]


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
