"""Mapping between the tensors of a checkpoint and the weights of a model."""

import ctypes
import math
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_recurrent.checkpoints.checkpoint import DTYPES
from keras_recurrent.checkpoints.messages import abbreviate, short_repr
from keras_recurrent.progress import progress

BYTES_BETWEEN_TRIMS = 2**27
MLP_LAYERS = ("gate_proj", "up_proj", "down_proj")


class Transform(NamedTuple):
    """Lossless conversion of a checkpoint's tensor to the values of its weights, and back."""

    to_weights: Callable[[Any], tuple]
    to_tensor: Callable[..., Any]


# Unchanged.
SAME = Transform(lambda tensor: (tensor,), lambda weight: weight)
# [outputs, inputs] in torch's linear layers, [inputs, outputs] in Keras's.
TRANSPOSED = Transform(lambda tensor: (tensor.T,), lambda weight: weight.T)
NEGATED = Transform(lambda tensor: (-tensor,), lambda weight: -weight)
# [channels, 1, taps] in torch's depthwise convolutions, [taps, channels] here.
DEPTHWISE = Transform(lambda tensor: (tensor[:, 0].T,), lambda weight: weight.T[:, None])
# [blocks, units] to the [blocks, 1, units] of an `EinsumDense`.
BLOCK_BIAS = Transform(lambda tensor: (tensor[:, None],), lambda weight: weight[:, 0])


def stacked(count):
    """Returns the `Transform` of `count` matrices of one size, concatenated along axis 0.

    Each matrix is transposed in the model.
    """
    return Transform(
        lambda tensor: tuple(part.T for part in np.split(tensor, count)),
        lambda *weights: np.concatenate([weight.T for weight in weights]),
    )


class Tensor(NamedTuple):
    """A tensor of a checkpoint: its name, its shape, and the weights that it is converted to."""

    name: str
    shape: tuple[int, ...]
    weights: tuple[str, ...]  # paths in the backbone, such as "block_0/mlp/up_proj/kernel"
    transform: Transform = SAME
    copy: str | None = None  # a further name, under which a file may hold equal values

    @property
    def size(self):
        """Number of elements."""
        return math.prod(self.shape)


class BlockTensors(NamedTuple):
    """Makes the tensors of one residual block, whose names begin with `prefix`.

    Attributes:
        prefix: string, such as "model.layers.3.".
        block: string, the name of the block in the backbone, such as "block_3".
    """

    prefix: str
    block: str

    def tensor(self, name, shape, *weights, transform=SAME):
        """Returns the `Tensor` of weights, given by their paths in the block."""
        paths = tuple(f"{self.block}/{weight}" for weight in weights)
        return Tensor(f"{self.prefix}{name}", shape, paths, transform)

    def linear(self, name, inputs, outputs, layer, bias=False):
        """Returns a list of the tensors of a linear layer."""
        kernel = self.tensor(
            f"{name}.weight", (outputs, inputs), f"{layer}/kernel", transform=TRANSPOSED
        )
        return [kernel, self.tensor(f"{name}.bias", (outputs,), f"{layer}/bias")][: 1 + bias]

    def attention(self, name, layer, arguments, output="o_proj", output_bias=False):
        """Returns a list of the tensors of attention with the backbone's arguments.

        `output` is the name of the last linear layer in the file.
        """
        d, size = arguments["hidden_dim"], arguments["head_dim"]
        inner, keys = (arguments[f"num_{heads}_heads"] * size for heads in ("query", "key_value"))
        tensors = self.linear(f"{name}.q_proj", d, inner, f"{layer}/q_proj")
        tensors += self.linear(f"{name}.k_proj", d, keys, f"{layer}/k_proj")
        tensors += self.linear(f"{name}.v_proj", d, keys, f"{layer}/v_proj")
        return tensors + self.linear(f"{name}.{output}", inner, d, f"{layer}/o_proj", output_bias)

    def mlp(self, name, hidden_dim, intermediate_dim, bias=False, names=MLP_LAYERS):
        """Returns a list of the tensors of a gated MLP; `names` are those of `MLP_LAYERS`."""
        sizes = hidden_dim, intermediate_dim
        layers = zip(names, MLP_LAYERS, (sizes, sizes, sizes[::-1]), strict=True)
        return [
            tensor
            for theirs, ours, shape in layers
            for tensor in self.linear(f"{name}.{theirs}", *shape, f"mlp/{ours}", bias)
        ]


def check(checkpoint, tensors, note=""):
    """Raises an error if the tensors of a checkpoint are not those that a model needs.

    note: string, a sentence that the error message has before the names of tensors.
    """
    found = checkpoint.tensors
    wanted = {tensor.name: tensor.shape for tensor in tensors}
    wanted |= {tensor.copy: tensor.shape for tensor in tensors if tensor.copy in found}
    faults = {
        "missing": [repr(name) for name in wanted if name not in found],
        "unknown": [short_repr(name) for name in sorted(found) if name not in wanted],
        "of another shape": [
            f"{name!r} {short_repr(list(found[name].shape))} instead of {list(shape)}"
            for name, shape in wanted.items()
            if name in found and found[name].shape != tuple(shape)
        ],
        f"of a dtype other than {', '.join(DTYPES)}": [
            f"{name!r} {found[name].dtype}"
            for name in wanted
            if name in found and found[name].dtype not in DTYPES
        ],
    }
    lines = [f"{len(names)} {what}: {abbreviate(names)}" for what, names in faults.items() if names]
    if lines:
        raise ValueError(
            f"The tensors of {checkpoint.preset!r} are not those of the model in its config.json."
            f"{note} "
            + "; ".join(lines)
            + ". The two files may be of different models, or the weights of only a part of the "
            "model, such as adapters."
        )


def assign(backbone, checkpoint, tensors):
    """Reads the tensors one by one into the weights of a backbone; warns once if any hold NaN."""
    variables = {variable.path: variable for variable in backbone.variables}
    with_nan, num_bytes = [], 0
    with progress(f"Reading {checkpoint.preset}", "weights", checkpoint.num_bytes()) as done:
        for tensor in tensors:
            size, holds_nan = _assign_tensor(variables, checkpoint, tensor)
            if holds_nan:
                with_nan.append(repr(tensor.name))
            done(size)
            num_bytes += size
            if num_bytes > BYTES_BETWEEN_TRIMS:
                _trim_heap()
                num_bytes = 0
    if with_nan:
        warnings.warn(
            f"Tensors of {checkpoint.preset!r} hold NaN, and the outputs of the model will, too: "
            f"{abbreviate(with_nan, 1)}. The files are damaged, or of a run that diverged.",
            stacklevel=2,
        )


def _assign_tensor(variables, checkpoint, tensor):
    """Assigns one tensor; returns its number of bytes, and True if it holds NaN."""
    array = checkpoint.read(tensor.name)
    if tensor.copy in checkpoint.tensors:
        _check_copy(checkpoint, tensor, array)
    values = tensor.transform.to_weights(array)
    for path, value in zip(tensor.weights, values, strict=True):
        variable = variables[path]
        variable.assign(_to_tensor(value.astype(variable.dtype, copy=False)))
    return array.nbytes, has_nan(array)


def _to_tensor(array):
    """Returns the array; on torch, a tensor that shares its memory.

    On torch, `assign` would copy the array first, and convert bfloat16 through float32.
    """
    if keras.backend.backend() != "torch":
        return array
    import torch

    if array.dtype == "bfloat16":  # unknown to `from_numpy`
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array)


def _trim_heap():
    """Returns freed memory to the system; otherwise glibc may keep the size of all weights."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only in glibc
        if trim is not None:
            trim(0)


def _check_copy(checkpoint, tensor, array):
    """Raises an error if a file holds other values under a tensor's second name."""
    copy = checkpoint.read(tensor.copy)
    if not np.array_equal(copy.view("uint8"), array.view("uint8")):
        raise ValueError(
            f"{tensor.copy!r} of {checkpoint.preset!r} differs from {tensor.name!r}, but its "
            "config.json says 'tie_word_embeddings'. Set it to false to use both."
        )


def has_nan(array):
    """Returns True if a floating-point array holds NaN. Allocates no array of its size.

    Compared as integers, the bits of a NaN are above those of infinity; for a NaN with the sign
    bit set, as unsigned integers and above those of −infinity.
    """
    infinity, bits = np.array(np.inf, array.dtype), array.dtype.itemsize * 8
    signed, unsigned = array.view(f"int{bits}"), array.view(f"uint{bits}")
    return bool(
        signed.max(initial=0) > infinity.view(f"int{bits}")
        or unsigned.max(initial=0) > (-infinity).view(f"uint{bits}")
    )
