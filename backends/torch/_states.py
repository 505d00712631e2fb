"""Permission for operations to write a new state into the memory of the previous one.

Decoding steps own their states and overwrite them; everywhere else states are immutable.
"""

import contextlib
import threading


class _States(threading.local):
    inplace = False


_states = _States()


def inplace_states_allowed():
    return _states.inplace


@contextlib.contextmanager
def inplace_states():
    """A context in which operations overwrite states."""
    before, _states.inplace = _states.inplace, True
    try:
        yield
    finally:
        _states.inplace = before
