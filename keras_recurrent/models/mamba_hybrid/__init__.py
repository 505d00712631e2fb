"""Nemotron-H, Granite 4.0 H, Falcon-H1 and Mamba-2: Mamba-2 alone, or with softmax attention."""

from keras_recurrent.checkpoints import layout, names
from keras_recurrent.models.mamba_hybrid.checkpoint import (
    FalconH1,
    Granite,
    Mamba2Layout,
    NemotronH,
)
from keras_recurrent.models.mamba_hybrid.mamba_hybrid_backbone import MambaHybridBackbone
from keras_recurrent.presets.mamba_hybrid import SIZES

names.register(MambaHybridBackbone, SIZES)
for checkpoint_layout in (NemotronH(), Granite(), Mamba2Layout(), FalconH1()):
    layout.register(MambaHybridBackbone, checkpoint_layout)
