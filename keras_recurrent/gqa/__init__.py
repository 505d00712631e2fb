"""Conversion of multi-head models to grouped-query attention, and uptraining.

Ainslie et al. 2023, arXiv:2305.13245. Users import it from `keras_recurrent.conversion`.
"""
