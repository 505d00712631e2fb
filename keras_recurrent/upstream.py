"""Changes to Keras and KerasHub that `import keras_recurrent` makes, and their reasons.

Each entry of `CHANGES` wraps one function of Keras. Functions of KerasHub are replaced whenever
KerasHub is imported, before or after this package, which does not import it: it imports TensorFlow,
which takes seconds, and layers need neither.

`tests/test_upstream.py` calls the original functions. A test fails if a version of Keras or
KerasHub no longer needs a change, which can then be removed.
"""

import functools
import importlib
import importlib.abc
import sys
from typing import Any, NamedTuple

import keras

from keras_recurrent import compat
from keras_recurrent.devices.jax_processes import save_atomically
from keras_recurrent.dispatch import BACKEND
from keras_recurrent.export.exporters import EXPORTERS, wrap_exporter
from keras_recurrent.layers.integer_products import (
    exact_einsum,
    multiply_on_jax,
    multiply_on_torch,
)
from keras_recurrent.layers.weight_copies import multiply_by_copies, multiply_int8_by_copies

HUB = "keras_hub"
LOADING = "keras_recurrent.checkpoints.loading"
MODELS = "keras_recurrent.models"
PREFIX = "keras_recurrent>"  # begins the names of registered classes
# Modules that register classes and are not imported by `import keras_recurrent`.
REGISTERING_MODULES = ("keras_recurrent.gqa.uptraining", MODELS, "keras_recurrent.gqa.convert")


class Change(NamedTuple):
    """A function of Keras that is replaced by `wrap(function)`.

    Attributes:
        owner: a class, or the name of a module.
        name: string, the name of the function.
        wrap: function that takes the original function and returns its replacement.
    """

    owner: Any
    name: str
    wrap: Any


def _import_before_lookup(get_registered_object):
    """Returns a function that imports the modules of registered classes that are unknown so far."""

    @functools.wraps(get_registered_object)
    def call(name, *args, **kwargs):
        found = get_registered_object(name, *args, **kwargs)
        for module in REGISTERING_MODULES if str(name).startswith(PREFIX) else ():
            if found is None:
                importlib.import_module(module)
                found = get_registered_object(name, *args, **kwargs)
        return found

    return call


def _add_zero_point(get_saved_kernel):
    """Returns a function that adds the zero point of GPTQ and AWQ to a layer's saved kernel."""

    @functools.wraps(get_saved_kernel)
    def call(layer):
        kernel, scale, zero_point = get_saved_kernel(layer)
        if zero_point is None and layer.quantization_mode in ("gptq", "awq"):
            zero_point = layer.kernel_zero
        return kernel, scale, zero_point

    return call


CHANGES = [
    # Models that were saved load after `import keras_recurrent` alone, although their classes are
    # imported at the first use. Keras has no hook for classes that are not imported yet. The first
    # module is Keras's own, from the second KerasHub takes the function.
    Change("keras.src.saving.object_registration", "get_registered_object", _import_before_lookup),
    Change("keras.saving", "get_registered_object", _import_before_lookup),
    # `model.export` cannot be extended. Keras traces the kernels of the backend, which other
    # runtimes cannot run; on torch with a batch size of 1, which becomes constant
    # (keras-team/keras pull request 22086 made sizes dynamic for the exporter without loops); on
    # JAX with a separate length for each input.
    *(
        Change("keras.src.export", name, functools.partial(wrap_exporter, export))
        for name, export in EXPORTERS.items()
    ),
    # Keras writes files in place, so a killed process destroys the old model. In JAX programs of
    # several processes, it raises an error at arrays of which other processes have shards. All
    # functions and callbacks of Keras that save a model call these two.
    Change("keras.src.saving.saving_lib", "save_model", save_atomically),
    Change("keras.src.saving.saving_lib", "save_weights_only", save_atomically),
    # Keras 3.15.1 does not save the zero points of GPTQ and AWQ, and the files do not load
    # (fixed after 3.15 by keras-team/keras pull request 23321).
    Change(keras.layers.Dense, "_get_kernel_with_merged_lora", _add_zero_point),
    Change(keras.layers.EinsumDense, "_get_kernel_with_merged_lora", _add_zero_point),
]
if BACKEND in ("jax", "tensorflow"):
    # XLA on CPUs converts bfloat16 weights to float32 in each launch of a program (JAX 0.10.2).
    CHANGES += [Change(f"keras.src.backend.{BACKEND}.numpy", "matmul", multiply_by_copies)]
if BACKEND == "jax":
    # XLA for NVIDIA GPUs doubles the product of two int8 tensors if the number of contracted
    # elements is not a multiple of 4 (H100, JAX 0.11.2). Keras multiplies int8 tensors in layers
    # after `quantize("int8")`. On CPUs, XLA converts the matrix if the other operand is one row.
    CHANGES += [
        Change("keras.src.backend.jax.numpy", "matmul", multiply_on_jax),
        Change("keras.src.backend.jax.numpy", "einsum", exact_einsum),
        Change(keras.layers.Dense, "_int8_call", multiply_int8_by_copies),
    ]
if BACKEND == "torch":
    # On CPUs, Keras 3.15.1 converts int8 tensors to int32, which torch multiplies slowly.
    CHANGES += [Change("keras.src.backend.torch.numpy", "matmul", multiply_on_torch)]


def install():
    """Makes the changes. `import keras_recurrent` calls it once."""
    for owner, name, wrap in CHANGES:
        owner = importlib.import_module(owner) if isinstance(owner, str) else owner
        setattr(owner, name, wrap(getattr(owner, name)))
    sys.meta_path.insert(0, _HubFinder())
    if sys.modules.get(HUB):
        _change_hub()


class _HubFinder(importlib.abc.MetaPathFinder):
    """Finds KerasHub, and changes it each time it is imported."""

    def find_spec(self, fullname, path, target=None):
        if fullname != HUB:
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                _change_hub()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _change_hub():
    """Makes `from_preset` and `presets` of KerasHub find the presets of this package.

    KerasHub downloads a preset by its name and converts checkpoints, both for the models that it
    defines. It finds preprocessors by the class of the backbone, not of a base class.

    This function runs while KerasHub is being imported, maybe by a module that the models need. So
    the models are imported when one of the replacements is first called.
    """
    for name in compat.PRESET_MODULES:
        module = compat.import_whole(name)
        module.builtin_presets = _builtin_presets
        module.find_subclass = _find_subclass
        module.get_preset_loader = _get_preset_loader


def _builtin_presets(cls):
    importlib.import_module(MODELS)
    return compat.builtin_presets(cls)


def _find_subclass(preset, cls, backbone_cls):
    return _loading().find_subclass(preset, cls, backbone_cls)


def _get_preset_loader(preset):
    return _loading().get_loader(preset)


def _loading():
    importlib.import_module(MODELS)
    return importlib.import_module(LOADING)
