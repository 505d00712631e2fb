"""A token of HGRN2's recurrence, for a step of generation."""

import keras

from keras_recurrent.ops.operation import Operation


@keras.saving.register_keras_serializable(package="keras_recurrent")
class HGRN2StepOperation(Operation):
    function = "hgrn2_step"
    context = {"token_kind": "B"}

    @classmethod
    def check(cls, tensors, context, options):
        sizes = cls.check_tensors({"memory": tensors["memory"]})
        for name, part in (("q", "K"), ("f", "K"), ("v", "V")):
            cls.check_tensors({name: tensors[name]})
            known = sizes["H"], sizes[part], tensors[name].shape[-1]
            if None not in known and known[0] * known[1] != known[2]:
                raise ValueError(
                    f"`hgrn2_step`: `{name}` must have the shape [B, H {part}], with H {part} = "
                    f"{known[0] * known[1]} as in `memory` [B, H, K, V]; got "
                    f"{tuple(tensors[name].shape)}."
                )
        return super().check(tensors, context, options)


def hgrn2_step(q, f, v, memory, *, lower_bound=None, token_kind=None, implementation=None):
    """A token of HGRN2's recurrence, from the three linear maps before it.

    ```
    S' = diag(f) S + (1 - f) v^T,   f = β + (1 - β) σ(f logits)
    o = S'^T silu(q) K^(-1/2)
    ```

    Qin et al. 2024 (arXiv:2404.07904, section 3), in each of H heads. The kernel for NVIDIA GPUs
    has no gradient: where one is asked for, the plain implementation runs, which has.

    Args:
        q, f: `[B, H K]`, the maps to output gates and to the logits of forget gates: float16,
            bfloat16, float32 or float64.
        v: `[B, H V]`, the inputs.
        memory: `[B, H, K, V]`, S.
        lower_bound: `[2, H K]`, log β and log(1 - β), as a row of what
            `keras_recurrent.layers.LowerBounds` returns; None: β is 0.
        token_kind: int8 `[B]`, as in `keras_recurrent.ops.token_kind`; None: all tokens go on.
        implementation: as in `keras_recurrent.ops.linear_scan`.

    Returns:
        `(o [B, H V] in the dtype of v, memory [B, H, K, V])`, the latter in float32, or float64 if
        a tensor is.

    Raises:
        ValueError: a shape or dtype does not fit, or the implementation is unknown.
        NotImplementedError: no implementation accepts the arguments; says why for each.

    Example:

    >>> import numpy as np
    >>> from keras_recurrent.ops import hgrn2_step
    >>> row, memory = np.ones((1, 4), "float32"), np.zeros((1, 2, 2, 2), "float32")
    >>> o, memory = hgrn2_step(row, row, row, memory)
    >>> tuple(o.shape), tuple(memory.shape)
    ((1, 4), (1, 2, 2, 2))
    """
    tensors = {"q": q, "f": f, "v": v, "memory": memory, "lower_bound": lower_bound}
    return HGRN2StepOperation.apply(tensors, implementation, token_kind=token_kind)
