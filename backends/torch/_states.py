"""Whether operations may write a new state into the memory of the one before.

Steps of generation own their states, and write over them; everywhere else a state stays as it is.
"""

import contextlib
import threading


class _States(threading.local):
    owned = False


_states = _States()


def may_be_overwritten():
    return _states.owned


@contextlib.contextmanager
def overwritten():
    """Inside, states are written over."""
    before, _states.owned = _states.owned, True
    try:
        yield
    finally:
        _states.owned = before
