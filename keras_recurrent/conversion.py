"""Checkpoints, and conversion of multi-head attention to grouped-query attention.

Saved converted models load after `import keras_recurrent`.
"""

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
