"""State of `sequence_parallel` on torch: the shards of the active block. Imports no torch."""

import contextlib
from typing import Any

# Shared by all threads: on a GPU, autograd recomputes a block in a separate thread.
_shards: list[Any] = []


def active_shards():
    """Returns the `torch_sequence.Shards` of the active `sequence_parallel` block, or None."""
    return _shards[-1] if _shards else None


@contextlib.contextmanager
def activate(shards):
    """Context manager in which `active_shards` returns `shards`; None: sequences are whole."""
    _shards.append(shards)
    try:
        yield
    finally:
        _shards.pop()


def check_not_split(what):
    """Raises an error inside `sequence_parallel`, for features that need whole sequences."""
    if active_shards() is not None:
        raise NotImplementedError(
            f"{what} inside `sequence_parallel`, where each process has a part of each sequence. "
            "Call it on whole sequences, outside."
        )
