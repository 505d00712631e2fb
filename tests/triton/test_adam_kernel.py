"""The kernel that updates many weights in 16 bits, next to the update of a single weight."""

import keras
import numpy as np
import pytest

if keras.config.backend() != "torch":
    pytest.skip("runs on torch", allow_module_level=True)

import torch

from keras_recurrent import implementation
from keras_recurrent.backends.triton._device.common import INTERPRETED
from keras_recurrent.optimizers import AdamW, fused_updates
from tests.ops.native import DEVICE

if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs an NVIDIA GPU or Triton's interpreter", allow_module_level=True)

# A weight of several blocks whose size is a multiple of 16, and others whose size is not.
SHAPES = (3, 2048), (5, 1000), (7,), (), (16,)


def update(name, dtype, gradient_dtype, clips, num_steps=3):
    """Returns weights and slots after some updates by an implementation."""
    generator = torch.Generator().manual_seed(0)

    def random(shape, dtype):
        return torch.randn(shape, generator=generator).to(DEVICE, getattr(torch, dtype))

    variables = [keras.Variable(random(shape, dtype), dtype=dtype) for shape in SHAPES]
    optimizer = AdamW(1e-2, weight_decay=0.1, global_clipnorm=2.0 if clips else None)
    optimizer.exclude_from_weight_decay(variables[1:3])
    optimizer.build(variables)
    with implementation(name):
        for _ in range(num_steps):
            gradients = [random(shape, gradient_dtype) for shape in SHAPES]
            if gradient_dtype == dtype:  # torch requires it of a tensor's own gradient
                for variable, gradient in zip(variables, gradients, strict=True):
                    variable.value.grad = gradient
            optimizer.apply(gradients, variables)
    slots = [*optimizer._momentums, *optimizer._velocities]
    return ([v.value.detach().float().cpu().numpy() for v in of] for of in (variables, slots))


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("gradient_dtype", ["same", "float32"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_adam_kernel_matches_the_update_of_a_single_weight(
    dtype, gradient_dtype, clips, monkeypatch
):
    """The kernel skips elements, takes another weight's row, or rounds with other numbers."""
    launches = []
    of_kernel = fused_updates.FusedUpdates._update_16_bits
    monkeypatch.setattr(
        fused_updates.FusedUpdates,
        "_update_16_bits",
        lambda *arguments: launches.append(len(arguments[2])) or of_kernel(*arguments),
    )
    gradient_dtype = dtype if gradient_dtype == "same" else gradient_dtype
    found, slots = update("triton", dtype, gradient_dtype, clips)
    assert launches == [3, 2] * 3  # without and with decay
    expected, expected_slots = update("torch", dtype, gradient_dtype, clips)
    assert len(launches) == 6
    for a, b in zip(slots, expected_slots, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    unequal = np.concatenate([np.ravel(a != b) for a, b in zip(found, expected, strict=True)])
    # Sums in another order may cross the bound between two roundings.
    assert unequal.mean() < 2e-3
    for a, b in zip(found, expected, strict=True):
        rtol, atol = (2.0**-7, 0) if dtype == "bfloat16" else (2.0**-10, 2.0**-24)
        np.testing.assert_allclose(a, b, rtol, atol)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_adam_kernel_rounds_special_values(dtype):
    """Infinity, NaN or subnormal numbers of float16 are rounded to other numbers."""
    numbers = [np.inf, -np.inf, np.nan, 6e-8, -6e-8, 3e-5, 0.0]
    variable = keras.Variable(np.repeat(np.array(numbers, "float32"), 200), dtype=dtype)
    before = variable.value.detach().float().cpu().numpy()
    optimizer = AdamW(3e-8, weight_decay=0.0)
    with implementation("triton"):
        optimizer.apply([torch.ones_like(variable.value)], [variable])
    found = variable.value.detach().float().cpu().numpy()
    np.testing.assert_array_equal(found[:600], before[:600])
    moved = (before[600:] - found[600:]).reshape(4, 200).mean(1)
    unit = 2.0**-24 if dtype == "float16" else 2.0**-7 * 3e-5
    assert (np.abs(moved - 3e-8) < 5 * 0.5 * unit / np.sqrt(200)).all()
