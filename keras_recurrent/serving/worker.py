"""The thread of an engine, which owns the device."""

import threading

from keras_recurrent.serving.request import EngineClosed


class Worker:
    """Runs a `Scheduler` until `close` is called and all sequences have ended.

    Attributes:
        changed: a `threading.Condition` that is notified of new sequences and of `close`.
        is_closed: boolean, True after `close` and after a failure.
        error: the `EngineClosed` of a failure, or None.
    """

    def __init__(self, scheduler, prefixes):
        self._scheduler, self._prefixes = scheduler, prefixes
        self.changed, self.is_closed, self.error = threading.Condition(), False, None

    def run(self):
        try:
            while True:
                with self.changed:
                    while self._scheduler.is_idle and not self.is_closed:
                        self.changed.wait()
                if self._scheduler.is_idle:
                    break
                self._scheduler.advance()
        except BaseException as error:
            failure = EngineClosed(f"The engine failed: {error!r}")
            failure.__cause__ = error
            with self.changed:
                self.is_closed, self.error = True, failure
            self._scheduler.fail(failure)
        finally:
            self._scheduler.batch.close()
            self._prefixes.close()

    def close(self):
        """Ends `run` after the last sequence; no sequences are added from now on."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()
