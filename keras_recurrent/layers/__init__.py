"""Keras layers on the operations of `keras_recurrent.ops`."""

from keras_recurrent.layers.causal_conv1d import CausalConv1D
from keras_recurrent.layers.cg_lru import CGLRU
from keras_recurrent.layers.gated_mlp import GatedMLP
from keras_recurrent.layers.initializers import DecayLogit
from keras_recurrent.layers.recurrent_block import RecurrentBlock
from keras_recurrent.layers.rg_lru import RGLRU
from keras_recurrent.layers.rms_norm import RMSNorm
from keras_recurrent.layers.streaming import StreamingLayer

__all__ = [
    "CGLRU",
    "RGLRU",
    "CausalConv1D",
    "DecayLogit",
    "GatedMLP",
    "RMSNorm",
    "RecurrentBlock",
    "StreamingLayer",
]
