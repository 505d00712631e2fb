"""Serving: an engine that generates for many requests at once, and an HTTP server.

The server requires the extra `serve`; `python -m keras_recurrent.serving` starts it.
"""

from keras_recurrent.serving.engine import Engine
from keras_recurrent.serving.request import (
    Completion,
    Delta,
    EngineClosed,
    EngineFull,
    EngineRequest,
)

__all__ = ["Completion", "Delta", "Engine", "EngineClosed", "EngineFull", "EngineRequest"]
