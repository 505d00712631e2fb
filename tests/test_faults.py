"""The table of planted faults matches the source tree."""

import re

import pytest

from tests.faults import BACKENDS, ROOT, read_faults

FAULTS = read_faults()


@pytest.mark.once
def test_names_of_faults_are_unique():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


@pytest.mark.once
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_applies_and_names_existing_tests(fault):
    source = (ROOT / fault.path).read_text()
    assert fault.replace(source) != source
    assert set() < set(fault.tests) <= set(BACKENDS)
    for test in fault.tests.values():
        path, _, function = test.partition("::")
        definition = rf"^def {function.partition('[')[0]}\("
        assert re.search(definition, (ROOT / path).read_text(), re.MULTILINE), test
