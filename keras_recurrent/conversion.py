"""Checkpoints, and conversion of multi-head attention to grouped-query attention.

Each name is imported when it is first used, so that `import keras_recurrent` is fast. Saved
converted models load after `import keras_recurrent`.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keras_recurrent.checkpoints.checkpoint import Checkpoint
    from keras_recurrent.checkpoints.layout import Layout, register
    from keras_recurrent.gqa.convert import convert_to_gqa
    from keras_recurrent.gqa.report import gqa_report
    from keras_recurrent.gqa.uptraining import Uptraining, uptraining

__all__ = [
    "Checkpoint",
    "Layout",
    "Uptraining",
    "convert_to_gqa",
    "gqa_report",
    "register",
    "uptraining",
]

_MODULES = {
    "Checkpoint": "keras_recurrent.checkpoints.checkpoint",
    "Layout": "keras_recurrent.checkpoints.layout",
    "Uptraining": "keras_recurrent.gqa.uptraining",
    "convert_to_gqa": "keras_recurrent.gqa.convert",
    "gqa_report": "keras_recurrent.gqa.report",
    "register": "keras_recurrent.checkpoints.layout",
    "uptraining": "keras_recurrent.gqa.uptraining",
}


def __getattr__(name):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__():
    return sorted([*globals(), *__all__])
