"""A token of Griffin's recurrent block, for a step of generation."""

import keras

from keras_recurrent.ops.operation import Operation


@keras.saving.register_keras_serializable(package="keras_recurrent")
class RGLRUStepOperation(Operation):
    function = "rg_lru_step"
    context = {"token_kind": "B"}

    @classmethod
    def check(cls, tensors, context, options):
        # These first, so that an error names the one of them that does not fit the others.
        first = {name: tensors[name] for name in ("x", "conv_kernel", "kernel_a")}
        sizes = cls.check_tensors(first)
        if sizes["W"] == 0:
            raise ValueError("`rg_lru_step`: `conv_kernel` must have at least one row; got none.")
        known = sizes["N"], sizes["C"], sizes["D"]
        if None not in known and known[0] * known[1] != known[2]:
            raise ValueError(
                f"`rg_lru_step`: `kernel_a` must have the shape [N, C, C] with N C = {known[2]}; "
                f"got {tuple(tensors['kernel_a'].shape)}."
            )
        return super().check(tensors, context, options)


def rg_lru_step(
    x,
    gate,
    window,
    hidden,
    *,
    conv_kernel,
    conv_bias,
    kernel_a,
    bias_a,
    kernel_x,
    bias_x,
    a_logit,
    token_kind=None,
    implementation=None,
):
    """A token of Griffin's recurrent block, between its linear maps.

    ```
    c = Σ_i conv_kernel_i x_(t-W+1+i) + conv_bias    the last W inputs
    r = σ(W_a c + b_a),  i = σ(W_x c + b_x)          W_a, W_x block-diagonal, N blocks
    h' = a h + sqrt(1 - a^2) i c,  log a = -8 softplus(-a_logit) r
    y = gelu(gate) h'
    ```

    De et al. 2024 (arXiv:2402.19427, sections 2.3 and 2.4), with the gelu by tanh. The kernel for
    NVIDIA GPUs has no gradient: where one is asked for, the plain implementation runs, which has.

    Args:
        x: `[B, D]`, the newest input: float16, bfloat16, float32 or float64.
        gate: `[B, D]`, what gelu takes.
        window: `[B, W-1, D]`, the inputs before, the oldest first.
        hidden: `[B, D]`, h.
        conv_kernel: `[W, D]`; conv_bias: `[D]`.
        kernel_a, kernel_x: `[N, C, C]`, N C = D, inputs before outputs; bias_a, bias_x: `[N, C]`.
        a_logit: `[D]`, of which σ is the decay where r is 1/8.
        token_kind: int8 `[B]`, as in `keras_recurrent.ops.token_kind`; None: all tokens go on.
            A first token of a document has h' = i c, as in `keras_recurrent.ops.rg_lru`.
        implementation: as in `keras_recurrent.ops.linear_scan`.

    Returns:
        `(y [B, D] in the dtype of x, window [B, W-1, D], hidden [B, D])`, the latter two in
        float32, or float64 if a tensor is.

    Raises:
        ValueError: a shape or dtype does not fit, or the implementation is unknown.
        NotImplementedError: no implementation accepts the arguments; says why for each.

    Example:

    >>> import numpy as np
    >>> from keras_recurrent.ops import rg_lru_step
    >>> row, square = np.ones((1, 4), "float32"), np.ones((2, 2, 2), "float32")
    >>> y, window, hidden = rg_lru_step(
    ...     row,
    ...     row,
    ...     np.zeros((1, 3, 4), "float32"),
    ...     row,
    ...     conv_kernel=np.ones((4, 4), "float32"),
    ...     conv_bias=row[0],
    ...     kernel_a=square,
    ...     bias_a=square[0],
    ...     kernel_x=square,
    ...     bias_x=square[0],
    ...     a_logit=row[0],
    ... )
    >>> tuple(y.shape), tuple(window.shape)
    ((1, 4), (1, 3, 4))
    """
    tensors = {
        "x": x,
        "gate": gate,
        "window": window,
        "hidden": hidden,
        "conv_kernel": conv_kernel,
        "conv_bias": conv_bias,
        "kernel_a": kernel_a,
        "bias_a": bias_a,
        "kernel_x": kernel_x,
        "bias_x": bias_x,
        "a_logit": a_logit,
    }
    return RGLRUStepOperation.apply(tensors, implementation, token_kind=token_kind)
