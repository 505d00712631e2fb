"""Several processes of torch match one process, or raise errors."""

import importlib.util

import keras
import pytest

from tests.devices.processes import run_processes
from tests.models.tiny import FAMILIES

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(keras.config.backend() != "torch", reason="torch.distributed is torch's"),
]

PARALLELISMS = ("ddp", "tensor", "fsdp", "fsdp_remat")
PARALLELISMS_IN_16_BITS = ("fsdp_in_16_bits", "fsdp_mixed_bfloat16", "fsdp_bfloat16")
OPERATIONS = [
    *("linear_scan", "rg_lru", "complex_linear_scan", "gated_linear_attention"),
    *("lightning_attention", "scalar_decay_attention", "causal_conv1d"),
    "sliding_window_attention",
]


def run_cases(folder, *cases, processes=2):
    """Runs cases of `torch_cases`, which contain the assertions."""
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run_processes(processes, folder, "torch_cases", str(processes), *cases, **environment)


@pytest.mark.parametrize(
    "parallelisms", [PARALLELISMS, PARALLELISMS_IN_16_BITS], ids=["float32", "16 bits"]
)
def test_training_in_two_processes_matches_one(tmp_path, parallelisms):
    """Losses, weights, slots or saved shards differ, or float32 weights have unequal replicas."""
    cases = [f"training:{name}:{family}" for name in parallelisms for family in FAMILIES]
    run_cases(tmp_path, *cases)


@pytest.mark.parametrize("processes", [2, 4])
def test_shards_of_time_match_whole_sequences(processes, tmp_path):
    """A state, a window or a gradient is lost between shards.

    With four processes, a window is longer than a shard, and a shard has only padding.
    """
    cases = [f"operations:time:{name}:default" for name in OPERATIONS]
    if importlib.util.find_spec("triton"):
        cases.append("operations:time:gated_linear_attention:triton")
    cases += [f"sequences:{family}" for family in FAMILIES]
    run_cases(tmp_path, *cases, "sequences:errors", processes=processes)


def test_operations_on_dtensors_match_whole_tensors(tmp_path):
    """An operation on shards of batch or channels differs, or requires all gradients."""
    pytest.importorskip("triton")
    cases = ["operations:batch:complex_linear_scan:torch"]  # has no kernel, nor splits channels
    for name in OPERATIONS:
        if name != "complex_linear_scan":
            for implementation in ("torch", "triton"):
                cases.append(f"operations:batch:{name}:{implementation}")
                cases.append(f"operations:channels:{name}:{implementation}")
    run_cases(tmp_path, *cases)


def test_unsupported_training_in_two_processes_raises_with_remedy(tmp_path):
    """`fit` trains two different models, or Keras calls layers without the hooks of FSDP."""
    run_cases(tmp_path, "errors")
