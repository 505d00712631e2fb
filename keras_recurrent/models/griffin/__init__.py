"""Hawk and Griffin."""

from keras_recurrent.checkpoints import names
from keras_recurrent.models.griffin.griffin_backbone import GriffinBackbone
from keras_recurrent.presets.griffin import SIZES

names.register(GriffinBackbone, SIZES)
