"""The planted faults match the source tree."""

import re

import pytest

from tests.faults import BACKENDS, FAULTS, ROOT


@pytest.mark.once
def test_faults_apply_and_their_tests_exist():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    for fault in FAULTS:
        source = (ROOT / fault.path).read_text()
        assert fault.replace(source) != source, fault.name
        assert fault.tests.keys() <= set(BACKENDS), fault.name
        for backend in fault.tests:
            path, _, function = fault.node_id(backend).partition("::")
            definition = rf"^def {function.partition('[')[0]}\("
            exists = re.search(definition, (ROOT / path).read_text(), re.MULTILINE)
            assert exists, f"{fault.name} ({backend}): {fault.node_id(backend)} does not exist"
