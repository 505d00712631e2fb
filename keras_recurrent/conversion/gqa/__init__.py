"""Grouped-query attention from multi-head models: pooled weights, then a little more training.

Ainslie et al. 2023, arXiv:2305.13245.
"""

from keras_recurrent.conversion.gqa.convert import convert_to_gqa
from keras_recurrent.conversion.gqa.report import gqa_report
from keras_recurrent.conversion.gqa.uptraining import Uptraining, uptraining

__all__ = ["Uptraining", "convert_to_gqa", "gqa_report", "uptraining"]
