"""Exporters of `model.export` for models with layers of this package.

Keras's exporters run with the portable operations (`keras_recurrent.portable`). On torch, sizes of
batch and time that are None in the model's inputs stay dynamic; Keras itself would make a graph for
a batch and a time of 1. Models without a layer of this package are exported by Keras unchanged.
`upstream.py` replaces Keras's functions.

A SavedModel keeps the operations of the backend, which TensorFlow runs. The SavedModel of a
language model on TensorFlow has a signature `step` in addition to `serve`: it takes `token_ids`
[B, T], the next tokens of each sequence, and the arrays of a state by name, and returns `logits`
and the arrays under these names. The initial state is 0 everywhere and -1 in `segment`; its arrays
have the shapes of the signature, which are those of `get_initial_state`.

ONNX from torch with `opset_version=27` has ONNX's own `LinearAttention` and `CausalConvWithState`
(`keras_recurrent.portable._opset_27`); other versions have loops over time instead.
"""

import contextlib
import functools
import inspect
import pathlib
import tempfile
from typing import Any

import keras
import numpy as np
from keras import tree

from keras_recurrent import compat, dispatch
from keras_recurrent.portable import _opset_27


def wrap_exporter(export_function, original):
    """Returns an exporter that calls a function of `EXPORTERS` for models with our layers."""
    parameters = inspect.signature(original)

    @functools.wraps(original)
    def export(*args, **kwargs):
        given = parameters.bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        if not has_our_layers(given["model"]):
            return original(*args, **kwargs)
        name = None if export_function is _saved_model else dispatch.PORTABLE
        with dispatch.implementation(name):
            return export_function(original, **given)

    return export


def has_our_layers(model):
    layers = model._flatten_layers() if isinstance(model, keras.Layer) else ()
    return any(type(layer).__module__.startswith("keras_recurrent.") for layer in layers)


def _saved_model(original, model, filepath, verbose=None, input_signature=None, **kwargs):
    step = getattr(model, "call_with_cache", None)
    if dispatch.BACKEND != "tensorflow" or step is None or input_signature or kwargs:
        return original(model, filepath, verbose, input_signature, **kwargs)
    import tensorflow as tf

    spec = _state_spec(model.backbone)
    names = state_names(spec)
    parts = [
        tf.TensorSpec(part.shape, part.dtype, name)
        for name, part in zip(names, tree.flatten(spec), strict=True)
    ]

    def one_step(token_ids, *state):
        logits, _, after = step(token_ids, tree.pack_sequence_as(spec, state))
        return {"logits": logits, **dict(zip(names, tree.flatten(after), strict=True))}

    archive = keras.export.ExportArchive()
    archive.track_and_add_endpoint("serve", model, _signature(model, None))
    token_ids = tf.TensorSpec((None, None), "int32", "token_ids")
    archive.add_endpoint("step", one_step, [token_ids, *parts])
    archive.write_out(filepath, verbose=verbose is not False)


def _state_spec(backbone):
    """Returns the spec of a state, with any batch size and room for all tokens of the window.

    Less room would give wrong text without an error. Without a window, the size is None.
    """
    blocks = tuple(_block_state_spec(block) for block in backbone.transformer_layers)
    return {**backbone.cache_spec(), "blocks": blocks}


def _block_state_spec(block):
    try:
        state = block.own_initial_state(1)
    except ValueError:  # the block needs a maximum length
        return block.own_state_spec()
    return tree.map_structure(
        lambda t: keras.KerasTensor((None, *t.shape[1:]), keras.backend.standardize_dtype(t.dtype)),
        state,
    )


def state_names(state):
    """Returns the names of a state's arrays in the signature `step` of a SavedModel.

    Args:
        state: a state of `model.backbone.get_initial_state` or `model.backbone.cache_spec()`.

    Returns:
        A list of strings, such as `"blocks_0_temporal_block_rg_lru_hidden"`, in the order of
        `keras.tree.flatten(state)`.
    """
    return ["_".join(map(str, path)) for path, _ in tree.flatten_with_path(state)]


def _torch_program(original, model, filepath, input_signature=None, verbose=None, **kwargs):
    if kwargs:  # dynamic shapes and other arguments of `torch.export`
        return original(model, filepath, input_signature, verbose, **kwargs)
    if not str(filepath).endswith(".pt2"):
        raise ValueError(f"`filepath` must end in '.pt2' with format='torch'; got {filepath!r}.")
    import torch

    torch.export.save(_trace(model, _signature(model, input_signature)), str(filepath))
    _print_saved(filepath, verbose)
    return filepath


def _onnx(original, model, filepath, verbose=None, input_signature=None, opset_version=None):
    input_signature = _signature(model, input_signature)
    if dispatch.BACKEND == "tensorflow":
        return original(model, filepath, verbose, input_signature, opset_version)
    write = {"torch": _onnx_from_torch, "jax": _onnx_from_jax}[dispatch.BACKEND]
    write(model, str(filepath), input_signature, opset_version)
    _print_saved(filepath, verbose)


def _onnx_from_torch(model, filepath, input_signature, opset_version):
    import torch

    newest = opset_version == _opset_27.OPSET
    if not newest and opset_version is not None and opset_version > _opset_27.EXPORTERS_OPSET:
        raise ValueError(
            f"`opset_version` must be at most {_opset_27.EXPORTERS_OPSET}, or {_opset_27.OPSET}, "
            f"which has operators for these layers; got {opset_version}."
        )
    with _opset_27.use_operators() if newest else contextlib.nullcontext():
        traced = _trace(model, input_signature)
    program = torch.onnx.export(
        traced,
        dynamo=True,
        input_names=_input_names(tree.flatten(input_signature)),
        opset_version=_opset_27.EXPORTERS_OPSET if newest else opset_version,
        custom_translation_table=_opset_27.translations() if newest else None,
        verbose=False,
    )
    assert program is not None
    if newest:
        _opset_27.upgrade(program.model)
    program.save(filepath)


def _onnx_from_jax(model, filepath, input_signature, opset_version):
    import jax
    import jax2onnx

    def predict(*tensors):
        return model(*tree.pack_sequence_as(input_signature, tensors), training=False)

    # Named sizes: all inputs share batch and time.
    names = ("batch", "time", "size_2", "size_3", "size_4")
    specs = tree.flatten(input_signature)
    inputs = [
        jax.ShapeDtypeStruct(
            tuple(name if n is None else n for name, n in zip(names, spec.shape, strict=False)),
            np.dtype(spec.dtype),
        )
        for spec in specs
    ]
    opset = {} if opset_version is None else {"opset": opset_version}
    jax2onnx.to_onnx(
        predict,
        inputs=inputs,
        input_names=_input_names(specs),
        return_mode="file",
        output_path=filepath,
        **opset,
    )


def _openvino(original, model, filepath, verbose=None, input_signature=None, **kwargs):
    if not str(filepath).endswith(".xml"):
        raise ValueError(f"`filepath` must end in '.xml' with format='openvino'; got {filepath!r}.")
    import openvino

    with tempfile.TemporaryDirectory() as folder:
        if dispatch.BACKEND == "torch":
            # Through ONNX: OpenVINO cannot read loops in programs of torch.
            path = str(pathlib.Path(folder, "model.onnx"))
            _onnx_from_torch(model, path, _signature(model, input_signature), None)
            converted = openvino.convert_model(path)
        else:
            path = str(pathlib.Path(folder, "model.xml"))
            original(model, path, False, input_signature, **kwargs)
            converted = openvino.Core().read_model(path)
            # In addition to the outputs, OpenVINO returns sizes that TensorFlow computes.
            results = [r for r in converted.get_results() if _is_output(r)]
            converted = openvino.Model(results, converted.get_parameters())
        openvino.save_model(converted, str(filepath), compress_to_fp16=False)
    _print_saved(filepath, verbose)


def _is_output(result):
    return any(name.startswith("Identity") for name in result.get_output_tensor(0).get_names())


def _export_as_keras(original, model, filepath, **kwargs):
    return original(model, filepath, **kwargs)


EXPORTERS: dict[str, Any] = {
    "export_saved_model": _saved_model,
    "export_torch": _torch_program,
    "export_onnx": _onnx,
    "export_openvino": _openvino,
    "export_litert": _export_as_keras,
}


def _signature(model, input_signature):
    """Returns the given or the model's signature, with dictionaries sorted by name.

    Keras flattens dictionaries in sorted order, torch in insertion order.
    """
    given = input_signature or compat.get_input_signature(model)
    return [dict(sorted(part.items())) if isinstance(part, dict) else part for part in given]


def _input_names(specs):
    return [getattr(spec, "name", None) or f"input_{i}" for i, spec in enumerate(specs)]


def _print_saved(filepath, verbose):
    if verbose is not False:
        compat.print_msg(f"Saved artifact at '{filepath}'.")


def _trace(model, input_signature):
    """Returns the program of `torch.export`, with dynamic sizes where the signature has None."""
    import torch

    model.eval()
    samples = tree.map_structure(_sample, tuple(input_signature))
    dynamic_shapes = _dynamic_shapes(input_signature)
    return torch.export.export(model, samples, dynamic_shapes=dynamic_shapes, strict=False)


def _sample(spec):
    # torch specializes sizes of 0 and 1, also of chunks of a tensor.
    shape = [5 if size is None else size for size in spec.shape]
    return keras.ops.ones(shape, spec.dtype)


def _dynamic_shapes(input_signature):
    """Returns the dynamic sizes of each input, for `torch.export` of a Keras model's call."""
    import torch

    def dynamic_sizes(spec):
        return {i: torch.export.Dim.DYNAMIC for i, n in enumerate(spec.shape) if n is None}

    return [tree.map_structure(dynamic_sizes, tuple(input_signature))]
