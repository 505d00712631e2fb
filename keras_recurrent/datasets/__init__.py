"""Tasks that show what a model's memory can do, made as they are asked for."""

from keras_recurrent.datasets.associative_recall import associative_recall

__all__ = ["associative_recall"]
