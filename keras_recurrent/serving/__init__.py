"""Serving: an engine that generates for many requests at once, and an HTTP server.

The server requires the extra `serve`; `python -m keras_recurrent.serving` starts it. `Engine` is
imported when it is first used, because the HTTP process and the command's options need no Keras.
"""

import importlib
from typing import TYPE_CHECKING

from keras_recurrent.serving.request import (
    Completion,
    Delta,
    EngineClosed,
    EngineFull,
    EngineRequest,
)

if TYPE_CHECKING:
    from keras_recurrent.serving.engine import Engine

__all__ = ["Completion", "Delta", "Engine", "EngineClosed", "EngineFull", "EngineRequest"]


def __getattr__(name):
    if name != "Engine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.engine").Engine
