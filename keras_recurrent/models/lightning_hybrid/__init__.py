"""HypeNet and MiniCPM-SALA, hybrids of Lightning Attention and softmax attention."""

from keras_recurrent.checkpoints import layout, names
from keras_recurrent.models.lightning_hybrid.checkpoint import HypeNet, MiniCPMSALA
from keras_recurrent.models.lightning_hybrid.lightning_hybrid_backbone import (
    LightningHybridBackbone,
)
from keras_recurrent.presets.lightning_hybrid import SIZES

names.register(LightningHybridBackbone, SIZES)
layout.register(LightningHybridBackbone, HypeNet())
layout.register(LightningHybridBackbone, MiniCPMSALA())
