"""Models and layers as `torch.distributed` expects them."""

from keras_recurrent.training.torch_modules import LayerModule, TorchModule

__all__ = ["LayerModule", "TorchModule"]
