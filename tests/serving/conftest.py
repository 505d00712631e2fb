"""Fixture of all tests that send HTTP requests."""

import functools
import ssl

import pytest


@pytest.fixture(scope="session", autouse=True)
def _certificates():
    """Loads certificates once: httpx takes 40 ms for them in each request, also without TLS."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield
