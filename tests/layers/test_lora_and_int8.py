"""Low-rank adapters and quantization of linear layers, block-diagonal ones included."""

import keras
import numpy as np
import pytest

from tests.layers.table import (
    JIT,
    SHARED,
    WIDTH,
    WITH_SUBLAYERS,
    assert_close,
    built,
    inputs,
    numpy,
    parametrize_names,
)

LINEAR = (keras.layers.Dense, keras.layers.EinsumDense)
# Keras warns of each layer without weights to quantize, such as an input layer.
ignore_quantize_warnings = pytest.mark.filterwarnings(
    "ignore:Layer .* does not have a `quantize` method"
)


def linear_layers(layer):
    return [inner for inner in layer._flatten_layers() if isinstance(inner, LINEAR)]


def functional_model(layer):
    sequence = keras.Input((None, WIDTH))
    return keras.Model(sequence, layer(sequence))


@pytest.mark.once
@ignore_quantize_warnings
@pytest.mark.parametrize("is_quantized", [False, True], ids=["float32", "int8"])
def test_lora_trains_only_low_rank_weights(is_quantized):
    layer = built("RecurrentBlock")
    model = functional_model(layer)
    if is_quantized:
        model.quantize("int8")
    before = numpy(model(inputs()))
    for weight in layer.weights:
        weight.trainable = False
    for inner in linear_layers(layer):
        inner.enable_lora(2)
    trained = [weight.path for weight in layer.trainable_variables]
    assert len(trained) == 2 * len(linear_layers(layer))
    assert all("lora_kernel" in path for path in trained)

    frozen = numpy([weight.value for weight in layer.non_trainable_variables])
    model.compile(keras.optimizers.Adam(0.03), "mse", jit_compile=JIT)
    losses = model.fit(inputs(), before + 1, epochs=10, verbose=0).history["loss"]
    assert losses[-1] < 0.98 * losses[0]
    assert_close([weight.value for weight in layer.non_trainable_variables], frozen)


@ignore_quantize_warnings
def test_int8_scales_each_block_separately():
    """A block of tiny weights loses its digits next to a block of large ones."""
    layer = built("RGLRU")
    for gate in linear_layers(layer):
        kernel = numpy(gate.kernel.value)
        kernel[0] *= 1e-3
        gate.kernel.assign(kernel)
    functional_model(layer).quantize("int8")
    for gate in linear_layers(layer):
        codes = numpy(gate._kernel.value).astype("int32")
        assert (np.abs(codes).max(axis=1) == 127).all()


@pytest.mark.once
@ignore_quantize_warnings
@parametrize_names(WITH_SUBLAYERS, always=["RGLRU", "GatedMLP", *SHARED])
def test_quantized_layers_load_in_a_sequential_model(name, tmp_path):
    """Keras restores only layers that it saves itself, and builds these under another path."""
    layer, x = built(name, dtype="bfloat16"), inputs()
    model = keras.Sequential([type(layer).from_config(layer.get_config())])
    model.build((None, None, WIDTH))
    config = keras.quantizers.Int8QuantizationConfig(activation_quantizer=None)
    model.quantize(config=config)
    model.save(tmp_path / "model.keras")
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    for again in (keras.saving.load_model(tmp_path / "model.keras"), clone):
        np.testing.assert_array_equal(numpy(again(x)), numpy(model(x)))
