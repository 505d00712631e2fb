"""Checkpoints in the layout of the Hugging Face Hub, in and out; multi-head attention to grouped.

One machinery for all families. A family says what its `config.json` means and which tensor makes
which weight, in a `Layout`; see `recurrent_gemma.py`. Grouped-query attention is in `gqa/`.
"""

from keras_recurrent.conversion.checkpoint import Checkpoint
from keras_recurrent.conversion.gqa import Uptraining, convert_to_gqa, gqa_report, uptraining
from keras_recurrent.conversion.layout import Layout, register

__all__ = [
    "Checkpoint",
    "Layout",
    "Uptraining",
    "convert_to_gqa",
    "gqa_report",
    "register",
    "uptraining",
]
