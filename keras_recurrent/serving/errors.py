"""Errors of `Engine.submit`."""


class EngineFull(RuntimeError):
    """The queue of the engine has its maximum number of requests."""


class EngineClosed(RuntimeError):
    """The engine was closed."""
