"""Operations of a decoding step, which layers call for one token of each sequence.

These operations are not public: their arguments are those of an implementation in `backends/`. The
Triton kernels read each weight once and have no gradients. `portable/` has an implementation for
all backends.
"""

import keras
from keras import ops

from keras_recurrent import dispatch
from keras_recurrent.checks.dtypes import dtype_of, sum_dtype
from keras_recurrent.ops.operation import Operation

ENDS = ("", "_2", "_3", "_4")  # of the names of up to four kernels and their biases
KERNELS = tuple(f"kernel{end}" for end in ENDS)


@keras.saving.register_keras_serializable(package="keras_recurrent")
class NormLinearOperation(Operation):
    function = "norm_linear"
    options = {"epsilon": None, "gate": None, "output_scale": None}

    @classmethod
    def check(cls, tensors, context, options):
        gated_product = options["gate"] is not None and tensors["kernel_3"] is not None
        return cls.check_tensors(tensors, cls.alternatives["gate"] if gated_product else None)

    def output_spec(self, tensors, sizes):
        kernels = [tensors.get(name) for name in KERNELS]
        specs = zip(super().output_spec(tensors, sizes), kernels, strict=True)
        outputs = [spec for spec, kernel in specs if kernel is not None]
        if self.options["gate"] is not None:
            outputs = outputs[2:] or outputs[:1]
        if tensors.get("next_scale") is not None:
            squares = keras.KerasTensor((sizes["B"], None), sum_dtype(*tensors.values()))
            outputs += [outputs[0], squares]
        return tuple(outputs)


@keras.saving.register_keras_serializable(package="keras_recurrent")
class NormQuantizedLinearOperation(NormLinearOperation):
    function = "norm_quantized_linear"
    options = {
        **NormLinearOperation.options,
        **{"bits": 8, "block_size": None, "quantize_row": True},
    }
    int8 = tuple(f"{name}{end}" for name in ("kernel", "kernel_zero") for end in ENDS)

    @classmethod
    def check(cls, tensors, context, options):
        in_blocks = options["block_size"] is not None
        return cls.check_tensors(tensors, cls.alternatives["blocks"] if in_blocks else None)

    @classmethod
    def lower(cls, tensors, context, options):
        options = dict(options)
        quantized = options.pop("quantize_row")
        return {**tensors, **options, "row_dtype": dtype_of(tensors["x"]) if quantized else None}


@keras.saving.register_keras_serializable(package="keras_recurrent")
class HGRN2StepOperation(Operation):
    function = "hgrn2_step"
    context = {"token_kind": "B"}


@keras.saving.register_keras_serializable(package="keras_recurrent")
class HGRN2DelayedStepOperation(Operation):
    function = "hgrn2_delayed_step"
    context = {"token_kind": "B"}


@keras.saving.register_keras_serializable(package="keras_recurrent")
class LightningStepOperation(Operation):
    function = "lightning_step"
    options = {"epsilon": None, "query_scale": None}
    context = {"token_kind": "B"}


@keras.saving.register_keras_serializable(package="keras_recurrent")
class RGLRUStepOperation(Operation):
    function = "rg_lru_step"
    context = {"token_kind": "B"}


@keras.saving.register_keras_serializable(package="keras_recurrent")
class LocalAttentionStepOperation(Operation):
    function = "local_attention_step"
    options = {"sliding_window": None, "epsilon": None, "logit_scaling": None}
    context = {"token_kind": "B"}

    @classmethod
    def lower(cls, tensors, context, options):
        frequencies = tensors["frequencies"]
        if frequencies is not None and frequencies.shape[0] == 0:
            tensors = {**tensors, "frequencies": None}
        position = ops.cast(tensors["position"], "int32")
        # The cache has the dtypes of keys and values, as in a layer.
        key, value = (
            ops.cast(tensors[cache], tensors[x].dtype)
            for cache, x in (("key", "k"), ("value", "v"))
        )
        return {**tensors, "key": key, "value": value, "position": position, **context, **options}


def norm_linear(x, kernels, biases, **others):
    """Applies RMSNorm and up to four linear layers to x [B, D], with optional gates and residual.

    With `squares`, sums of squares of rows, x has been multiplied by the norm's weight. With
    `gate`, the first two kernels form a gated unit, and the third, if any, takes its result.
    `output_scale` multiplies the outputs, and `residual` is added to the first one. Kernels and
    biases are passed as lists. See `backends/reference/norm_linear.py`.

    Returns:
        A list of outputs [B, N]: one for each kernel, or a single one with `gate`. With
        `next_scale`, the weight of the norm that follows, the list ends with the product of the
        output and this weight, and with sums of squares of the output [B, U].
    """
    return _apply(NormLinearOperation, {"x": x}, {"kernel": kernels, "bias": biases}, others)


def norm_quantized_linear(x, kernels, kernel_scales, kernel_zeros, biases, **others):
    """Counterpart of `norm_linear` for quantized kernels of `keras.layers.Dense`.

    See `backends/reference/norm_quantized_linear.py`. With `quantize_row`, the normalized input is
    also quantized.
    """
    lists = {"kernel": kernels, "kernel_scale": kernel_scales, "bias": biases}
    if kernel_zeros is not None:
        lists["kernel_zero"] = kernel_zeros
    return _apply(NormQuantizedLinearOperation, {"x": x}, lists, others)


def _apply(operation, tensors, lists, others):
    for name, given in lists.items():
        tensors |= {f"{name}{end}": t for end, t in zip(ENDS[: len(given)], given, strict=True)}
    options = {name: others.pop(name) for name in operation.options if name in others}
    tensors = {name: (tensors | others).get(name) for name in operation.signature.tensors}
    return list(operation.apply(tensors, None, operation.options | options))


def hgrn2_step(q, f, v, memory, lower_bound=None, norm_scale=None, token_kind=None):
    """Computes HGRN2 between its projections; see `backends/reference/hgrn2_step.py`."""
    tensors = {"q": q, "f": f, "v": v, "memory": memory, "lower_bound": lower_bound}
    tensors["norm_scale"] = norm_scale
    return HGRN2StepOperation.apply(tensors, None, token_kind=token_kind)


def hgrn2_delayed_step(token_kind=None, **tensors):
    """Computes `hgrn2_step`, and writes the memory only every few tokens.

    See `backends/reference/hgrn2_delayed_step.py`.
    """
    return HGRN2DelayedStepOperation.apply(tensors, None, token_kind=token_kind)


def lightning_step(token_kind=None, epsilon=None, query_scale=None, **tensors):
    """Computes lightning attention of one token; see `backends/reference/lightning_step.py`."""
    options = {"epsilon": epsilon, "query_scale": query_scale}
    return LightningStepOperation.apply(tensors, None, options, token_kind=token_kind)


def rg_lru_step(token_kind=None, **tensors):
    """Computes Griffin's recurrent block between its projections.

    See `backends/reference/rg_lru_step.py`.
    """
    return RGLRUStepOperation.apply(tensors, None, token_kind=token_kind)


def local_attention_step(
    sliding_window=None, token_kind=None, epsilon=None, logit_scaling=None, **tensors
):
    """Computes the attention of one query; see `backends/reference/local_attention_step.py`."""
    options = {"sliding_window": sliding_window, "epsilon": epsilon, "logit_scaling": logit_scaling}
    return LocalAttentionStepOperation.apply(tensors, None, options, token_kind=token_kind)


def embedding_step(**arguments):
    """Returns embeddings, token kinds, positions and the next state of a step's tokens.

    See `backends/reference/embedding_step.py`.
    """
    return dispatch.run("embedding_step", arguments)


def soft_cap(x, cap):
    """Returns cap tanh(x / cap) for logits [B, V], or x if `cap` is None."""
    return x if cap is None else dispatch.run("soft_cap", {"x": x, "cap": cap})
