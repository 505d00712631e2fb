"""HGRN2."""

from keras_recurrent.checkpoints import layout, names
from keras_recurrent.models.hgrn2.checkpoint import HGRN2Layout
from keras_recurrent.models.hgrn2.hgrn2_backbone import HGRN2Backbone
from keras_recurrent.models.hgrn2.hgrn2_vision_backbone import HGRN2VisionBackbone
from keras_recurrent.presets.hgrn2 import SIZES, VISION_SIZES

names.register(HGRN2Backbone, SIZES)
names.register(HGRN2VisionBackbone, VISION_SIZES)
layout.register(HGRN2Backbone, HGRN2Layout())
