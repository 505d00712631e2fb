"""Pallas kernels where JAX's interpreter simulates more of a TPU than the other tests ask for."""

import keras
import pytest

if keras.config.backend() != "jax":
    pytest.skip("runs on JAX", allow_module_level=True)

import jax
import numpy as np
from jax._src.pallas.mosaic import tpu_info

from keras_recurrent import dispatch
from tests.ops import native
from tests.ops.cases import Case, draw
from tests.ops.judge import run

# With the blocks of `small_blocks`, the last block of channels and of tokens is incomplete.
SCAN = Case(3, 300, 200, kinds=True, state=True)
LINEAR_ATTENTION = Case(3, 300, 128, kinds=True, state=True, values=128)
CASES = {
    "linear_scan": SCAN,
    "rg_lru": SCAN,
    "causal_conv1d": SCAN,
    "gated_linear_attention": LINEAR_ATTENTION,
    "lightning_attention": LINEAR_ATTENTION,
    "sliding_window_attention": Case(3, 300, 8, heads=(4, 2), window=200, kinds=True, state=True),
}
# A seed permutes the indices of each parallel axis of the grid.
SIMULATIONS = {
    "seed 1": {"random_seed": 1},
    "seed 2, eager copies": {"random_seed": 2, "dma_execution_mode": "eager"},
    "seed 3, two cores": {"random_seed": 3, "num_cores_or_threads": 2},
    "padded buffers, eager copies": {"buffer_bounds": "padded", "dma_execution_mode": "eager"},
}


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 128 tokens and, of a scan, 128 channels."""
    folder = "keras_recurrent.backends.pallas"
    monkeypatch.setattr(f"{folder}._streaming.MAX_CHANNELS", 128)
    monkeypatch.setattr(f"{folder}._streaming.vmem_bytes", lambda: 1)
    monkeypatch.setattr(f"{folder}._linear_attention.vmem_bytes", lambda: 1)
    monkeypatch.setattr(f"{folder}._window.BLOCKS", (128,))


@pytest.fixture
def tile_shapes(monkeypatch):
    """Buffers are padded to the tiles of a chip, here those of a v5e."""
    v5e = tpu_info.get_tpu_info_for_chip(tpu_info.ChipVersion.TPU_V5E, 1)
    monkeypatch.setitem(tpu_info.registry, "cpu", lambda: v5e)


def test_every_kernel_has_a_case():
    rows = dispatch.IMPLEMENTATIONS.items()
    assert CASES.keys() == {name for name, row in rows if not isinstance(row["pallas"], str)}


@pytest.mark.nightly
@pytest.mark.skipif(jax.default_backend() == "tpu", reason="on a TPU, nothing is interpreted")
@pytest.mark.parametrize("operation", CASES)
def test_simulations_of_a_kernel_give_equal_results(
    operation, small_blocks, tile_shapes, monkeypatch
):
    """Results depend on the order of programs or on the time of copies, or two cores race."""
    drawn = draw(operation, CASES[operation])
    expected = run(operation, "pallas", drawn)
    for simulation, options in SIMULATIONS.items():
        monkeypatch.setattr(native, "INTERPRETER", native.INTERPRETER | options)
        for name, result in run(operation, "pallas", drawn).items():
            message = f"{simulation}: {name}"
            np.testing.assert_array_equal(result, expected[name], err_msg=message)
