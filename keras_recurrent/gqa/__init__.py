"""Grouped-query attention from multi-head models: pooled weights, then a little more training.

Ainslie et al. 2023, arXiv:2305.13245. Users import it from `keras_recurrent.conversion`; importing
`keras_recurrent` loads `placeholders.py` alone.
"""
