"""Products of int8 tensors, which XLA for NVIDIA GPUs doubles at some sizes."""

import functools

import keras
import numpy as np
import pytest

from tests.layers.table import numpy

EQUATIONS = {
    "nk,ko->no": ((7, -1), (-1, 5)),
    "btk,ko->bto": ((2, 7, -1), (-1, 5)),
    "hnk,hko->hno": ((4, 7, -1), (4, -1, 5)),
    "b...k,ok->b...o": ((2, 3, 7, -1), (5, -1)),
}


@pytest.mark.parametrize("equation", EQUATIONS)
@pytest.mark.parametrize("size", [3, 4, 6])
def test_matmul_and_einsum_of_int8_are_exact(equation, size):
    """On JAX with an NVIDIA GPU, a product is doubled unless the size is a multiple of 4."""
    rng = np.random.default_rng(0)
    shapes = [tuple(size if n == -1 else n for n in shape) for shape in EQUATIONS[equation]]
    a, b = (rng.integers(-127, 128, shape).astype("int8") for shape in shapes)
    expected = np.einsum(equation, a.astype("int64"), b.astype("int64"))
    tensors = keras.ops.array(a), keras.ops.array(b)
    np.testing.assert_array_equal(numpy(keras.ops.einsum(equation, *tensors)), expected)
    if equation == "nk,ko->no":
        np.testing.assert_array_equal(numpy(keras.ops.matmul(*tensors)), expected)


@pytest.mark.skipif(keras.config.backend() != "jax", reason="a guard for XLA")
def test_xla_multiplies_int32_where_int8_is_inexact():
    """A GPU doubles products; this test sees it on a CPU by the dtype that XLA multiplies."""
    import jax

    products = {e: functools.partial(keras.ops.einsum, e) for e in EQUATIONS}
    for equation, product in [*products.items(), ("nk,ko->no", keras.ops.matmul)]:
        for size in (6, 8):
            shapes = [[size if n == -1 else n for n in shape] for shape in EQUATIONS[equation]]
            program = jax.make_jaxpr(product)(*(np.ones(shape, "int8") for shape in shapes))
            shape = ",".join(map(str, shapes[0]))
            assert (f"i32[{shape}]" in str(program)) == (size == 6), equation
