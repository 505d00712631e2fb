"""Gated linear recurrent layers and language models for Keras 3, on JAX, torch and TensorFlow."""

import importlib
import sys
from typing import TYPE_CHECKING

from keras_recurrent.import_order import (
    check_backend,
    check_import_order,
    warn_about_disabled_kernels,
)

# These checks must run before anything imports Keras.
check_backend()
check_import_order()
warn_about_disabled_kernels()
# Options of the server are parsed before the import of Keras, which takes seconds.
if sys.argv[:1] == ["-m"] and "keras_recurrent.serving" in sys.orig_argv:
    importlib.import_module("keras_recurrent.serving.options").parse_options()

from keras_recurrent import (
    callbacks,
    evaluation,
    layers,
    metrics,
    ops,
    optimizers,
    schedules,
    upstream,
)
from keras_recurrent import exporting as exporting
from keras_recurrent.dispatch import implementation
from keras_recurrent.generation.modes import which_generation
from keras_recurrent.ops.operation import which_implementation
from keras_recurrent.training.loss_without_logits import which_loss
from keras_recurrent.training.weight_decay import exclude_from_weight_decay
from keras_recurrent.tuning import autotune

if TYPE_CHECKING:
    from keras_recurrent import conversion, datasets, models, samplers, tokenizers

upstream.install()

__version__ = "0.2.0"

__all__ = [
    "autotune",
    "callbacks",
    "conversion",
    "datasets",
    "evaluation",
    "exclude_from_weight_decay",
    "implementation",
    "layers",
    "metrics",
    "models",
    "ops",
    "optimizers",
    "samplers",
    "schedules",
    "tokenizers",
    "which_generation",
    "which_implementation",
    "which_loss",
]

# Imported when they are first used, because they import KerasHub or grain.
LAZY = ("conversion", "datasets", "models", "samplers", "tokenizers")


def __getattr__(name):
    if name not in LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def __dir__():
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})
