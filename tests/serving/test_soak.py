"""Random clients, as in `python -m tests.serving.soak`."""

import pytest

from tests.serving import soak

pytestmark = [pytest.mark.once, pytest.mark.nightly]


def test_random_clients():
    """A slot, memory, a file or an answer is lost, or a client gets another one's text."""
    figures = soak.run(300)
    before, after = figures["resources"][0], figures["resources"][-1]
    assert after.memory < before.memory + 50
    assert after.files <= before.files + soak.NUM_CONNECTIONS + 5
    assert after.threads <= before.threads + 40  # of the pool
