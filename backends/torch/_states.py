"""Permission for operations to write a new state into the memory of the previous one.

Decoding steps own their states and overwrite them; everywhere else states are immutable.
"""

import contextlib
import threading

# Bytes of a state from which it is worth a launch to free the memory of its new value early.
MIN_STORED_BYTES = 2**24


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


def store_states(before, after):
    """Returns new states of a block; large ones are moved to the previous ones where allowed.

    Otherwise, the new states of all blocks would exist next to the previous ones.

    Args:
        before, after: dictionaries, in which dictionaries may be nested, of tensors.
    """
    if not _states.inplace:
        return after
    if isinstance(after, dict):
        return {name: store_states(before[name], value) for name, value in after.items()}
    if after is before or after.nbytes < MIN_STORED_BYTES:
        return after
    return before.copy_(after)
