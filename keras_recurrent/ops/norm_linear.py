"""A norm and the linear maps behind it, for the few rows of a step of generation."""

import keras

from keras_recurrent.checks.arguments import is_finite_number
from keras_recurrent.ops.operation import Operation

GATES = (None, "silu", "gelu")


def shown_in_lists(lists):
    """`{name of a tensor: its place in a list}`, for up to three of each."""
    return {
        f"{name}{end}": f"{plural}[{i}]"
        for name, plural in lists.items()
        for i, end in enumerate(("", "_2", "_3"))
    }


def _list_in_words(given):
    return f"{len(given)}" if isinstance(given, (list, tuple)) else type(given).__name__


@keras.saving.register_keras_serializable(package="keras_recurrent")
class NormLinearOperation(Operation):
    function = "norm_linear"
    options = {"epsilon": None, "gate": None}
    parameters: tuple[str, ...] = ("x", "kernels", "biases", "scale", "residual")
    beside_kernels = {"bias": "biases"}  # what each kernel may have
    shown = shown_in_lists({"kernel": "kernels", **beside_kernels})

    @classmethod
    def expand(cls, given):
        given = dict(given)
        kernels = given.pop("kernels", None)
        if not isinstance(kernels, (list, tuple)) or not 1 <= len(kernels) <= 3:
            raise ValueError(
                f"`{cls.function}`: `kernels` must be a list of one to three matrices; got "
                f"{_list_in_words(kernels)}."
            )
        for i, kernel in enumerate(kernels):
            if kernel is None:
                raise ValueError(
                    f"`{cls.function}`: `kernels[{i}]` is None; leave it out of the list."
                )
        for name, plural in {"kernel": "kernels", **cls.beside_kernels}.items():
            several = kernels if plural == "kernels" else given.pop(plural, None)
            several = [None] * len(kernels) if several is None else several
            if not isinstance(several, (list, tuple)) or len(several) != len(kernels):
                raise ValueError(
                    f"`{cls.function}`: `{plural}` must be a list of as many as there are "
                    f"`kernels`, {len(kernels)}; got {_list_in_words(several)}."
                )
            several = [*several, None, None][:3]
            given |= dict(zip((name, f"{name}_2", f"{name}_3"), several, strict=True))
        return given

    @classmethod
    def check(cls, tensors, context, options):
        epsilon, gate = options["epsilon"], options["gate"]
        if epsilon is not None and (not is_finite_number(epsilon) or epsilon < 0):
            raise ValueError(
                f"`{cls.function}`: `epsilon` must be a finite number, at least 0, or None where "
                f"there is no norm; got {epsilon!r}."
            )
        if epsilon is None and tensors["scale"] is not None:
            raise ValueError(
                f"`{cls.function}`: `scale` is the norm's: pass its `epsilon`, too, or leave "
                "`scale` out."
            )
        if gate not in GATES:
            raise ValueError(f"`{cls.function}`: `gate` must be one of {GATES}; got {gate!r}.")
        several, third = (tensors[name] is not None for name in ("kernel_2", "kernel_3"))
        behind_gate = cls.alternatives.get("gate")  # arguments where a third kernel follows a gate
        if gate is not None and (not several or (third and not behind_gate)):
            third_may = ", or three, of which the last takes what the gate gives"
            raise ValueError(
                f"`{cls.function}`: a `gate` is between two kernels, so `kernels` must have two"
                f"{third_may if behind_gate else ''}; got {1 + several + third}."
            )
        arguments = behind_gate if gate is not None and third else None
        sizes = cls.check_tensors(tensors, arguments)
        if sizes["K"] == 0:
            raise ValueError(f"`{cls.function}`: `x` must have at least one channel; got none.")
        if gate is not None and sizes["N"] != sizes["M"]:
            raise ValueError(
                f"`{cls.function}`: with a `gate` both kernels must have one width; got "
                f"{sizes['N']} and {sizes['M']}."
            )
        if tensors["residual"] is not None and several and gate is None:
            raise ValueError(
                f"`{cls.function}`: a `residual` is for one output; got {2 + third} `kernels`, of "
                "which each has one. Call once for each, or leave `residual` out."
            )
        return sizes

    def output_spec(self, tensors, sizes):
        names = ("kernel", "kernel_2", "kernel_3")
        specs = super().output_spec(tensors, sizes)
        outputs = [
            spec for name, spec in zip(names, specs, strict=True) if tensors.get(name) is not None
        ]
        if self.options["gate"] is not None:
            outputs = outputs[:1] if tensors.get("kernel_3") is None else outputs[2:]
        return tuple(outputs)


def norm_linear(
    x,
    kernels,
    *,
    biases=None,
    scale=None,
    epsilon=None,
    gate=None,
    residual=None,
    implementation=None,
):
    """Linear maps of normalized rows, what a step of generation spends its time on.

    ```
    y_i = RMSNorm(x) W_i + b_i          for up to three W_i
    y = activation(y_1) * y_2           with a gate
    y = y W_3 + b_3                     with a gate and a third W
    y = y + residual                    with a residual, to a single output
    ```

    Each weight is read once. The kernel for NVIDIA GPUs takes up to 16 rows, of float32 or
    bfloat16, the same of `x` and kernels, and has no gradient: where one may be asked for (on
    torch wherever gradients are on and a tensor wants one), the plain implementation runs, which
    has. A row whose norm is 0 is normalized to 0, and one that is not finite says nothing of the
    others.

    Args:
        x: `[B, K]`, float16, bfloat16, float32 or float64; at least one channel.
        kernels: a list of one to three matrices `[K, N]`, `[K, M]` and `[K, L]`. With a gate M is
            N, and the third is `[N, L]`. Tensors other than `x` may have other floating dtypes.
        biases: a list of as many vectors, `[N]`, `[M]` and `[L]`, or None for no biases; a bias
            may be None, too.
        scale: `[K]`, the norm's weight; None: ones.
        epsilon: the norm's ε, at least 0 and finite; None: there is no norm.
        gate: `"silu"` or `"gelu"` (by tanh): the first of two maps, activated, multiplies the
            second, as in `keras_recurrent.ops.gated_linear_unit`, and a third map takes that, as in
            a gated multilayer perceptron. None: the maps are returned.
        residual: `[B, width]`, added to a single output; None: nothing is.
        implementation: as in `keras_recurrent.ops.linear_scan`.

    Returns:
        A list of outputs `[B, width]`, one for each kernel, or one with a gate, in the dtype of
        `x`. Sums are float32, or float64 if a tensor is, and each output is rounded once; but
        the kernel for NVIDIA GPUs may round normalized rows and what a gate gives, too, as layers
        do one by one.

    Raises:
        ValueError: a shape or dtype does not fit, no kernels, more than three or a None among
            them, another number of biases, a bad `epsilon` or `gate`, a `scale` without `epsilon`,
            a `residual` beside several outputs, or the implementation is unknown.
        NotImplementedError: no implementation accepts the arguments; says why for each.

    Example:

    >>> import numpy as np
    >>> from keras_recurrent.ops import norm_linear
    >>> x, kernel = np.array([[3, 4]], "float32"), np.eye(2, dtype="float32")
    >>> np.array(norm_linear(x, [kernel], residual=x)[0])
    array([[6., 8.]], dtype=float32)
    """
    given = {"x": x, "kernels": kernels, "biases": biases, "scale": scale, "residual": residual}
    expanded = NormLinearOperation.expand(given)
    tensors = {name: expanded[name] for name in NormLinearOperation.signature.tensors}
    options = {"epsilon": epsilon, "gate": gate}
    return list(NormLinearOperation.apply(tensors, implementation, options))
