"""Low-rank adapters and quantization reach the linear maps, block-diagonal ones included."""

import keras
import numpy as np
import pytest

from tests.layers.table import WIDTH, assert_close, built, inputs, layer_with_sublayers, numpy

LINEAR = (keras.layers.Dense, keras.layers.EinsumDense)
# Keras tells of each layer without weights to quantize, an input layer for one.
quiet = pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method")


def linear_maps(layer):
    return [inner for inner in layer._flatten_layers() if isinstance(inner, LINEAR)]


def model_of(layer):
    sequence = keras.Input((None, WIDTH))
    return keras.Model(sequence, layer(sequence))


@layer_with_sublayers
def test_lora_starts_from_the_same_numbers(name):
    layer, x = built(name), inputs()
    before = numpy(layer(x))
    for inner in linear_maps(layer):
        inner.enable_lora(2)
    assert_close(layer(x), before)


def test_lora_trains_its_own_weights_alone():
    layer, x = built("RecurrentBlock"), inputs()
    before = numpy(layer(x))
    for weight in layer.weights:
        weight.trainable = False
    for inner in linear_maps(layer):
        inner.enable_lora(2)
    trained = [weight.path for weight in layer.trainable_variables]
    assert len(trained) == 2 * len(linear_maps(layer))
    assert all("lora_kernel" in path for path in trained)

    kept = numpy([weight.value for weight in layer.non_trainable_variables])
    model = model_of(layer)
    jit = "auto" if keras.config.backend() == "jax" else False
    model.compile(keras.optimizers.Adam(0.03), "mse", jit_compile=jit)
    history = model.fit(x, before + 1, epochs=10, verbose=0).history["loss"]
    assert history[-1] < 0.98 * history[0]
    assert_close(numpy([weight.value for weight in layer.non_trainable_variables]), kept)


@quiet
@layer_with_sublayers
def test_int8_stays_near(name):
    layer, x = built(name, dtype="mixed_bfloat16" if name == "CGLRU" else "float32"), inputs()
    model = model_of(layer)
    before = numpy(model(x)).astype("float32")
    model.quantize("int8")
    for inner in linear_maps(layer):
        assert keras.backend.standardize_dtype(inner._kernel.dtype) == "int8"
    after = numpy(model(x)).astype("float32")
    # Not the largest error: HGRN2's norm magnifies some, where its heads cancel.
    assert 0 < np.linalg.norm(after - before) < 0.05 * np.linalg.norm(before)


@quiet
def test_int8_of_each_block_has_its_own_scale():
    """A block of tiny weights beside a block of large ones loses nothing."""
    layer = built("RGLRU")
    for gate in linear_maps(layer):
        kernel = numpy(gate.kernel.value)
        kernel[0] *= 1e-3
        gate.kernel.assign(kernel)
    model_of(layer).quantize("int8")
    for gate in linear_maps(layer):
        codes = numpy(gate._kernel.value).astype("int32")
        assert (np.abs(codes).max(axis=1) == 127).all()


@quiet
def test_lora_trains_on_int8():
    """Quantize, then adapt: the order of fine-tuning a large model on a small device."""
    layer, x = built("RecurrentBlock"), inputs()
    model = model_of(layer)
    model.quantize("int8")
    for inner in linear_maps(layer):
        inner.enable_lora(2)
    target = numpy(model(x)) + 1
    jit = "auto" if keras.config.backend() == "jax" else False
    model.compile(keras.optimizers.Adam(0.03), "mse", jit_compile=jit)
    history = model.fit(x, target, epochs=10, verbose=0).history["loss"]
    assert history[-1] < 0.98 * history[0]


@pytest.mark.once
@quiet
@layer_with_sublayers
def test_quantized_layers_reload_in_a_sequential_model(name, tmp_path):
    """Keras restores only layers that it saves itself, and builds these under another path."""
    layer, x = built(name, dtype="bfloat16"), inputs()
    model = keras.Sequential([type(layer).from_config(layer.get_config())])
    model.build((None, None, WIDTH))
    config = keras.quantizers.Int8QuantizationConfig(activation_quantizer=None)
    model.quantize(config=config)
    wanted = numpy(model(x))
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(numpy(again(x)), wanted)
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    np.testing.assert_array_equal(numpy(clone(x)), wanted)
