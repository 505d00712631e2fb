"""Permission for operations to write a new state into the memory of the previous one.

Decoding steps own their states and overwrite them; everywhere else states are immutable.
"""

import contextlib
import threading

# Minimum size of a state in bytes for which a launch that frees its new value early is worthwhile.
MIN_STORED_BYTES = 2**24


class _Permission(threading.local):
    inplace = False


permission = _Permission()


@contextlib.contextmanager
def inplace_states():
    """A context in which operations overwrite states."""
    before, permission.inplace = permission.inplace, True
    try:
        yield
    finally:
        permission.inplace = before


def store_states(before, after):
    """Returns the new states of a block, of which large ones overwrite the previous ones.

    Without this, the new states of all blocks would exist next to the previous ones.

    Args:
        before, after: dictionaries of tensors, possibly nested.
    """
    if isinstance(after, dict):
        return {name: store_states(before[name], value) for name, value in after.items()}
    if after is before or after.nbytes < MIN_STORED_BYTES:
        return after
    return before.copy_(after)
