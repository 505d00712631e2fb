"""Each change to Keras and KerasHub is needed: the original function is wrong.

If a test fails with a new version of Keras, KerasHub or JAX, remove the change from
`keras_recurrent/upstream.py`, and the test.
"""

import functools
import importlib
import inspect
import re

import keras
import keras_hub
import numpy as np
import pytest
from keras_hub.src.models import task

from keras_recurrent import compat, layers, models, upstream
from keras_recurrent.layers import integer_products
from keras_recurrent.layers.weight_copies import copies_scope
from tests.gpu import has_gpu

BACKEND = keras.backend.backend()


def original(name):
    """Returns the function of Keras that changes with this name replace."""
    owner = next(change.owner for change in upstream.CHANGES if change.name == name)
    owner = importlib.import_module(owner) if isinstance(owner, str) else owner
    return inspect.unwrap(getattr(owner, name))


@pytest.mark.once
def test_get_registered_object_of_keras_finds_no_class_that_is_not_imported(monkeypatch):
    name = "keras_recurrent>GriffinCausalLM"
    monkeypatch.setitem(keras.saving.get_custom_objects(), name, models.GriffinCausalLM)
    assert keras.saving.get_registered_object(name) is models.GriffinCausalLM
    monkeypatch.delitem(keras.saving.get_custom_objects(), name)
    assert original("get_registered_object")(name) is None


@pytest.mark.nightly
@pytest.mark.skipif(BACKEND != "torch", reason="a format of torch")
@pytest.mark.filterwarnings("ignore")
def test_export_torch_of_keras_fixes_the_batch_size(tmp_path):
    """Only the wrapped function makes sizes of None dynamic."""
    import torch

    inputs = keras.Input((None, 4))
    model = keras.Model(inputs, layers.RMSNorm()(inputs))
    path = str(tmp_path / "model.pt2")
    x = torch.ones(2, 3, 4)
    model.export(path, format="torch", verbose=False)
    torch.export.load(path).module()(x)
    original("export_torch")(model, path, verbose=False)
    with pytest.raises(AssertionError, match="Guard failed"):
        torch.export.load(path).module()(x)


@pytest.mark.once
@pytest.mark.parametrize("name", ["save_model", "save_weights_only"])
def test_saving_by_keras_destroys_the_old_file(tmp_path, name):
    class Failing(keras.layers.Dense):
        def save_own_variables(self, store):
            raise OSError("no space left on device")

    model = keras.Sequential([keras.Input((2,)), Failing(2)])
    path = tmp_path / ("model.keras" if name == "save_model" else "model.weights.h5")
    path.write_text("old")
    with pytest.raises(OSError, match="no space left"):
        original(name)(model, path)
    assert not path.exists() or path.read_bytes() != b"old"


@pytest.mark.once
@pytest.mark.parametrize("mode", ["gptq", "awq"])
def test_merged_kernel_of_keras_has_no_zero_points(mode):
    layer = keras.layers.Dense(8, dtype=f"{mode}/4/8_from_float32")
    layer.build((None, 8))
    assert original("_get_kernel_with_merged_lora")(layer)[2] is None
    assert layer._get_kernel_with_merged_lora()[2] is layer.kernel_zero


@pytest.mark.skipif(BACKEND != "jax" or not has_gpu(), reason="a fault of XLA for NVIDIA GPUs")
@pytest.mark.parametrize("name", ["matmul", "einsum"])
def test_int8_product_of_keras_on_a_gpu_is_wrong(name):
    equation = ["nk,ko->no"] if name == "einsum" else []
    a, b = np.ones((7, 6), "int8"), np.ones((6, 5), "int8")
    product = original(name)(*equation, keras.ops.array(a), keras.ops.array(b))
    assert not np.array_equal(product, a.astype("int32") @ b)


INT8_OPERANDS = {
    "one row": lambda rows, matrix: (rows[:1], matrix),
    "three axes": lambda rows, matrix: (rows.reshape(2, 3, -1), matrix),
    "equal rows": lambda rows, matrix: (rows[:1].expand(6, -1), matrix),
    "equal columns": lambda rows, matrix: (rows, matrix[:, :1].expand(-1, 40)),
    "transposed": lambda rows, matrix: (rows, matrix.T.contiguous().T),
    "no channels": lambda rows, matrix: (rows[:, :0], matrix[:0]),
}


@pytest.mark.skipif(BACKEND != "torch", reason="products of torch on CPUs")
@pytest.mark.parametrize("operands", INT8_OPERANDS.values(), ids=INT8_OPERANDS)
def test_keras_on_torch_converts_int8_matrices(operands, monkeypatch):
    """Keras no longer converts, so `multiply_on_torch` is not needed, or its products are wrong."""
    import torch

    from tests.operators import operator_names

    rng = np.random.default_rng(0)
    arrays = (rng.integers(-128, 128, size, "int8") for size in ((6, 2300), (2300, 40)))
    x, matrix = operands(*map(torch.from_numpy, arrays))
    operator = "_int_mm" if compat._is_vnni_supported() else "split"
    monkeypatch.setattr(compat, "_is_vnni_supported", lambda: False, raising=False)
    by_floats = integer_products.multiply_on_torch(original("matmul"))
    compiled = torch.compile(keras.ops.matmul, backend="eager", fullgraph=True)
    in_bfloat16 = torch.autocast("cpu", torch.bfloat16)
    with keras.device("cpu"):
        for matmul in (keras.ops.matmul, by_floats, compiled, in_bfloat16(by_floats)):
            product = matmul(x, matrix)
            assert product.dtype == torch.int32
            np.testing.assert_array_equal(product, x.numpy().astype("int32") @ matrix.numpy())
        matmuls = [(original("matmul"), None), (keras.ops.matmul, operator), (by_floats, "split")]
        for matmul, expected in matmuls:
            _, names = operator_names(functools.partial(matmul, x, matrix))
            assert names & {"_int_mm", "split"} == ({expected} - {None} if x.numel() else set())


@pytest.mark.skipif(BACKEND != "jax", reason="products of XLA on CPUs")
@pytest.mark.parametrize("shape", [(300,), (1, 300), (1, 1, 300)])
def test_xla_converts_the_matrix_for_a_row_of_int8(shape):
    """XLA no longer converts the matrix, so no row need be added, or the products are wrong."""
    import jax

    rng = np.random.default_rng(0)
    x, matrix = (rng.integers(-128, 128, size, "int8") for size in (shape, (300, 40)))
    with keras.device("cpu"):
        for matmul, converts in ((original("matmul"), True), (keras.ops.matmul, False)):
            program = jax.jit(matmul).lower(x, matrix).compile()
            assert ("s32[300,40]" in program.as_text()) == converts
            product = program(x, matrix)
            assert product.dtype == "int32"
            np.testing.assert_array_equal(product, x.astype("int32") @ matrix)


@pytest.mark.skipif(BACKEND != "jax" or has_gpu(), reason="programs of XLA for CPUs")
@pytest.mark.parametrize("has_change", [False, True])
def test_xla_on_cpus_converts_weights_in_each_launch(has_change):
    """Without copies, a launch of a program converts the weights before its first step."""
    import jax

    kernel = keras.Variable(np.ones((32, 32)), dtype="bfloat16")
    matmul = keras.ops.matmul if has_change else original("matmul")

    def decode(value, copy, x):
        with keras.StatelessScope([(kernel, value)]), copies_scope([kernel], [copy]):
            return jax.lax.fori_loop(0, 3, lambda _, x: matmul(x, kernel), x)

    x = keras.ops.ones((1, 32), "bfloat16")
    arguments = kernel.value, keras.ops.cast(kernel, "float32"), x
    text = jax.jit(decode).lower(*arguments).compile().as_text()
    assert (re.search(r"f32\[32,32\]\S* convert", text) is None) == has_change


@pytest.mark.skipif(BACKEND != "jax" or has_gpu(), reason="programs of XLA for CPUs")
@pytest.mark.parametrize("num_rows", [1, 3])
def test_int8_layers_of_keras_multiply_by_columns(num_rows):
    """Products with transposed copies are wrong, or Keras reads them without the change."""
    import jax

    layer, rng = keras.layers.Dense(40), np.random.default_rng(0)
    layer.build((None, 300))
    layer.quantize("int8")
    x, kernel = rng.normal(size=(num_rows, 300)).astype("float32"), layer._kernel
    product, arguments = layer(x), (kernel.value, keras.ops.transpose(kernel), x)

    def decode(value, copy, x, has_change):
        function = keras.layers.Dense._int8_call if has_change else original("_int8_call")
        with keras.StatelessScope([(kernel, value)]), copies_scope([kernel], [copy]):
            return jax.lax.fori_loop(0, 3, lambda *_: function(layer, x), product)

    for has_change in (False, True):
        program = jax.jit(decode, static_argnums=3).lower(*arguments, has_change).compile()
        assert ("rhs_contracting_dims={1}" in program.as_text()) == has_change
        np.testing.assert_array_equal(program(*arguments), product)
    with copies_scope([kernel], arguments[1:2]):  # a transposed copy is no float32 copy
        found = keras.ops.matmul(x, kernel)
    np.testing.assert_array_equal(found, keras.ops.matmul(x, kernel))


@pytest.mark.once
def test_kerashub_without_changes_finds_no_presets_of_other_packages():
    """KerasHub finds no preset, or no preprocessor of a backbone with inputs of another class."""
    assert "hawk_tiny" in models.GriffinCausalLM.presets  # KerasHub knows the name
    with pytest.raises(KeyError, match="kaggle_handle"):
        compat.get_preset_loader("hawk_tiny")

    class Converted(models.GriffinBackbone):
        preprocessed_as = models.GriffinBackbone

    arguments = "converted", keras_hub.models.CausalLMPreprocessor, Converted
    assert task.find_subclass(*arguments) is models.GriffinCausalLMPreprocessor
    with pytest.raises(ValueError, match="Unable to find a subclass"):
        compat.find_subclass(*arguments)
