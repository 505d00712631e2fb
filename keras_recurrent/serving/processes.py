"""The two processes of the server: the engine process, and the HTTP process.

The engine process starts the HTTP process, and sends it the new tokens of each step in one message.
The HTTP process also converts text, and sends calls of the scheduler. Each of them ends if the
other one does.
"""

import asyncio
import contextlib
import gc
import logging
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import threading
from typing import Any

from keras_recurrent.chat.preprocessing import plain_preprocessor
from keras_recurrent.serving.client import EngineClient

log = logging.getLogger("keras_recurrent.serving")
SCRIPT = pathlib.Path(__file__).with_name("http_process.py")
SIGNALS = signal.SIGINT, signal.SIGTERM


class RemoteLink:
    """Link of an `EngineClient` to the scheduler in the engine process.

    The event loop of the server reads the connection and makes the text. If a thread did so, the
    event loop would wait after each event that it sends until that thread releases Python's global
    interpreter lock.
    """

    error = None
    emit: Any = None  # set by an `EngineClient`

    def __init__(self, connection, stats):
        self.connection, self._stats = connection, stats
        self._lock, self.is_closed, self.has_failed = threading.Lock(), False, False

    def send(self, name, *arguments, **options):
        """Sends a call."""
        self.is_closed |= name == "close"
        with self._lock, contextlib.suppress(OSError):  # `read` tells that the process has ended
            self.connection.send((name, arguments, options))

    def read(self):
        """Delivers all results that have arrived; returns False after the last one."""
        results: Any = ()
        while results is not None and self.connection.poll():
            results = None
            with contextlib.suppress(EOFError, OSError):
                self._stats, results = self.connection.recv()
            if results is None:
                self.has_failed, self.is_closed = not self.is_closed, True
            self.emit(results)
        return results is not None

    def stats(self):
        return self._stats


class HTTPProcess:
    """The HTTP process, as the engine process sees it.

    listener: a socket of `bind`, which is closed in this process.
    """

    def __init__(self, listener):
        self._connection, theirs = multiprocessing.Pipe()
        descriptors = listener.fileno(), theirs.fileno()
        command = [sys.executable, "-P", str(SCRIPT), *map(str, descriptors)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"},
            pass_fds=descriptors,
            process_group=0,  # which gets no Ctrl-C; this process passes it on
        )
        theirs.close()
        listener.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._connection.close()  # which ends the process
        self._process.wait()

    def run(self, engine, preset, app, server):
        """Generates for requests until the process ends, then closes the engine.

        Returns the exit code.

        Args:
            engine: the `Engine` of a preset, without requests.
            app, server: dictionaries of the arguments of `create_app` and `Server`.
        """
        scheduler, preprocessor = engine._scheduler, engine.preprocessor
        plain = preprocessor and plain_preprocessor(preprocessor)
        if needs_hub := preprocessor is not None and plain is None:
            kind = type(preprocessor.tokenizer).__name__
            log.info("The HTTP process imports KerasHub for the tokenizer %s", kind)
            names = "chat_template", "tool_format"
            plain = preset, {name: getattr(preprocessor, name, None) for name in names}
        with contextlib.suppress(OSError):  # the process has ended, as `run_scheduler` finds
            self._connection.send((sys.path, needs_hub))
            self._connection.send((plain, engine.limits, scheduler.stats(), app, server))
        for number in SIGNALS:
            signal.signal(number, lambda number, _: self._process.send_signal(number))
        has_failed = run_scheduler(scheduler, self._connection)
        engine.close()
        return 1 if self._process.wait() or has_failed else 0


def run_scheduler(scheduler, connection):
    """Lets a `Scheduler` serve a `RemoteLink`, until the connection ends.

    Returns True if the other side ended without closing the scheduler, or the scheduler failed.
    """
    emit_end = scheduler.emit

    def emit(results):
        with contextlib.suppress(OSError):  # the other side has ended
            connection.send((scheduler.stats(), results))
        if results is None:
            emit_end(None)

    scheduler.emit = emit
    with contextlib.suppress(EOFError, OSError):
        while True:
            name, arguments, options = connection.recv()
            scheduler.send(name, *arguments, **options)
    has_failed = not scheduler.is_closed or scheduler.error is not None
    if has_failed:
        message = "The engine has failed" if scheduler.error else "The HTTP process has ended"
        log.error("%s: the server ends", message, exc_info=scheduler.error)
    scheduler.cancel_all()
    return has_failed


def load_preprocessor(preset, attributes):
    """Returns a preprocessor that only KerasHub has."""
    import keras_hub

    preprocessor = keras_hub.models.CausalLMPreprocessor.from_preset(preset)
    for name, value in attributes.items():
        setattr(preprocessor, name, value)
    return preprocessor


def run_server(server, link):
    """Runs a `Server` until its shutdown or the end of the engine process of a `RemoteLink`."""

    def read():
        if not link.read():
            loop.remove_reader(link.connection)
            server.should_exit = True

    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        loop = runner.get_loop()
        loop.add_reader(link.connection, read)
        runner.run(server.serve())
    if link.has_failed:
        log.error("The engine process has ended")


def serve_http(listener, connection):
    """Serves HTTP until a signal, or the end of the engine process; returns the exit code."""
    from keras_recurrent.serving.server import Server, create_app

    preprocessor, limits, stats, app, options = connection.recv()
    if isinstance(preprocessor, tuple):
        preprocessor = load_preprocessor(*preprocessor)
    logging.basicConfig(level=logging.WARNING)
    log.setLevel(logging.INFO)
    link = RemoteLink(connection, stats)
    engine = EngineClient(link, preprocessor, limits)
    server = Server(create_app(engine, **app), listener, **options)
    # The event loop must not wait 5 ms, Python's default, for a thread that tokenizes a prompt.
    sys.setswitchinterval(1e-4)
    gc.collect()
    gc.freeze()  # collections stop all threads, and are short if they skip these objects
    gc.set_threshold(10_000)  # a request creates hundreds of objects
    for number in SIGNALS:  # uvicorn raises them again after it has ended
        signal.signal(number, lambda *_: None)
    run_server(server, link)
    return 1 if link.has_failed else 0
