"""Keras's progress bar for long work, shown only in an interactive session."""

import contextlib
import sys

import keras

# Bytes of weights or text whose processing takes a few seconds.
LARGE = {"weights": 2**28, "text": 2**24}


@contextlib.contextmanager
def progress(what, kind, size):
    """Shows a progress bar in bytes for work of more than a few seconds.

    Prints nothing if the output goes to a file, and after
    `keras.config.disable_interactive_logging()`.

    Args:
        what: string, a line above the bar.
        kind: "weights" or "text", which is processed more slowly.
        size: integer, bytes.

    Yields:
        A function that takes the number of bytes done since its last call.
    """
    if size < LARGE[kind] or not is_interactive():
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
    bar.update(size)  # ends the line


def announce(what):
    """Prints a line before work of several seconds, such as compilation, if `is_interactive`."""
    if is_interactive():
        print(what, flush=True)


def is_interactive():
    """Returns True in a terminal or a notebook, with interactive logging enabled."""
    if not keras.config.is_interactive_logging_enabled():
        return False
    return sys.stdout.isatty() or "ipykernel" in sys.modules
