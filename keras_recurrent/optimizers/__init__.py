"""Optimizers that train weights stored in 16 bits, and are fast on torch."""

from keras_recurrent.optimizers.adam import Adam, AdamW

__all__ = ["Adam", "AdamW"]
