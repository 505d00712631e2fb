"""Steps of generation by fused operations, which read each weight once, on NVIDIA GPUs."""

import contextlib
import threading

import keras
from keras import ops

from keras_recurrent import dispatch
from keras_recurrent.layers.rms_norm import RMSNorm


class _Writing(threading.local):
    now = False


_writing = _Writing()


@contextlib.contextmanager
def writing():
    """Inside, gradients are not asked for, and blocks may take their fused steps."""
    before, _writing.now = _writing.now, True
    try:
        yield
    finally:
        _writing.now = before


def wanted(inputs):
    """Whether a block should take a fused step for inputs [B, T, D]."""
    return _writing.now and inputs.shape[1] == 1 and _has_kernels(inputs)


def _has_kernels(inputs):
    """Whether the kernels for NVIDIA GPUs serve here, if only in the interpreter."""
    if "triton" not in dispatch.serving() or keras.distribution.distribution() is not None:
        return False
    if dispatch.chosen_name():
        return dispatch.chosen_name() == "triton"
    if dispatch.BACKEND == "jax":
        import jax

        return jax.default_backend() == "gpu"
    return inputs.is_cuda


def is_plain(dense):
    """Whether a layer is Keras's `Dense` as it was made, without activation and adapters."""
    return (
        type(dense) is keras.layers.Dense
        and dense.activation is keras.activations.linear
        and not dense.lora_enabled
        and dense.quantization_mode is None
        and not _is_hooked(dense)
    )


def is_plain_norm(norm):
    return type(norm) is RMSNorm and not _is_hooked(norm)


def _is_hooked(layer):
    """Whether something else runs before, after or in place of the layer's `call`."""
    return "call" in vars(layer) or any(
        getattr(layer, f"_forward{name}_hooks", ()) for name in ("", "_pre")
    )


def maps(*layers):
    """The `kernels` and `biases` of some `Dense`, in their compute dtype."""
    return {
        "kernels": [ops.cast(dense.kernel, dense.compute_dtype) for dense in layers],
        "biases": [dense.bias if dense.use_bias else None for dense in layers],
    }


def of_norm(norm):
    """The `scale` and the `epsilon` of an `RMSNorm`."""
    return {"scale": norm.factor(), "epsilon": norm.epsilon}
