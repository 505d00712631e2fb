"""Hawk and Griffin."""

from keras_recurrent.checkpoints import layout, names
from keras_recurrent.models.griffin.checkpoint import RecurrentGemma
from keras_recurrent.models.griffin.griffin_backbone import GriffinBackbone
from keras_recurrent.presets.griffin import SIZES

names.register(GriffinBackbone, SIZES)
layout.register(GriffinBackbone, RecurrentGemma())
