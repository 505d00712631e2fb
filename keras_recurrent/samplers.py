"""Samplers for `compile(sampler=...)`, in addition to those of `keras_hub.samplers`."""

from keras_recurrent.generation.beam_sampler import BeamSampler

__all__ = ["BeamSampler"]
