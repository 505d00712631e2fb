"""TransNormerLLM."""

from keras_recurrent.checkpoints import layout, names
from keras_recurrent.models.transnormer.checkpoint import TransNormer
from keras_recurrent.models.transnormer.transnormer_backbone import TransNormerBackbone
from keras_recurrent.presets.transnormer import SIZES

names.register(TransNormerBackbone, SIZES)
layout.register(TransNormerBackbone, TransNormer())
