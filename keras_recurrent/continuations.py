"""Scores and generates continuations of contexts, processing each context once."""

from keras_recurrent.evaluation.continuations import Continuations

__all__ = ["Continuations"]
