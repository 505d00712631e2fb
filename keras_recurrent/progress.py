"""Keras's progress bar for work that takes a while, where somebody looks."""

import contextlib
import sys

import keras

# What takes a few seconds: bytes of weights, or of text.
LARGE = {"weights": 2**28, "text": 2**24}


@contextlib.contextmanager
def progress(what, kind, size):
    """A bar in bytes of what takes more than a few seconds, in a terminal or a notebook.

    Silent where the output goes to a file, and after
    `keras.config.disable_interactive_logging()`.

    Args:
        what: string, a line above the bar.
        kind: "weights" or "text", which is faster and slower to go through.
        size: integer, bytes.

    Yields:
        A function of the bytes that are done in addition.
    """
    if size < LARGE[kind] or not is_watched():
        yield lambda done: None
        return
    print(what, flush=True)
    bar = keras.utils.Progbar(size, unit_name="byte")
    so_far = 0

    def done(more):
        nonlocal so_far
        so_far += more
        if so_far < size:
            bar.update(so_far)

    yield done
    bar.update(size)  # which ends the line


def is_watched():
    """Whether somebody sees what is printed."""
    if not keras.config.is_interactive_logging_enabled():
        return False
    return sys.stdout.isatty() or "ipykernel" in sys.modules
