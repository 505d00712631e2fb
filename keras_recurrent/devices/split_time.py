"""Whether the time of rows is split over processes of torch. Imports nothing of torch."""

from typing import Any

# For all threads: on a GPU, autograd computes a block again in a thread of its own.
_shards: list[Any] = []


def shards():
    """The `torch_sequence.Shards` in whose block this runs; None outside."""
    return _shards[-1] if _shards else None


def push(shards):
    _shards.append(shards)


def pop():
    _shards.pop()


def refuse(what):
    """Raises where time is split and this cannot be computed."""
    if shards() is not None:
        raise NotImplementedError(
            f"{what} inside `sequence_parallel`, where each process has a part of each row. Call "
            "it on whole rows, outside."
        )
