"""Keras layers on the operations of `keras_recurrent.ops`."""

from keras_recurrent.layers.bidirectional_hgrn2 import BidirectionalHGRN2
from keras_recurrent.layers.causal_conv1d import CausalConv1D
from keras_recurrent.layers.cg_lru import CGLRU
from keras_recurrent.layers.gated_linear_unit import SGLU, GatedMLP, SquaredReLUMLP, SwiGLU
from keras_recurrent.layers.gated_short_conv import GatedShortConv
from keras_recurrent.layers.hgrn import HGRN
from keras_recurrent.layers.hgrn2 import HGRN2
from keras_recurrent.layers.initializers import DecayLogit
from keras_recurrent.layers.lightning_attention import LightningAttention
from keras_recurrent.layers.local_attention import LocalAttention
from keras_recurrent.layers.lower_bounds import LowerBounds
from keras_recurrent.layers.lrpe import LRPE
from keras_recurrent.layers.mamba2 import Mamba2
from keras_recurrent.layers.recurrent_block import RecurrentBlock
from keras_recurrent.layers.rg_lru import RGLRU
from keras_recurrent.layers.rms_norm import RMSNorm, SimpleRMSNorm
from keras_recurrent.layers.streaming import StreamingLayer
from keras_recurrent.layers.tokens import Tokens

__all__ = [
    "CGLRU",
    "HGRN",
    "HGRN2",
    "LRPE",
    "RGLRU",
    "SGLU",
    "BidirectionalHGRN2",
    "CausalConv1D",
    "DecayLogit",
    "GatedMLP",
    "GatedShortConv",
    "LightningAttention",
    "LocalAttention",
    "LowerBounds",
    "Mamba2",
    "RMSNorm",
    "RecurrentBlock",
    "SimpleRMSNorm",
    "SquaredReLUMLP",
    "StreamingLayer",
    "SwiGLU",
    "Tokens",
]
