"""Two processes of torch compute what one computes, or say why not."""

import importlib.util

import keras
import pytest

from tests.devices.torch_processes import several_processes
from tests.models.tiny import FAMILIES

pytestmark = pytest.mark.skipif(
    keras.config.backend() != "torch", reason="torch.distributed is torch's"
)

WAYS = ("ddp", "fsdp", "fsdp_remat", "fsdp_in_16_bits", "tensor")
POLICIES = ("fsdp", "fsdp_mixed_bfloat16", "fsdp_bfloat16")
OPERATIONS = [
    *("linear_scan", "rg_lru", "complex_linear_scan", "gated_linear_attention"),
    *("lightning_attention", "causal_conv1d", "sliding_window_attention"),
]


def limits(case):
    """How far losses, weights and slots may be off, and what was loaded."""
    if "16" in case:
        # Adam moves a weight by 0.01 a step, also where a gradient in 16 bits is all but zero.
        exact = {"loaded": 0, "accumulated": 1e-6}
        return {"weights": 0.05, "losses": 0.05, "slots": 1e-3, "replicated": 0.05, **exact}
    # Sums in another order, which Adam divides by all but zero.
    weights = 1e-4 if case.startswith("training:tensor") else 5e-6
    return {"weights": weights, "losses": 5e-6, "slots": 5e-6, "loaded": 0}


def check(found, cases):
    assert list(found) == list(cases)
    for case, errors in found.items():
        if case.startswith("training"):
            assert all(error <= limits(case)[name] for name, error in errors.items()), (
                case,
                errors,
            )
            saved = case.startswith(("training:fsdp:", "training:fsdp_bfloat16:"))
            assert ("loaded" in errors) == saved
        else:
            assert errors < 5e-6, case


@pytest.mark.nightly
def test_every_family_once(tmp_path):
    cases = [
        *("training:ddp:griffin", "training:fsdp:transnormer", "training:tensor:hgrn2"),
        *("sequences:causal_conv1d", "sequences:rg_lru", "sequences:hgrn2"),
    ]
    check(several_processes(tmp_path, *cases), cases)


@pytest.mark.nightly
def test_fully_shard_of_every_dtype_policy(tmp_path):
    """Under `bfloat16` most families have float32 weights, whose gradients were not averaged."""
    cases = [f"training:{way}:{family}" for way in POLICIES for family in FAMILIES]
    check(several_processes(tmp_path, *cases), cases)


@pytest.mark.nightly
def test_two_processes_learn_what_one_learns(tmp_path):
    """Losses, weights and slots, and what an ordinary model reads of a checkpoint of shards."""
    cases = [f"training:{way}:{family}" for way in WAYS for family in FAMILIES]
    check(several_processes(tmp_path, *cases), cases)


@pytest.mark.nightly
@pytest.mark.parametrize("processes", [2, 4])
def test_parts_of_time_compute_what_whole_rows_do(processes, tmp_path):
    """Of four parts a window is longer than one, and one has padding alone."""
    cases = [f"sequences:{name}" for name in (*OPERATIONS, *FAMILIES)]
    if importlib.util.find_spec("triton"):
        cases += ["sequences:gated_linear_attention:triton"]
    check(several_processes(tmp_path, *cases, processes=processes), cases)


@pytest.mark.nightly
def test_operations_compute_on_shards_what_they_compute_on_the_whole(tmp_path):
    """Split by batch and by channels, with padding, and with a gradient that is missing."""
    pytest.importorskip("triton")
    cases = ["operators:torch", "operators:triton"]
    found = several_processes(tmp_path, *cases)
    assert [len(found[case]) for case in cases] == [13, 12]
    for errors in found.values():
        assert max(errors.values()) < 2e-6, errors


@pytest.mark.nightly
def test_what_is_left_out_is_refused(tmp_path):
    found = several_processes(tmp_path, "refusals:all", "sequences:refusals")
    assert found["sequences:refusals"] == []
    refusals = found["refusals:all"]
    assert ".numpy() is not supported" in refusals.pop("weights_of_shards")  # torch's own
    assert "Call `module.fully_shard()`" in refusals.pop("shard_two_dtypes")
    two_dtypes = refusals.pop("shard_two_dtypes_of_tensor_parallelism")
    assert "`DTensor`s already with weights of several dtypes, torch.bfloat16" in two_dtypes
    assert len(refusals) == 6
    for way, error in refusals.items():
        if way.startswith("fully_shard"):
            assert "a Keras layer. Keras calls layers without torch's hooks" in error, way
        else:
            assert error.startswith("RuntimeError: `fit` would train 2 different models"), way
        assert "keras_recurrent.devices.torch_modules.TorchModule(model)" in error, way
