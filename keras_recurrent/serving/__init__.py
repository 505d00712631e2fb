"""Serving: an engine that generates for many requests at once."""

from keras_recurrent.serving.engine import Engine
from keras_recurrent.serving.request import (
    Completion,
    Delta,
    EngineClosed,
    EngineFull,
    EngineRequest,
)

__all__ = ["Completion", "Delta", "Engine", "EngineClosed", "EngineFull", "EngineRequest"]
