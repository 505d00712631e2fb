"""Meshes of simulated devices, and models that are split over them."""

import math

import keras


def device_mesh(*sizes, devices=None):
    """A mesh of axes "batch" and "model", or "batch", "sequence" and "model".

    Tracing a model, or an error before that, needs none of the devices.
    """
    names = ("batch", "model") if len(sizes) == 2 else ("batch", "sequence", "model")
    devices = devices or [f"cpu:{i}" for i in range(math.prod(sizes))]
    return keras.distribution.DeviceMesh(sizes, names, devices)


def model_parallel(layout_map, **options):
    """The scope in which models are split by a layout map."""
    return keras.distribution.ModelParallel(layout_map=layout_map, **options).scope()
