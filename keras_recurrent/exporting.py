"""Export of decoding steps, and names of a state's arrays in exported models."""

from keras_recurrent.export.decoding_step import DecodingStep
from keras_recurrent.export.exporters import state_names

__all__ = ["DecodingStep", "state_names"]
