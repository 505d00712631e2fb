"""Gated linear recurrent layers and language models for Keras 3, on JAX, torch and TensorFlow."""

from keras_recurrent.import_order import (
    check_backend,
    check_import_order,
    warn_about_disabled_kernels,
)

# These checks must run before anything imports Keras.
check_backend()
check_import_order()
warn_about_disabled_kernels()

from keras_recurrent import (
    callbacks,
    conversion,
    datasets,
    evaluation,
    layers,
    metrics,
    models,
    ops,
    samplers,
    schedules,
    testing,
    tokenizers,
)
from keras_recurrent import exporting as exporting
from keras_recurrent.checkpoints import hub_hooks
from keras_recurrent.devices import jax_processes
from keras_recurrent.dispatch import implementation
from keras_recurrent.export import exporters
from keras_recurrent.generation.modes import which_generation
from keras_recurrent.gqa import placeholders
from keras_recurrent.layers import both_directions, integer_products, saved_quantization
from keras_recurrent.ops.operation import which_implementation
from keras_recurrent.training.loss_without_logits import which_loss
from keras_recurrent.training.weight_decay import exclude_from_weight_decay
from keras_recurrent.tuning import autotune

exporters.install()
both_directions.install()
hub_hooks.install()
integer_products.install()
jax_processes.install()
placeholders.install()
saved_quantization.install()

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
    "samplers",
    "schedules",
    "testing",
    "tokenizers",
    "which_generation",
    "which_implementation",
    "which_loss",
]
