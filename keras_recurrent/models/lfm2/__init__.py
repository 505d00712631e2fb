"""LFM2 and LFM2.5, hybrids of gated short convolutions and attention."""

from keras_recurrent.checkpoints import layout, names
from keras_recurrent.models.lfm2.checkpoint import LFM2Layout
from keras_recurrent.models.lfm2.lfm2_backbone import LFM2Backbone
from keras_recurrent.presets.lfm2 import SIZES

names.register(LFM2Backbone, SIZES)
layout.register(LFM2Backbone, LFM2Layout())
