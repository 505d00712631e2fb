"""Short run of the random clients of `tests.serving.soak`."""

import pytest

from tests.serving import soak

pytestmark = [pytest.mark.once, pytest.mark.nightly]


def test_server_with_random_clients_answers_correctly_and_keeps_no_resources():
    """A slot, memory, a file or an answer is lost, or a client gets the text of another one."""
    figures = soak.run(300)
    before, after = figures["resources"][0], figures["resources"][-1]
    assert after.memory < before.memory + 50
    assert after.files <= before.files + soak.NUM_CONNECTIONS + 5
    assert after.threads <= before.threads + 40  # of the pool
