"""Samplers for `compile(sampler=...)`, in addition to those of `keras_hub.samplers`."""

from keras_recurrent.generation.beam_search import BeamSampler

__all__ = ["BeamSampler"]
