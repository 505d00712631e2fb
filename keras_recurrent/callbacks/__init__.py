"""Backup of training runs, which resume bit-identically."""

from keras_recurrent.callbacks.training_backup import TrainingBackup

__all__ = ["TrainingBackup"]
