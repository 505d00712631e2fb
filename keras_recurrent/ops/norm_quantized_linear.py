"""A norm and the quantized linear maps behind it, for the row of a step of generation."""

import keras

from keras_recurrent.checks.dtypes import dtype_of
from keras_recurrent.ops.norm_linear import NormLinearOperation, shown_in_lists

_ENDS = ("", "_2", "_3")
_OF_EACH = ("kernel", "kernel_scale", "kernel_zero")
_WIDTHS, _BYTES = "NML", "PQR"


@keras.saving.register_keras_serializable(package="keras_recurrent")
class NormQuantizedLinearOperation(NormLinearOperation):
    function = "norm_quantized_linear"
    options = {
        "epsilon": None,
        "gate": None,
        "bits": 8,
        "block_size": None,
        "quantize_row": True,
    }
    parameters = ("x", "kernels", "kernel_scales", "kernel_zeros", "biases", "scale", "residual")
    beside_kernels = {
        "kernel_scale": "kernel_scales",
        "kernel_zero": "kernel_zeros",
        "bias": "biases",
    }
    shown = shown_in_lists({"kernel": "kernels", **beside_kernels})
    int8 = tuple(f"{name}{end}" for name in ("kernel", "kernel_zero") for end in _ENDS)

    @classmethod
    def check_tensors(cls, tensors, arguments=None):
        in_blocks = len(getattr(tensors.get("kernel_zero"), "shape", ())) > 0
        return super().check_tensors(tensors, cls.alternatives["blocks"] if in_blocks else None)

    @classmethod
    def check(cls, tensors, context, options):
        bits, size = options["bits"], options["block_size"]
        if not isinstance(bits, int) or bits not in (8, 4):
            raise ValueError(f"`{cls.function}`: `bits` must be 8 or 4; got {bits!r}.")
        if not isinstance(options["quantize_row"], bool):
            raise ValueError(
                f"`{cls.function}`: `quantize_row` must be True or False; got "
                f"{options['quantize_row']!r}."
            )
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(
                f"`{cls.function}`: `block_size` must be a positive integer, or None where a "
                f"column has one scale; got {size!r}."
            )
        if size is not None and (bits == 8 or options["quantize_row"]):
            raise ValueError(
                f"`{cls.function}`: a `block_size` is for `bits=4` with `quantize_row=False`."
            )
        for i, end in enumerate(_ENDS):
            there, scaled, moved = (tensors.get(f"{name}{end}") is not None for name in _OF_EACH)
            wrong = None
            if there != scaled:
                wrong = "`kernel_scales` must have as many entries as `kernels`"
            elif moved and size is None:
                wrong = "`kernel_zeros` is for kernels in blocks: give their `block_size`"
            elif size is not None and moved != there:
                wrong = "with a `block_size`, `kernel_zeros` must have as many entries as `kernels`"
            if wrong:
                raise ValueError(f"`{cls.function}`: {wrong}; entry {i} does not fit.")
        sizes = super().check(tensors, context, options)
        for i, (bytes_, width) in enumerate(zip(_BYTES, _WIDTHS, strict=True)):
            found, columns = sizes.get(bytes_), sizes.get(width)
            if None in (found, columns):
                continue
            expected = columns if bits == 8 else (columns + 1) // 2
            if found != expected:
                raise ValueError(
                    f"`{cls.function}`: `kernels[{i}]` must have {expected} bytes a channel, for "
                    f"{columns} columns of {bits} bits as in `kernel_scales[{i}]`; got {found}. "
                    "Of int4, two columns are a byte, and `bits` is 4."
                )
        groups, channels = sizes.get("G"), sizes.get("K")
        if None not in (size, groups, channels) and groups != -(-channels // size):
            raise ValueError(
                f"`{cls.function}`: `kernel_scales` must have {-(-channels // size)} blocks, for "
                f"{channels} channels in blocks of {size}; got {groups}."
            )
        return sizes

    @classmethod
    def lower(cls, tensors, context, options):
        options = dict(options)
        quantized = options.pop("quantize_row")
        return {**tensors, **options, "row_dtype": dtype_of(tensors["x"]) if quantized else None}


def norm_quantized_linear(
    x,
    kernels,
    kernel_scales,
    *,
    bits=8,
    block_size=None,
    kernel_zeros=None,
    quantize_row=True,
    biases=None,
    scale=None,
    epsilon=None,
    gate=None,
    residual=None,
    implementation=None,
):
    """Linear maps of normalized rows by quantized matrices, as `keras.layers.Dense` has them.

    As `keras_recurrent.ops.norm_linear`, with matrices

    ```
    W = kernel / kernel_scale                       one scale a column
    W = (kernel - kernel_zero) * kernel_scale       with a block_size: one a column and block
    ```

    and, with `quantize_row`, a row that is an integer, too:

    ```
    f = 127 / (max |RMSNorm(x)| + 1e-7),   y = round(f RMSNorm(x)) kernel / (kernel_scale f) + b
    ```

    where the normalized row, f and their product are rounded to the dtype of `x`, as in Keras. Each
    byte of a matrix is read once. The kernel for NVIDIA GPUs takes a single row, and columns that
    fill words of 32 bits. There, a row that is not quantized becomes fixed-point numbers of 16 bits
    (bfloat16) or 24 (float32), the largest magnitude near their end; one that holds NaN or infinity
    makes all outputs NaN. It has no gradient; plain versions have that of the formula, which with
    `quantize_row` reaches the largest number of a row alone. In float16, f is infinite for rows
    whose largest number is below 0.002.

    Args:
        x: `[B, K]`, float16, bfloat16, float32 or float64.
        kernels: a list of one to three matrices, int8: `[K, its width]`, or of 4 bits
            `[K, width / 2, rounded up]`, packed by `keras.quantizers.pack_int4(axis=-1)`.
        kernel_scales: a list of as many vectors `[width]`; with a `block_size` matrices
            `[K / block_size, rounded up, width]`.
        bits: 8 or 4, of a weight.
        block_size: how many channels have one scale and zero point, as
            `keras.quantizers.Int4QuantizationConfig` has them, with `bits=4` and without
            `quantize_row`; None: a column has one scale.
        kernel_zeros: with a `block_size` a list of as many int8 matrices, shaped as the scales.
        quantize_row: boolean, whether rows are quantized, too.
        gate: as in `norm_linear`, between two kernels; a third one behind it is a call of its own.
        biases, scale, epsilon, residual, implementation: as in `norm_linear`.

    Returns:
        A list of outputs `[B, width]`, one for each kernel, or one with a gate, in the dtype of
        `x`. Sums are float32, or float64 if a tensor is; each output is rounded once.

    Raises:
        ValueError: as for `norm_linear`; scales or zero points that do not fit the kernels, `bits`
            or a `block_size` that are none, or a `block_size` with 8 bits or `quantize_row`.
        NotImplementedError: no implementation accepts the arguments; says why for each.

    Example:

    >>> import numpy as np
    >>> from keras_recurrent.ops import norm_quantized_linear
    >>> x, kernel = np.array([[3, 127]], "float32"), np.array([[4], [2]], "int8")
    >>> (y,) = norm_quantized_linear(x, [kernel], [np.full(1, 2, "float32")])
    >>> np.round(np.array(y))
    array([[133.]], dtype=float32)
    """
    operation = NormQuantizedLinearOperation
    given = {"x": x, "kernels": kernels, "kernel_scales": kernel_scales, "biases": biases}
    given |= {"kernel_zeros": kernel_zeros, "scale": scale, "residual": residual}
    expanded = operation.expand(given)
    options = {"epsilon": epsilon, "gate": gate, "bits": bits, "block_size": block_size}
    tensors = {name: expanded[name] for name in operation.signature.tensors}
    options |= {"quantize_row": quantize_row}
    return list(operation.apply(tensors, implementation, options))
