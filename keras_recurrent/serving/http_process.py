"""Script of the HTTP process; `processes.py` starts it.

It imports no framework, so it takes 100 instead of 700 MB and starts in 2 instead of 10 s. If only
KerasHub has the tokenizer, it imports KerasHub.

    python -P http_process.py LISTENER CONNECTION    (two file descriptors)
"""

import pathlib
import socket
import sys
import types
from multiprocessing.connection import Connection

FOLDER = pathlib.Path(__file__).parents[1]


def import_parts(name):
    """Lets modules of a package be imported without its `__init__.py`, which imports Keras."""
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [str(FOLDER.parent.joinpath(*name.split(".")))]


def main():
    listener, connection = socket.socket(fileno=int(sys.argv[1])), Connection(int(sys.argv[2]))
    # While the engine process loads the model.
    import fastapi  # noqa: F401
    import prometheus_client  # noqa: F401
    import uvicorn  # noqa: F401

    try:
        sys.path[:], needs_hub = connection.recv()
    except EOFError:  # the model cannot be loaded
        return 1
    if not needs_hub:
        for name in ("keras_recurrent", "keras_recurrent.tokenizers"):
            import_parts(name)
    from keras_recurrent.serving.processes import serve_http

    return serve_http(listener, connection)


if __name__ == "__main__":
    sys.exit(main())
