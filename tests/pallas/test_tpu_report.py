"""The script of `make tpu-report`, on a CPU."""

import re

import keras
import pytest

from benchmarks import tpu_report
from tests.processes import printed

if keras.config.backend() != "jax":
    pytest.skip("runs on JAX", allow_module_level=True)


@pytest.mark.nightly
def test_trial_of_the_report_has_tables_of_six_operations(tmp_path):
    """A step fails, or its tables are not in the file."""
    file = tmp_path / "report.md"
    output = printed("-m", "benchmarks.tpu_report", "--toy", "--file", str(file))
    report = file.read_text()
    passed = re.findall(r"^## (.+): exit status 0, \d+ s\n", report, re.MULTILINE)
    assert passed == [step.title for step in tpu_report.STEPS], output
    assert len(re.findall(r"^\| [\w ]+ \| [\d×]+ \| float32 \| jax \| ", report, re.M)) == 6
    for scan in ("lax.scan", "associative_scan"):
        assert f"| linear_scan | 1×40×8 | float32 | {scan} | " in report
