"""Two processes of torch learn what one learns, or say why not."""

import keras
import pytest

from tests.devices.torch_processes import several_processes
from tests.models.tiny import FAMILIES

pytestmark = pytest.mark.skipif(
    keras.config.backend() != "torch", reason="torch.distributed is torch's"
)

QUICK = ["ddp:griffin", "fsdp:transnormer", "tensor:hgrn2"]
SLOW = [
    f"{way}:{family}"
    for way in ("ddp", "fsdp", "fsdp_remat", "fsdp_in_16_bits", "tensor")
    for family in FAMILIES
]


@pytest.mark.parametrize("cases", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)])
def test_two_processes_learn_what_one_learns(cases, tmp_path):
    """Losses, weights and slots, and what an ordinary model reads of a checkpoint of shards."""
    found = several_processes(tmp_path, "tests.devices.torch_training", *cases)
    assert list(found) == cases
    for case, errors in found.items():
        limits = {}
        if case.startswith("tensor"):  # sums in another order, where Adam divides by all but zero
            limits = {"weights": 1e-4}
        if "16_bits" in case:
            limits = {"weights": 0.03, "losses": 0.05, "slots": 1e-3}
        for name, error in errors.items():
            assert error <= limits.get(name, 5e-6), (case, name)
        assert ("loaded" in errors) == case.startswith("fsdp:")


@pytest.mark.slow
def test_operations_compute_on_shards_what_they_compute_on_the_whole(tmp_path):
    """Split by batch and by channels, with padding, and with a gradient that is missing."""
    pytest.importorskip("triton")
    found = several_processes(tmp_path, "tests.devices.torch_operators", "torch", "triton")
    assert len(found) == 13 + 12
    assert max(found.values()) < 2e-6, found


@pytest.mark.slow
def test_what_nothing_averages_or_gathers_is_refused(tmp_path):
    found = several_processes(tmp_path, "tests.devices.torch_refusals")
    training = ("fit", "fit_beside_a_wrapper", "train_on_batch", "fit_a_backbone")
    for way, error in found.items():
        if way in training:
            assert error.startswith("RuntimeError: `fit` would train 2 different models"), way
        elif way != "weights_of_shards":
            assert "a Keras layer. Keras calls layers without torch's hooks" in error, way
        else:
            assert ".numpy() is not supported" in error  # torch's own
            continue
        assert "keras_recurrent.devices.torch_modules.TorchModule(model)" in error
    assert len(found) == 7


OPERATIONS = [
    *("linear_scan", "rg_lru", "complex_linear_scan", "gated_linear_attention"),
    *("lightning_attention", "causal_conv1d", "sliding_window_attention"),
]


@pytest.mark.parametrize(
    ("processes", "cases"),
    [
        (2, ["rg_lru", "causal_conv1d", "hgrn2"]),
        pytest.param(2, [*OPERATIONS, *FAMILIES], marks=pytest.mark.slow),
        # A window is longer than a part then, and parts of padding alone have others behind them.
        pytest.param(4, [*OPERATIONS, *FAMILIES], marks=pytest.mark.slow),
    ],
)
def test_parts_of_time_compute_what_whole_rows_do(processes, cases, tmp_path):
    """Outputs and gradients of operations, relative to the largest; losses and trained weights."""
    module = "tests.devices.torch_sequences"
    found = several_processes(tmp_path, module, "refusals", *cases, processes=processes)
    assert found.pop("refusals") == []
    assert list(found) == cases
    assert max(found.values()) < 5e-6, found
