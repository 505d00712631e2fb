"""Serving: an engine that generates for many requests at once, and an HTTP server.

The server requires the extra `serve`; `python -m keras_recurrent.serving` starts it. The names are
imported when they are first used, so that the command's errors come before the import of KerasHub.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keras_recurrent.serving.engine import Engine
    from keras_recurrent.serving.request import (
        Completion,
        Delta,
        EngineClosed,
        EngineFull,
        EngineRequest,
    )

__all__ = ["Completion", "Delta", "Engine", "EngineClosed", "EngineFull", "EngineRequest"]


def __getattr__(name):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "engine" if name == "Engine" else "request"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__():
    return sorted({*globals(), *__all__})
