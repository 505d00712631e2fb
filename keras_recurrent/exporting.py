"""Names of a state's arrays in exported models."""

from keras_recurrent.export.exporters import state_names

__all__ = ["state_names"]
