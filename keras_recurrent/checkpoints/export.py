"""Export of a model to a checkpoint in the layout of the Hugging Face Hub."""

import errno
import os

import keras
import ml_dtypes
import numpy as np

from keras_recurrent import atomic_files
from keras_recurrent.checkpoints import files, layout, tokenizer_files
from keras_recurrent.checkpoints.checkpoint import DTYPES, INDEX_FILE, ONE_FILE
from keras_recurrent.devices.jax_processes import gather_to_numpy, is_first, shared_output_path
from keras_recurrent.progress import progress

GIGABYTE = 1024**3


def export(
    backbone,
    path,
    tokenizer=None,
    dtype=None,
    max_shard_size=5,
    chat_template=None,
    stop_token_ids=(),
):
    """Writes a network as a checkpoint; see `RecurrentCausalLM.export_to_transformers`.

    Args:
        backbone: a backbone whose family has a `Layout`.
        path, dtype, max_shard_size: as in that method.
        tokenizer: a tokenizer or None. A tokenizer without a file writes none.
        chat_template: string, written to `chat_template.jinja`. None writes no file.
        stop_token_ids: token ids that end a generated text, in `generation_config.json`. Empty:
            no file is written.
    """
    with shared_output_path(os.fspath(path)) as path:
        _export(backbone, path, tokenizer, dtype, max_shard_size, chat_template, stop_token_ids)


def _export(backbone, path, tokenizer, dtype, max_shard_size, chat_template, stop_token_ids):
    path = os.path.abspath(path)
    if os.path.islink(path):
        raise FileExistsError(
            f"{path!r} is a symbolic link. Pass the directory that it points to, or a new one."
        )
    if os.path.exists(path) and (not os.path.isdir(path) or os.listdir(path)):
        raise FileExistsError(f"{path!r} exists and is not empty. Pass a new directory.")
    if not isinstance(max_shard_size, (int, float)) or not max_shard_size > 0:
        raise ValueError(
            f"`max_shard_size` must be a number of gigabytes above 0; got {max_shard_size!r}."
        )
    family = layout.get_layout(backbone)
    arguments = backbone.get_config()
    config = family.config(arguments)
    weights = _weights(backbone)
    dtype = dtype or backbone.dtype_policy.variable_dtype
    if dtype not in DTYPES.values():
        raise ValueError(f"`dtype` must be one of {', '.join(DTYPES.values())}; got {dtype!r}.")
    config["dtype"] = dtype
    save_file = files.require("safetensors.numpy", "Writing a checkpoint").save_file
    tensors_of_model = family.tensors(arguments)
    for tensor in tensors_of_model:
        _check_range(tensor, weights, dtype)

    def values(tensor):
        arrays = [gather_to_numpy(weights[weight]()) for weight in tensor.weights]
        return np.ascontiguousarray(tensor.transform.to_tensor(*arrays).astype(dtype))

    os.makedirs(os.path.dirname(path), exist_ok=True)
    with atomic_files.temporary_folder(path) as temporary:
        folder = os.path.join(temporary, "checkpoint")
        os.mkdir(folder)
        item_size = np.dtype(dtype).itemsize
        shards = _shards(tensors_of_model, max_shard_size * GIGABYTE / item_size)
        size = sum(tensor.size for tensor in tensors_of_model) * item_size
        with progress(f"Writing {path}", "weights", size) as done:
            for name, tensors in shards.items():
                content = {}
                for tensor in tensors:
                    array = values(tensor)
                    done(array.nbytes)
                    if is_first():
                        content[tensor.name] = array
                if is_first():
                    save_file(content, os.path.join(folder, name), metadata={"format": "pt"})
        if len(shards) > 1:
            tokenizer_files.write_json(folder, INDEX_FILE, _index(shards, item_size))
        config |= tokenizer_files.write(folder, tokenizer, family)
        if chat_template is not None:
            template_file = os.path.join(folder, tokenizer_files.TEMPLATE_FILE)
            with open(template_file, "w", encoding="utf-8", newline="") as file:
                file.write(chat_template)
        if stop_token_ids:
            content = {"eos_token_id": list(stop_token_ids)}
            tokenizer_files.write_json(folder, files.GENERATION_CONFIG_FILE, content)
        tokenizer_files.write_json(folder, files.CONFIG_FILE, config)
        atomic_files.write_to_disk(folder)
        _move(folder, path)


def _move(folder, path):
    try:
        if os.path.isdir(path):
            os.rmdir(path)  # not every system renames a directory to an existing empty one
        os.rename(folder, path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise FileExistsError(
            f"{path!r} was empty when this export began, and is not any more: another export may "
            "have ended first. Nothing in it was changed. Pass a new directory."
        ) from error


def _weights(backbone):
    """Returns `{path: function that returns the values}`, with LoRA weights merged."""
    weights = {}
    for layer in backbone._flatten_layers(include_self=False):
        if getattr(layer, "quantization_mode", None):
            raise ValueError(
                f"The model is quantized ({layer.name!r} to {layer.quantization_mode}), and its "
                "original weights are lost. Export it before `quantize`."
            )
        for variable in layer._trainable_variables:
            if not variable.name.startswith("lora_"):
                name = variable.name
                weights[variable.path] = lambda layer=layer, name=name: getattr(layer, name)
    return weights


def _check_range(tensor, weights, dtype):
    """Raises an error for a tensor with a finite number that would become inf in `dtype`."""
    for path in tensor.weights:
        weight = weights[path]()
        if keras.backend.standardize_dtype(weight.dtype) == dtype:
            continue
        values = gather_to_numpy(weight)
        largest = np.max(np.abs(values), where=np.isfinite(values), initial=0)
        with np.errstate(over="ignore"):
            narrowed = largest.astype(dtype)
        if np.isinf(narrowed):
            raise ValueError(
                f"`dtype`: {dtype} holds numbers up to {ml_dtypes.finfo(dtype).max}, and "
                f"{tensor.name!r} (the weight {path!r}) has one of {largest:.6g}. Export in "
                "the dtype of the weights."
            )


def _shards(tensors, max_size):
    """Returns `{file: [Tensor, ...]}`, in order, with at most `max_size` numbers if possible."""
    groups, size = [[]], 0
    for tensor in tensors:
        if groups[-1] and size + tensor.size > max_size:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.size
    if len(groups) == 1:
        return {ONE_FILE: groups[0]}
    return {
        f"model-{i:05}-of-{len(groups):05}.safetensors": group
        for i, group in enumerate(groups, start=1)
    }


def _index(shards, item_size):
    weight_map = {tensor.name: name for name, tensors in shards.items() for tensor in tensors}
    parameters = sum(tensor.size for tensors in shards.values() for tensor in tensors)
    return {
        "metadata": {"total_parameters": parameters, "total_size": parameters * item_size},
        "weight_map": dict(sorted(weight_map.items())),
    }
